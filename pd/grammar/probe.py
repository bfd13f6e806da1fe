"""Measures the cost of a grammar's outputs in the compiling process, before a node pays it.

A grammar of a few lines compiles at once but may have expensive outputs. The number of ways to
parse an output may grow without limit, as in ``root ::= root root | root root root | "a"``. Or
every mask may take long, as in ``root ::= ([a-z]? [a-z]? [a-z]?)*`` with a hundred letters.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from pd.engine.token_rules import MASK_SECONDS, limit_advance_seconds
from pd.grammar.rule_texts import find_constants, find_recursive_rules
from pd.grammar.token_characters import may_follow
from pd.grammar.xgrammar_library import fill_mask, make_matcher

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd.grammar.xgrammar_library import Compiled, Compiler

# Bytes in the order in which we try them. Closing characters come first, so outputs have many
# parts.
_ORDER = [bytes((value,)) for value in (*b'"}],:', *range(0x20, 0x80), *range(0x80, 0x100), 10, 9)]
# Length of outputs that repeat a byte, and of outputs that proceed to other parts, in bytes.
_REPEATING, _VARIED = 64, 32
# First and second bytes of outputs. If several first bytes allow the same second bytes, we try only
# one of them, and `_KINDS` first bytes in all.
_FIRST = [bytes((value,)) for value in (*range(0x20, 0x7F), 10, 9, 0xC3, 0xE4, 0xF0)]
_SECOND = [bytes((value,)) for value in b" \n\"'#(),-./059:;<=ABaz[\\]_{|}\x80\xc3\xe4"]
_KINDS = 32
# Tried tokens: the longest with each first byte, and the longest repetitions of one byte.
_LONGEST, _REPEATED = 24, 8
# Shorter tokens cost about as much as single bytes.
_LONG = 8
# Number of followed outputs, masks of each, and processor time for all of them: usual
# time, and time after a slow mask.
_WALKS, _MASKS = 4, 16
_WALKS_SECONDS, _SLOW_WALKS_SECONDS = 0.05, 0.5
# We measure a mask of this duration again, because the processor may have been interrupted.
_LONG_MASK = 0.005
# Constants tried before each mask.
_CONSTANTS = 512
# Processor time after which we try no further rule by itself.
_RULES_SECONDS = 0.1


def choose_long_tokens(tokens: Sequence[bytes]) -> list[bytes]:
    """Choose the tokens that probably take longest to add to an output, the shortest first."""
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


def find_slow_output(compiled: Compiled, tokens: Sequence[bytes] = ()) -> str | None:
    """Try some short outputs, and return the reason if one takes too long.

    Args:
        tokens: from :func:`choose_long_tokens`. We try each at the beginning and after one byte.
    """
    for grammar in compiled.grammars:
        state = make_matcher(grammar)
        reason = _try_bytes(state, _VARIED, repeats=False)
        if reason is not None:
            return reason
        for _ in _visit_beginnings(state):
            reason = _try_bytes(state, _REPEATING, repeats=True) or _try_tokens(state, tokens)
            if reason is not None:
                return reason
    return None


def find_slow_rule(compiled: Compiled, compiler: Compiler) -> str | None:
    """Try short outputs of recursive rules, and return the reason if one takes too long.

    We try each rule as a whole grammar, because a long text may precede it in the real one.
    """
    began = time.thread_time()
    for name, text in find_recursive_rules(str(compiled.free.grammar)):
        try:
            state = make_matcher(compiler.compile_rule(name, text))
        except ValueError:
            continue  # a rule with tokens, say: the node finds its cost when it writes outputs
        reason = _try_bytes(state, _REPEATING, repeats=True)
        if reason is not None:
            return reason
        if time.thread_time() - began > _RULES_SECONDS:
            break
    return None


def time_masks(compiled: Compiled, tokens: Sequence[bytes]) -> float:
    """Follow some outputs, and return the processor time of the slowest mask.

    Args:
        tokens: the whole vocabulary.
    """
    walk = _Walk(compiled, tokens)
    for number in range(_WALKS):
        walk.follow_output(random.Random(number))
    return walk.longest


class _Walk:
    """Follows outputs of a grammar.

    Attributes:
        longest: processor time of the slowest mask.
    """

    def __init__(self, compiled: Compiled, tokens: Sequence[bytes]) -> None:
        self._grammar, self._tokens = compiled.free, tokens
        self._mask = np.zeros(-(-len(tokens) // 32), np.int32)
        texts = find_constants(str(compiled.free.grammar))
        self._constants = list(itertools.islice(texts, _CONSTANTS))
        self._began = time.thread_time()
        self.longest = 0.0

    def follow_output(self, rng: random.Random) -> None:
        """Follow one output. Skip constants, and try the least recently skipped ones first."""
        state, last = make_matcher(self._grammar), b""
        for _ in range(_MASKS):
            self._skip_constants(state)
            if state.is_terminated() or self._is_over():
                return
            self._measure_mask(state)
            text = self._choose_text(last, rng)
            if text is None:
                return
            if state.accept_string(text):
                last = text

    def _is_over(self) -> bool:
        limit = _SLOW_WALKS_SECONDS if self.longest > _LONG_MASK else _WALKS_SECONDS
        return time.thread_time() - self._began > limit or self.longest > MASK_SECONDS

    def _skip_constants(self, state: Any) -> None:
        for text in list(self._constants):
            if state.accept_string(text):
                self._constants.remove(text)
                self._constants.append(text)

    def _measure_mask(self, state: Any) -> None:
        took = self._time_fill(state)
        if _LONG_MASK < took < MASK_SECONDS:
            took = min(took, self._time_fill(state))
        self.longest = max(self.longest, took)

    def _time_fill(self, state: Any) -> float:
        began = time.thread_time()
        fill_mask(state, self._mask)
        return time.thread_time() - began

    def _choose_text(self, last: bytes, rng: random.Random) -> bytes | None:
        """Choose an allowed text: the last one again, or a random token."""
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[: len(self._tokens)]
        allowed = np.flatnonzero(bits)
        if not len(allowed):
            return None
        some = [self._tokens[token] for token in rng.choices(allowed.tolist(), k=8)]
        texts = [text for text in some if text]
        if last and rng.random() < 0.5:
            return last
        return texts[0] if texts else None


def _try_bytes(state: Any, length: int, *, repeats: bool) -> str | None:
    """Add bytes to an output and take them back. Return a reason if that takes too long."""
    order, began, added = list(_ORDER), time.thread_time(), 0
    reason = None
    while added < length and reason is None:
        allowed = next((byte for byte in order if state.accept_string(byte)), None)
        added += allowed is not None
        took, limit = time.thread_time() - began, limit_advance_seconds(max(1, added))
        if took > limit:
            reason = _describe_slowness(f"{max(1, added)} characters", took, limit)
        if allowed is None:
            break
        if repeats:
            order.remove(allowed)
            order.insert(0, allowed)
    if added:
        state.rollback(added)
    return reason


def _try_tokens(state: Any, tokens: Sequence[bytes]) -> str | None:
    """Add tokens one at a time and take each back. Return a reason if that takes too long."""
    limit = limit_advance_seconds(1)
    for token in tokens:
        began = time.thread_time()
        if state.accept_string(token):
            state.rollback(1)
        took = time.thread_time() - began
        if took > limit:
            return _describe_slowness(f"a token of {len(token)} bytes", took, limit)
    return None


def _describe_slowness(added: str, took: float, limit: float) -> str:
    return f"adding {added} to an output takes {took:.2f} s of processor time (limit {limit:.2f} s)"


def _visit_beginnings(state: Any) -> Iterator[None]:
    """Put an output into its empty state, and then into the state after a byte of each kind."""
    yield
    known, tried = set[tuple[bool, ...]](), 0
    for byte in _FIRST:
        if tried == _KINDS:
            return
        if not state.accept_string(byte):
            continue
        kind = tuple(may_follow(state, second) for second in _SECOND)
        if kind not in known:
            if any(kind):
                known.add(kind)
            tried += 1
            yield
        state.rollback(1)
