"""`pd-bench report`: one HTML page about runs of the harness.

Reading order: :mod:`pd.bench.page.runs` (what result files say), :mod:`pd.bench.page.charts`,
:mod:`pd.bench.page.html`, :mod:`pd.bench.page.command`.
"""
