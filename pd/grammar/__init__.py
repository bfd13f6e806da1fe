"""Structured output: grammars that constrain which tokens a choice may draw.

Reading order: :mod:`pd.core.grammar` (what a request asks for), :mod:`pd.grammar.grammars` (from a
text to a compiled grammar), :mod:`pd.grammar.compiler` and :mod:`pd.grammar.child` (processes that
compile), :mod:`pd.grammar.json_schemas` and :mod:`pd.grammar.patterns` (what schemas are rewritten
to), :mod:`pd.grammar.lengths` (strings of bounded length), :mod:`pd.grammar.rules` (the state of
one choice).
"""
