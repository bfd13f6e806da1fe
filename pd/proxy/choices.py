"""Choice by probability: which of several options a model finds likeliest after a prompt.

The methods are those of SGLang's ``select`` (its documentation calls them choices methods).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.core.messages import TokenLogprobs

ChoicesMethod = Literal["token_length_normalized", "greedy_token", "unconditional_likelihood"]


class OptionLogprobs(NamedTuple):
    """Log probabilities of the tokens of one option, at least one.

    Attributes:
        start: position of the first of the tokens in the prompt and option together.
        conditional: with the prompt before them.
        unconditional: with nothing before them, so the first has none; empty where the method does
            not need them.
    """

    start: int
    conditional: Sequence[TokenLogprobs]
    unconditional: Sequence[TokenLogprobs] = ()

    @property
    def mean(self) -> float:
        """Mean log probability of the tokens after the prompt."""
        return _mean(self.conditional)

    def token(self, position: int) -> tuple[int, int] | None:
        """Return a key of the token at a position of the option; equal for options with the same
        token in the same place, and None behind the end."""
        if position >= len(self.conditional):
            return None
        return self.start, self.conditional[position].token_id

    def logprob(self, position: int) -> float:
        """Log probability of the token at a position; behind the end the mean."""
        if position >= len(self.conditional):
            return self.mean
        return self.conditional[position].logprob or 0.0


def _mean(entries: Sequence[TokenLogprobs]) -> float:
    """Mean log probability. A token without one counts as certain."""
    return sum(entry.logprob or 0.0 for entry in entries) / len(entries)


def needs_unconditional(method: ChoicesMethod) -> bool:
    """Whether the method compares with log probabilities without the prompt."""
    return method == "unconditional_likelihood"


def score(method: ChoicesMethod, option: OptionLogprobs) -> float:
    """The number by which a method compares options, the higher the better."""
    if method == "greedy_token":
        return option.logprob(0)
    if method == "unconditional_likelihood":
        return option.mean - _mean(option.unconditional)
    return option.mean


def best(method: ChoicesMethod, options: Sequence[OptionLogprobs]) -> int:
    """Number of the option that the method chooses; the first of equal ones."""
    if method == "greedy_token":
        return _greedy(options)
    return max(range(len(options)), key=lambda number: score(method, options[number]))


def _greedy(options: Sequence[OptionLogprobs]) -> int:
    """The option with the likeliest first token; among those that begin with this token the one
    with the likeliest second token, and so on.

    An option that has ended is compared with longer ones by its mean log probability. Equal tokens
    are told by their ids: their log probabilities may differ by a rounding, since options are
    computed in different batches.
    """
    left, position = list(range(len(options))), 0
    while len(left) > 1:
        values = [options[number].logprob(position) for number in left]
        likeliest = left[values.index(max(values))]
        token = options[likeliest].token(position)
        if token is None:
            return likeliest
        left = [number for number in left if options[number].token(position) == token]
        position += 1
    return left[0]
