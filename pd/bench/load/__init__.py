"""The load-generating half of the harness: schedules, datasets, clients, records, measures.

Nothing here imports another package than ``pd.core``, so it runs against any server.
"""
