"""Finds the likeliest of several options after a prompt.

The methods are those of SGLang's ``select``, which its documentation calls choices methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.core.messages import TokenLogprobs
    from pd.proxy.requests.native import ChoicesMethod


class OptionLogprobs(NamedTuple):
    """Log probabilities of the tokens of one option, which has at least one.

    Attributes:
        start: position of the option's first token in the prompt and option together.
        conditional: log probabilities after the prompt.
        unconditional: log probabilities without the prompt, so the first token has none; empty if
            the method does not need them.
    """

    start: int
    conditional: Sequence[TokenLogprobs]
    unconditional: Sequence[TokenLogprobs] = ()

    @property
    def mean(self) -> float:
        """Mean of ``conditional``."""
        return _average(self.conditional)

    def get_token(self, position: int) -> tuple[int, int] | None:
        """Return the start and the token id at a position of the option; None after its end.

        Two options have equal keys only if they have the same token at the same place.
        """
        if position >= len(self.conditional):
            return None
        return self.start, self.conditional[position].token_id

    def get_logprob(self, position: int) -> float:
        """Return the log probability at a position of the option; the mean after its end."""
        if position >= len(self.conditional):
            return self.mean
        return self.conditional[position].logprob or 0.0


def _average(entries: Sequence[TokenLogprobs]) -> float:
    # A token without a log probability counts as certain.
    return sum(entry.logprob or 0.0 for entry in entries) / len(entries)


def needs_unconditional(method: ChoicesMethod) -> bool:
    """Tell whether the method needs log probabilities without the prompt."""
    return method == "unconditional_likelihood"


def score_option(method: ChoicesMethod, option: OptionLogprobs) -> float:
    """Return the number by which a method compares options. Higher is better."""
    if method == "greedy_token":
        return option.get_logprob(0)
    if method == "unconditional_likelihood":
        return option.mean - _average(option.unconditional)
    return option.mean


def choose_best(method: ChoicesMethod, options: Sequence[OptionLogprobs]) -> int:
    """Return the index of the method's choice; the first of equal options."""
    if method == "greedy_token":
        return _choose_greedily(options)
    return max(range(len(options)), key=lambda number: score_option(method, options[number]))


def _choose_greedily(options: Sequence[OptionLogprobs]) -> int:
    """Choose token by token: keep the options with the likeliest token at each position.

    An option that has ended competes with its mean log probability. We compare token ids instead
    of log probabilities, because those of equal tokens may differ by a rounding: the options may
    be computed in different batches.
    """
    left, position = list(range(len(options))), 0
    while len(left) > 1:
        values = [options[number].get_logprob(position) for number in left]
        likeliest = left[values.index(max(values))]
        token = options[likeliest].get_token(position)
        if token is None:
            return likeliest
        left = [number for number in left if options[number].get_token(position) == token]
        position += 1
    return left[0]
