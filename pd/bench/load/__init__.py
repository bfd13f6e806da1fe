"""The load generator: schedules, datasets, clients, records and measures.

It imports only ``pd.core`` and ``pd.util``, so it runs on any host and against any server.
"""
