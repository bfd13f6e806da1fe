"""`pd-bench programs`: what the prefix cache gives programs that call a model many times.

Reading order: :mod:`pd.bench.programs.workloads` (the programs and their data),
:mod:`pd.bench.programs.recorder` (the requests that they send), :mod:`pd.bench.programs.optimum`
(the best hit rate of these requests), :mod:`pd.bench.programs.runner`,
:mod:`pd.bench.programs.command`.
"""
