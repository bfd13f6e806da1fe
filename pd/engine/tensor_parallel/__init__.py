"""A model on several devices, with one process for each (``--tp-size``).

Rank 0 is the node. Only it has requests, a scheduler and a sampler. The other ranks are workers
(:mod:`pd.engine.tensor_parallel.worker`). Each holds a part of the weights and of every page of the
KV cache. Rank 0 (:mod:`pd.engine.tensor_parallel.leader`) sends them each step over a socket pair,
and they read no other input. The devices of the ranks exchange data through
:mod:`pd.engine.tensor_parallel.group`.
"""
