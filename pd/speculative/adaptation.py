"""Chooses how many tokens to draft for each sequence, so that tokens per second are highest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pd.core.config import MAX_DRAFT_TOKENS
from pd.speculative.shape import DraftShape, rank_chances

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from pd.core.request import Sequence as TokenSequence
    from pd.engine.draft_tree import DraftTree

    FloatArray = npt.NDArray[np.float64]

# What is believed before the first draft of all: this share of so many tokens was accepted. Of a
# sequence it is believed that the share of all sequences was, until it has drafts of its own.
_PRIOR_SHARE, _PRIOR_WEIGHT = 0.75, 2.0
# How much of what was seen remains after each draft, and after each step without one: a sequence
# for which drafting does not pay is tried again after a hundred steps or so.
_KEPT, _KEPT_AT_REST = 0.9, 0.98
# The same for what was seen of all sequences.
_KEPT_OF_ALL = 0.98
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
        deeper: seconds for each further token of a draft, since most of what drafting takes the
            host, it takes once.
    """

    sizes: FloatArray
    plain: FloatArray
    verify: FloatArray
    draft: FloatArray
    deeper: FloatArray

    def at(self, costs: FloatArray, sizes: FloatArray | float) -> FloatArray:
        """Interpolate ``costs``, in seconds, for sizes between and beyond the measured ones."""
        inside = np.interp(sizes, self.sizes, costs)
        beyond = np.maximum(np.asarray(sizes) - self.sizes[-1], 0.0)
        slope = costs[-1] / self.sizes[-1]
        result: FloatArray = inside + beyond * slope
        return result


@dataclass(slots=True)
class _Acceptance:
    """Places at which the first guess of a sequence was looked at, and those at which it was right;
    older ones weigh less. Guesses after a wrong one are not looked at."""

    tried: float = 0.0
    accepted: float = 0.0

    def share(self, prior: float) -> float:
        """The probability that the first guess of the next token is right, which was ``prior``
        before any was seen."""
        return (self.accepted + prior * _PRIOR_WEIGHT) / (self.tried + _PRIOR_WEIGHT)

    def add(self, tried: int, accepted: int, kept: float) -> None:
        self.fade(kept)
        self.tried += tried
        self.accepted += accepted

    def fade(self, kept: float) -> None:
        self.tried *= kept
        self.accepted *= kept


class DraftLengths:
    """Chooses draft lengths by each sequence's acceptance and by the cost of the step. The caller
    holds the node's lock.

    The ``j``-th token of a chain is accepted with probability ``p**j``, where ``p`` is the share of
    a sequence's first guesses that were right lately, or at first that of all sequences; in a tree
    further guesses of the same token get their part of the rest
    (:func:`pd.speculative.shape.rank_chances`). The likeliest tokens of all sequences are drafted
    first, as long as the expected tokens per second grow.

    Args:
        costs: seconds of steps; if None, as many tokens as possible are drafted.
        shape: of the largest draft, by default a chain; smaller ones are its first tokens.

    Attributes:
        simulate: says how many tokens of a draft of so many count as accepted, for benchmarks
            without trained weights; None where the model decides.
    """

    def __init__(self, costs: StepCosts | None, shape: DraftShape | None = None) -> None:
        self._shape = shape or DraftShape.best(MAX_DRAFT_TOKENS, 1)
        self.simulate: Callable[[int], int] | None = None
        self._costs = costs
        self._seen: dict[TokenSequence, _Acceptance] = {}
        self._of_all = _Acceptance()
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
            self._of_all.fade(_KEPT_AT_REST)
            self._fade(sequences)
            return [0] * len(limits)
        if not sequences:
            return []
        seen = [self._seen.setdefault(sequence, _Acceptance()) for sequence in sequences]
        prior = self._of_all.share(_PRIOR_SHARE)
        lengths = self._best(np.array([each.share(prior) for each in seen]), np.array(limits))
        if not lengths.any():
            self._rest = REST_STEPS
            self._of_all.fade(_KEPT_AT_REST)
        self._fade([s for s, length in zip(sequences, lengths, strict=True) if not length])
        return [int(length) for length in lengths]

    def observe(self, sequence: TokenSequence, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Note which guesses of a draft were accepted when it was verified."""
        seen = self._seen.get(sequence)
        last = accepted[-1] if accepted else -1
        tried = len(accepted) + tree.followed[last + 1]
        right = sum(tree.first_guesses[guess] for guess in accepted)
        self._of_all.add(tried, right, _KEPT_OF_ALL)
        if seen is not None:
            seen.add(tried, right, _KEPT)

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
        batch, most = len(shares), int(limits.max())
        best = np.zeros(batch, dtype=np.int64)
        best_rate = float(batch / costs.at(costs.plain, batch))
        if most == 0:
            return best
        shape = self._shape.first(most)
        # The passes that draft so many guesses, the first ones of the shape.
        passes = np.maximum.accumulate(shape.tree.depths)
        likely = np.where(np.arange(most) < limits[:, None], self._chances(shape, shares), 0.0)
        drafting, deeper = (float(costs.at(each, batch)) for each in (costs.draft, costs.deeper))
        for depth in range(1, int(passes[-1]) + 1):
            size = int(np.searchsorted(passes, depth, side="right"))
            chances = likely[:, :size].ravel()
            # A guess comes with all that are before it.
            order = np.argsort(
                -np.minimum.accumulate(likely[:, :size], axis=1).ravel(), kind="stable"
            )
            order = order[chances[order] > 0]
            if len(order) == 0:
                break
            tokens = batch + np.cumsum(chances[order])
            sizes = batch + np.arange(1, len(order) + 1, dtype=np.float64)
            rates = tokens / (costs.at(costs.verify, sizes) + drafting + (depth - 1) * deeper)
            found = int(rates.argmax())
            if rates[found] > best_rate:
                best_rate = float(rates[found])
                best = np.bincount(order[: found + 1] // size, minlength=batch)
        return best

    @staticmethod
    def _chances(shape: DraftShape, shares: FloatArray) -> FloatArray:
        """The probability that each guess is accepted, ``[sequences, guesses]``."""
        by_rank = np.array([rank_chances(shape.topk, share) for share in shares.tolist()])
        chances = np.empty((len(shares), shape.tree.size))
        rows = zip(shape.tree.parents.tolist(), shape.ranks, strict=True)
        for guess, (parent, rank) in enumerate(rows):
            above = 1.0 if parent < 0 else chances[:, parent]
            chances[:, guess] = above * by_rank[:, rank]
        return chances
