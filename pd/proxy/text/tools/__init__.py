"""How families of models write tool calls, and how we read them.

A family (:mod:`pd.proxy.text.tools.families`) has a parser for the model's text, and structural
tags that keep the model from writing invalid calls.
"""
