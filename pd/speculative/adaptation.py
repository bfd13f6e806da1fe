"""Chooses how many tokens to draft for each sequence, so that tokens per second are highest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from pd.core.request import Sequence as TokenSequence

    FloatArray = npt.NDArray[np.float64]

# What is believed of a sequence before its first draft: this share of so many tokens was accepted.
_PRIOR_SHARE, _PRIOR_WEIGHT = 0.75, 2.0
# How much of what was seen remains after each draft, and after each step without one: a sequence
# for which drafting does not pay is tried again after a hundred steps or so.
_KEPT, _KEPT_AT_REST = 0.9, 0.98
# Steps for which a batch that drafts nothing is not asked again.
REST_STEPS = 16


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step, measured at the start for some sizes; linear in between and beyond.

    Attributes:
        sizes: tokens of a step, float64, increasing.
        plain: seconds of steps of one token for each of ``sizes`` sequences.
        verify: seconds of steps of ``sizes`` tokens in all, several for each sequence.
        draft: seconds in which a token is drafted for each of ``sizes`` sequences.
    """

    sizes: FloatArray
    plain: FloatArray
    verify: FloatArray
    draft: FloatArray

    def at(self, costs: FloatArray, sizes: FloatArray | float) -> FloatArray:
        """Interpolate ``costs``, in seconds, for sizes between and beyond the measured ones."""
        inside = np.interp(sizes, self.sizes, costs)
        beyond = np.maximum(np.asarray(sizes) - self.sizes[-1], 0.0)
        slope = costs[-1] / self.sizes[-1]
        result: FloatArray = inside + beyond * slope
        return result


@dataclass(slots=True)
class _Acceptance:
    """Drafted tokens of a sequence that were looked at, and those accepted; older ones weigh less.
    A token after a rejected one is not looked at."""

    tried: float = 0.0
    accepted: float = 0.0

    @property
    def share(self) -> float:
        """The probability that the next drafted token is accepted."""
        accepted = self.accepted + _PRIOR_SHARE * _PRIOR_WEIGHT
        return accepted / (self.tried + _PRIOR_WEIGHT)

    def fade(self, kept: float) -> None:
        self.tried *= kept
        self.accepted *= kept


class DraftLengths:
    """Chooses draft lengths by each sequence's acceptance and by the cost of the step. The caller
    holds the node's lock.

    The ``j``-th drafted token of a sequence is accepted with probability ``p**j``, where ``p`` is
    the share of its drafted tokens that were accepted lately. The likeliest tokens of all sequences
    are drafted first, as long as the expected tokens per second grow.

    Args:
        costs: seconds of steps; if None, as many tokens as possible are drafted.

    Attributes:
        simulate: says how many tokens of a draft of so many count as accepted, for benchmarks
            without trained weights; None where the model decides.
    """

    def __init__(self, costs: StepCosts | None) -> None:
        self.simulate: Callable[[int], int] | None = None
        self._costs = costs
        self._seen: dict[TokenSequence, _Acceptance] = {}
        self._rest = 0

    @property
    def rests(self) -> bool:
        """Whether the next step drafts nothing, whatever its sequences are."""
        return self._rest > 0

    def choose(self, sequences: Sequence[TokenSequence], limits: Sequence[int]) -> list[int]:
        """Choose the number of tokens to draft for each sequence, at most ``limits[i]``."""
        if self._costs is None:
            return list(limits)
        if self._rest:
            self._rest -= 1
            self._fade(sequences)
            return [0] * len(limits)
        if not sequences:
            return []
        seen = [self._seen.setdefault(sequence, _Acceptance()) for sequence in sequences]
        lengths = self._best(np.array([each.share for each in seen]), np.array(limits))
        if not lengths.any():
            self._rest = REST_STEPS
        self._fade([s for s, length in zip(sequences, lengths, strict=True) if not length])
        return [int(length) for length in lengths]

    def observe(self, sequence: TokenSequence, drafted: int, accepted: int) -> None:
        """Note how many tokens of a draft were accepted when it was verified."""
        seen = self._seen.get(sequence)
        if seen is not None:
            seen.fade(_KEPT)
            seen.tried += min(accepted + 1, drafted)
            seen.accepted += accepted

    def forget(self, sequence: TokenSequence) -> None:
        """Drop the record of a sequence."""
        self._seen.pop(sequence, None)

    def _fade(self, sequences: Sequence[TokenSequence]) -> None:
        for sequence in sequences:
            if (seen := self._seen.get(sequence)) is not None:
                seen.fade(_KEPT_AT_REST)

    def _best(self, shares: FloatArray, limits: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The lengths with the most expected tokens per second."""
        costs = self._costs
        assert costs is not None
        batch, deepest = len(shares), int(limits.max())
        best = np.zeros(batch, dtype=np.int64)
        best_rate = float(batch / costs.at(costs.plain, batch))
        depths = np.arange(1, deepest + 1)
        likely = np.where(depths <= limits[:, None], shares[:, None] ** depths, 0.0)
        drafting = float(costs.at(costs.draft, batch))
        for depth in range(1, deepest + 1):
            chances = likely[:, :depth].ravel()
            order = np.argsort(-chances, kind="stable")
            order = order[chances[order] > 0]
            if len(order) == 0:
                break
            tokens = batch + np.cumsum(chances[order])
            sizes = batch + np.arange(1, len(order) + 1, dtype=np.float64)
            rates = tokens / (costs.at(costs.verify, sizes) + depth * drafting)
            most = int(rates.argmax())
            if rates[most] > best_rate:
                best_rate = float(rates[most])
                best = np.bincount(order[: most + 1] // depth, minlength=batch)
        return best
