"""Tool calls: what clients declare, how each family of models writes calls, how they are read.

A family (:mod:`pd.proxy.tools.families`) has a parser that reads what the model writes, piece by
piece, and structural tags that make it write nothing but valid calls.
"""
