"""Structured output: grammars constrain the tokens of a choice.

Reading order: :mod:`pd.core.grammar` (the grammar in a request), :mod:`pd.grammar.grammars` (from
its text to a compiled grammar), :mod:`pd.grammar.compiler` and :mod:`pd.grammar.child` (compiling
processes), :mod:`pd.structured.schema_rewriting` and :mod:`pd.structured.pattern_rewriting`
(schemas and patterns for xgrammar), :mod:`pd.grammar.lengths` (strings of bounded length),
:mod:`pd.grammar.rules` (the state of one choice).
"""
