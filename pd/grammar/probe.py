"""Finds out whether adding to an output takes longer and longer, before a node does so.

A grammar of a few lines may have outputs that can be read in ever more ways, such as
``root ::= root root | root root root | "a"``. Compiling it takes no time.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pd.engine.token_rules import most_seconds
from pd.grammar.xgrammar_library import matcher

if TYPE_CHECKING:
    from pd.grammar.xgrammar_library import Compiled

# What ends things comes first, so that outputs of many parts have some of them.
_ORDER = [bytes((value,)) for value in (*b'"}],:', *range(0x20, 0x80), *range(0x80, 0x100), 10, 9)]
# Bytes of an output that repeats what it has, and of one that goes on to other parts.
_REPEATING, _VARIED = 64, 32


def slow_output(compiled: Compiled) -> str | None:
    """Try two short outputs and return the reason why one takes too long; None if neither does."""
    for grammar in compiled.grammars:
        for length, repeats in ((_REPEATING, True), (_VARIED, False)):
            state, order, began = matcher(grammar), list(_ORDER), time.thread_time()
            for count in range(1, length + 1):
                found = next((byte for byte in order if state.accept_string(byte)), None)
                took, most = time.thread_time() - began, most_seconds(count)
                if took > most:
                    return (
                        f"adding {count} characters to an output takes {took:.2f} s of processor "
                        f"time; at most {most:.2f} may be taken"
                    )
                if found is None:
                    break
                if repeats:
                    order.remove(found)
                    order.insert(0, found)
    return None
