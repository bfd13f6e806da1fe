"""One stream of tokens out of what two nodes say about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pd.core.errors import NodeFailedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd.core.messages import Finish, Output, TokenLogprobs

# Above the token ids of any model whose vocabulary is not known.
_ANY_VOCABULARY = 1 << 31


class DisagreementError(NodeFailedError):
    """A node repeats a token otherwise than it is known."""


class NewTokens(NamedTuple):
    """Tokens that continue a choice, each position once and in order, from ``position`` on."""

    position: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish: Finish | None


def check_logprobs(entries: Iterable[TokenLogprobs], vocab_size: int | None) -> None:
    """Raise NodeFailedError for a token outside the vocabulary (None: of any size), or for a place
    with another number of likeliest tokens than of their log probabilities."""
    limit = vocab_size or _ANY_VOCABULARY
    for entry in entries:
        ids, logprobs = entry.top_ids, entry.top_logprobs
        if len(ids) != len(logprobs):
            raise NodeFailedError(
                f"a node sent {len(logprobs)} log probabilities for {len(ids)} likeliest tokens"
            )
        if not 0 <= entry.token_id < limit or (ids and not 0 <= min(ids) <= max(ids) < limit):
            raise _outside(limit)


def _outside(limit: int) -> NodeFailedError:
    return NodeFailedError(f"a node sent a token id outside the vocabulary of {limit}")


class TokenMerger:
    """Puts a choice's tokens in order, whoever sent them.

    The prefill node sends position 0; the decode node repeats it and sends all others. Usually the
    prefill node is first, but nothing orders two connections. A node's own messages are ordered,
    so the only gap that may still close is position 0.

    Attributes:
        token_ids: all tokens so far.
    """

    __slots__ = (
        "_early",
        "_early_end",
        "_max_tokens",
        "_vocab_size",
        "_with_logprobs",
        "token_ids",
    )

    def __init__(self, max_tokens: int, vocab_size: int | None, with_logprobs: bool) -> None:
        self.token_ids: list[int] = []
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._with_logprobs = with_logprobs
        self._early: list[Output] = []  # from the decode node, while position 0 is missing
        self._early_end = 1

    def accept(self, output: Output, *, first_may_come: bool) -> list[NewTokens]:
        """Take one message and return what became certain through it.

        Args:
            first_may_come: position 0 may still arrive from another node.

        Raises:
            DisagreementError: a contradiction.
            NodeFailedError: a gap that nothing can fill, or nonsense.
        """
        self._check(output)
        if output.position == len(self.token_ids) and not self._early:
            # All but the first few messages of an answer.
            self.token_ids += output.token_ids
            new = NewTokens(output.position, output.token_ids, output.logprobs or [], output.finish)
            return [new] if output.token_ids or output.finish else []
        if not self.token_ids and output.position > 0:
            if not first_may_come or output.position != self._early_end:
                raise self._gap(output)
            self._early.append(output)
            self._early_end += len(output.token_ids)
            return []
        known = len(self.token_ids)
        found = [self._append(output)]
        if self.token_ids:
            early, self._early = self._early, []
            try:
                found += [self._append(held) for held in early]
            except NodeFailedError:
                del self.token_ids[known:]  # nothing is returned of them
                raise
        return [tokens for tokens in found if tokens.token_ids or tokens.finish]

    def forget_early(self) -> None:
        """Forget tokens behind a gap, which other nodes will send again."""
        self._early.clear()
        self._early_end = 1

    def _append(self, output: Output) -> NewTokens:
        known = len(self.token_ids) - output.position
        if known < 0:
            raise self._gap(output)
        repeated = output.token_ids[:known]
        if repeated != self.token_ids[output.position : output.position + len(repeated)]:
            raise DisagreementError(
                f"the nodes disagree about the tokens from position {output.position} on: "
                f"{self.token_ids[output.position :][: len(repeated)]} and {repeated}"
            )
        fresh, position = output.token_ids[known:], len(self.token_ids)
        self.token_ids += fresh
        # A finish that comes with nothing but tokens from further back is out of date.
        at_end = output.position + len(output.token_ids) == len(self.token_ids)
        logprobs = (output.logprobs or [])[known:]
        return NewTokens(position, fresh, logprobs, output.finish if at_end else None)

    def _check(self, output: Output) -> None:
        count = len(output.token_ids)
        if output.position < 0 or output.position + count > self._max_tokens:
            raise NodeFailedError(
                f"a node sent {count} tokens at position {output.position} of at most "
                f"{self._max_tokens}"
            )
        limit = self._vocab_size or _ANY_VOCABULARY
        if count and (min(output.token_ids) < 0 or max(output.token_ids) >= limit):
            raise _outside(limit)
        if self._with_logprobs:
            entries = output.logprobs or []
            if len(entries) != count:
                raise NodeFailedError(
                    f"a node sent {len(entries)} log probabilities for {count} tokens"
                )
            check_logprobs(entries, self._vocab_size)

    def _gap(self, output: Output) -> NodeFailedError:
        return NodeFailedError(
            f"tokens are missing: {len(self.token_ids)} arrived, the next begin at position "
            f"{output.position}"
        )
