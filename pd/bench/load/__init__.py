"""The load-generating half of the harness: schedules, datasets, clients, records, measures.

Nothing here imports another room than ``pd.core``, so it runs against any server.
"""
