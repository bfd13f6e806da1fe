"""Finds out whether adding to an output takes longer and longer, before a node does so.

A grammar of a few lines may have outputs that can be read in ever more ways, such as
``root ::= root root | root root root | "a"``. Compiling it takes no time.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pd.engine.token_rules import most_seconds
from pd.grammar.xgrammar_library import matcher

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd.grammar.xgrammar_library import Compiled

# What ends things comes first, so that outputs of many parts have some of them.
_ORDER = [bytes((value,)) for value in (*b'"}],:', *range(0x20, 0x80), *range(0x80, 0x100), 10, 9)]
# Bytes of an output that repeats what it has, and of one that goes on to other parts.
_REPEATING, _VARIED = 64, 32
# Bytes that begin outputs. Of those behind which the same of some bytes may come, one is tried, and
# so many in all.
_FIRST = [bytes((value,)) for value in (*range(0x20, 0x7F), 10, 9, 0xC3, 0xE4, 0xF0)]
_SECOND = [bytes((value,)) for value in b" \n\"'#(),-./059:;<=ABaz[\\]_{|}\x80\xc3\xe4"]
_KINDS = 32
# Tokens that are tried: the longest of those that begin with one byte, and of one byte repeated.
_LONGEST, _REPEATED = 24, 8
# Shorter tokens are like the bytes of an output.
_LONG = 8


def long_tokens(tokens: Sequence[bytes]) -> list[bytes]:
    """Those of a vocabulary that take longest to add to an output, the shortest first."""
    longest: dict[int, bytes] = {}
    repeated: dict[int, bytes] = {}
    for token in tokens:
        if len(token) < _LONG:
            continue
        first = token[0]
        if len(token) > len(longest.get(first, b"")):
            longest[first] = token
        if len(token) > len(repeated.get(first, b"")) and token.count(token[:1]) == len(token):
            repeated[first] = token
    by_length = (sorted(each.values(), key=len, reverse=True) for each in (longest, repeated))
    some, others = by_length
    return sorted({*some[:_LONGEST], *others[:_REPEATED]}, key=lambda token: (len(token), token))


def slow_output(compiled: Compiled, tokens: Sequence[bytes] = ()) -> str | None:
    """Try some short outputs and return the reason why one takes too long; None if none does.

    Args:
        tokens: from :func:`long_tokens`; each is tried after no byte and after one.
    """
    for grammar in compiled.grammars:
        state = matcher(grammar)
        found = _slow_bytes(state, _VARIED, repeats=False)
        if found is not None:
            return found
        for _ in _beginnings(state):
            found = _slow_bytes(state, _REPEATING, repeats=True) or _slow_token(state, tokens)
            if found is not None:
                return found
    return None


def _slow_bytes(state: Any, length: int, *, repeats: bool) -> str | None:
    """Add bytes to an output and take them back; return why that takes too long."""
    order, began, added = list(_ORDER), time.thread_time(), 0
    reason = None
    while added < length and reason is None:
        found = next((byte for byte in order if state.accept_string(byte)), None)
        added += found is not None
        took, most = time.thread_time() - began, most_seconds(max(1, added))
        if took > most:
            reason = _reason(f"{max(1, added)} characters", took, most)
        if found is None:
            break
        if repeats:
            order.remove(found)
            order.insert(0, found)
    if added:
        state.rollback(added)
    return reason


def _slow_token(state: Any, tokens: Sequence[bytes]) -> str | None:
    """Add each of some tokens and take it back; return why that takes too long."""
    most = most_seconds(1)
    for token in tokens:
        began = time.thread_time()
        if state.accept_string(token):
            state.rollback(1)
        took = time.thread_time() - began
        if took > most:
            return _reason(f"a token of {len(token)} bytes", took, most)
    return None


def _reason(added: str, took: float, most: float) -> str:
    return (
        f"adding {added} to an output takes {took:.2f} s of processor time; at most {most:.2f} "
        "may be taken"
    )


def _beginnings(state: Any) -> Iterator[None]:
    """Put an output into the states in which it is empty, and after a byte of each kind."""
    yield
    known, tried = set[tuple[bool, ...]](), 0
    for byte in _FIRST:
        if tried == _KINDS:
            return
        if not state.accept_string(byte):
            continue
        kind = tuple(_takes(state, second) for second in _SECOND)
        if kind not in known:
            if any(kind):
                known.add(kind)
            tried += 1
            yield
        state.rollback(1)


def _takes(state: Any, byte: bytes) -> bool:
    if not state.accept_string(byte):
        return False
    state.rollback(1)
    return True
