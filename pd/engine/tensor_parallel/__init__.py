"""A model on several devices, a process for each (``--tp-size``).

Rank 0 is the node: it alone has requests, a scheduler and a sampler. The other ranks are workers
(:mod:`pd.engine.tensor_parallel.worker`), each with a part of the weights and of every page of the
KV cache; they compute what rank 0 tells them to (:mod:`pd.engine.tensor_parallel.leader`), over a
socket pair that is all they listen to. What the ranks' devices exchange goes through
:mod:`pd.engine.tensor_parallel.group`.
"""
