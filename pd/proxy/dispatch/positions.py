"""Merges the outputs of two nodes into one stream of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pd.core.errors import NodeFailedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd.core.messages import Finish, Output, TokenLogprobs

# Exceeds all token ids of models with an unknown vocabulary.
_ANY_VOCABULARY = 1 << 31


class DisagreementError(NodeFailedError):
    """A node repeated a token with a different value."""


class NewTokens(NamedTuple):
    """Tokens to append to a choice from ``position`` on. Every position occurs once, in order."""

    position: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish: Finish | None


def check_logprobs(entries: Iterable[TokenLogprobs], vocab_size: int | None) -> None:
    """Check log probabilities.

    Raises NodeFailedError for tokens outside the vocabulary (None: any size) and for different
    numbers of likeliest tokens and their log probabilities.
    """
    limit = vocab_size or _ANY_VOCABULARY
    for entry in entries:
        ids, logprobs = entry.top_ids, entry.top_logprobs
        if len(ids) != len(logprobs):
            raise NodeFailedError(
                f"a node sent {len(logprobs)} log probabilities for {len(ids)} likeliest tokens"
            )
        if not 0 <= entry.token_id < limit or (ids and not 0 <= min(ids) <= max(ids) < limit):
            raise _vocabulary_error(limit)


def _vocabulary_error(limit: int) -> NodeFailedError:
    return NodeFailedError(f"a node sent a token id outside the vocabulary of {limit}")


class TokenMerger:
    """Puts the tokens of a choice in order, no matter which node sent them.

    The prefill node sends position 0. The decode node repeats it and sends the rest. Usually the
    prefill node is first, but two connections have no common order. Each node's messages are in
    order, so only the gap at position 0 may still close.

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

    def merge_output(self, output: Output, *, first_may_come: bool) -> list[NewTokens]:
        """Merge an output, and return the tokens that are certain now.

        Args:
            first_may_come: position 0 may still arrive from the other node.

        Raises:
            DisagreementError: the output contradicts known tokens.
            NodeFailedError: the output leaves a permanent gap, or is invalid.
        """
        self._check_output(output)
        if output.position == len(self.token_ids) and not self._early:
            # Almost all messages of an answer take this path.
            self.token_ids += output.token_ids
            new = NewTokens(output.position, output.token_ids, output.logprobs or [], output.finish)
            return [new] if output.token_ids or output.finish else []
        if not self.token_ids and output.position > 0:
            if not first_may_come or output.position != self._early_end:
                raise self._gap_error(output)
            self._early.append(output)
            self._early_end += len(output.token_ids)
            return []
        known = len(self.token_ids)
        parts = [self._append_output(output)]
        if self.token_ids:
            early, self._early = self._early, []
            try:
                parts += [self._append_output(held) for held in early]
            except NodeFailedError:
                del self.token_ids[known:]  # we return nothing of them
                raise
        return [tokens for tokens in parts if tokens.token_ids or tokens.finish]

    def forget_early(self) -> None:
        """Forget tokens after a gap. Other nodes will send them again."""
        self._early.clear()
        self._early_end = 1

    def _append_output(self, output: Output) -> NewTokens:
        known = len(self.token_ids) - output.position
        if known < 0:
            raise self._gap_error(output)
        repeated = output.token_ids[:known]
        if repeated != self.token_ids[output.position : output.position + len(repeated)]:
            raise DisagreementError(
                f"the nodes disagree about the tokens from position {output.position} on: "
                f"{self.token_ids[output.position :][: len(repeated)]} and {repeated}"
            )
        fresh, position = output.token_ids[known:], len(self.token_ids)
        self.token_ids += fresh
        # A finish is outdated if all of its tokens were known.
        at_end = output.position + len(output.token_ids) == len(self.token_ids)
        logprobs = (output.logprobs or [])[known:]
        return NewTokens(position, fresh, logprobs, output.finish if at_end else None)

    def _check_output(self, output: Output) -> None:
        count = len(output.token_ids)
        if output.position < 0 or output.position + count > self._max_tokens:
            raise NodeFailedError(
                f"a node sent {count} tokens at position {output.position} of at most "
                f"{self._max_tokens}"
            )
        limit = self._vocab_size or _ANY_VOCABULARY
        if count and (min(output.token_ids) < 0 or max(output.token_ids) >= limit):
            raise _vocabulary_error(limit)
        if self._with_logprobs:
            entries = output.logprobs or []
            if len(entries) != count:
                raise NodeFailedError(
                    f"a node sent {len(entries)} log probabilities for {count} tokens"
                )
            check_logprobs(entries, self._vocab_size)

    def _gap_error(self, output: Output) -> NodeFailedError:
        return NodeFailedError(
            f"tokens are missing: {len(self.token_ids)} arrived, the next begin at position "
            f"{output.position}"
        )
