"""A model on several devices, a process for each (``--tp-size``).

Rank 0 is the node: it alone has requests, a scheduler and a sampler. The other ranks are workers
(:mod:`pd.engine.tensor_parallel.worker`), each with a part of the weights and of every page of the
KV cache; rank 0 (:mod:`pd.engine.tensor_parallel.leader`) sends them each step over a socket pair,
the only input that they read. The ranks' devices exchange data through
:mod:`pd.engine.tensor_parallel.group`.
"""
