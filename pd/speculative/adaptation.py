"""Chooses how many tokens to draft for each sequence, so that tokens per second are highest."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
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
# for which drafting does not pay is tried again after two hundred steps or so.
_KEPT, _KEPT_AT_REST = 0.9, 0.99
# The part of what was seen of all sequences that remains after each draft.
_KEPT_OF_ALL = 0.98
# Steps for which a batch that drafts nothing is not asked again: at first, and at most, since they
# double each time that it drafts nothing again. A step before which it is asked is not launched
# ahead, but where a head drafts.
REST_STEPS, MOST_REST_STEPS = 16, 64
# How far a step moves what is believed of the time of steps of its kind, with drafts or without,
# and how far it moves the belief of the other kind to that of its own, so that it is tried again.
_PACE_STEP, _PACE_FORGOTTEN = 0.1, 0.005
# After so many steps with drafts in a row, at first and later, a few are made without, for what
# they take; the first of them were not launched ahead.
_TRY_PLAIN_FIRST, _TRY_PLAIN, _PLAIN_STEPS = 16, 1024, 8
# A step that took more times its cost than this, or less, counts as if it had taken so many.
_PACE_MOST = 8.0


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
    older ones weigh less. Guesses after a wrong one are not looked at. And how often the drafter
    was asked, and had a draft."""

    tried: float = 0.0
    accepted: float = 0.0
    asked: float = 0.0
    found: float = 0.0

    def share(self, prior: float) -> float:
        """The probability that the first guess of the next token is right, which was ``prior``
        before any was seen."""
        return (self.accepted + prior * _PRIOR_WEIGHT) / (self.tried + _PRIOR_WEIGHT)

    def found_share(self, prior: float) -> float:
        """The probability that the drafter has a draft if it is asked, ``prior`` before it was."""
        return (self.found + prior * _PRIOR_WEIGHT) / (self.asked + _PRIOR_WEIGHT)

    def add(self, tried: int, accepted: int, kept: float) -> None:
        """Note a draft."""
        self.fade(kept)
        self.tried += tried
        self.accepted += accepted
        self.asked += 1
        self.found += 1

    def add_none(self, kept: float) -> None:
        """Note that the drafter had none."""
        self.asked, self.found = self.asked * kept + 1, self.found * kept

    def fade(self, kept: float) -> None:
        self.tried *= kept
        self.accepted *= kept
        self.asked *= kept
        self.found *= kept


@dataclass(slots=True)
class _Pace:
    """The time of steps of one kind in the running node, as a multiple of their cost."""

    value: float = 1.0
    count: int = 0

    def observe(self, seen: float, other: _Pace) -> None:
        """Note a step of this kind. Until one of the ``other`` kind was seen, both are taken to be
        alike; from then on its value slowly becomes this one, so that it is tried again."""
        self.count += 1
        seen = min(max(seen, 1 / _PACE_MOST), _PACE_MOST)
        self.value += max(_PACE_STEP, 1 / self.count) * (seen - self.value)
        other.value += (_PACE_FORGOTTEN if other.count else 1.0) * (self.value - other.value)


@dataclass(slots=True)
class _Paces:
    """The times of steps without drafts and with them, of batches of similar size: what the host
    does between steps is little beside the step of many sequences and much beside that of one.

    Attributes:
        until_plain: steps with drafts that may follow before some are made without.
    """

    plain: _Pace = field(default_factory=_Pace)
    drafting: _Pace = field(default_factory=_Pace)
    until_plain: int = _TRY_PLAIN_FIRST


class DraftLengths:
    """Chooses draft lengths by each sequence's acceptance and by the cost of the step. The caller
    holds the node's lock.

    The ``j``-th token of a chain is accepted with probability ``p**j``, where ``p`` is the share of
    a sequence's first guesses that were right lately, or at first that of all sequences; in a tree
    further guesses of the same token get their part of the rest
    (:func:`pd.speculative.shape.rank_chances`). A drafter that finds nothing for a sequence counts,
    too: all of that is as likely as a draft is found. The likeliest tokens of all sequences are
    drafted first, as long as the expected tokens per second grow.

    The costs were measured on steps that ran alone. What steps take in the running node, with all
    that the host does between them, is noted by :meth:`took` for steps with and without drafts, and
    scales the costs of either kind, in batches of that size up to the next power of two.

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
        # Steps of the last rest that were made, and those of the next one.
        self._rested, self._next_rest = 0, REST_STEPS
        # By the number of bits of a batch's size.
        self._paces: defaultdict[int, _Paces] = defaultdict(_Paces)
        self._plain_seconds: dict[int, float] = {}

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
            self._rested += 1
            return [0] * len(limits)
        if not sequences:
            return []
        if self._rested:
            self._forget_rest()
        paces = self._paces[len(sequences).bit_length()]
        if paces.until_plain == 0:
            paces.until_plain = _TRY_PLAIN
            self._rest = _PLAIN_STEPS - 1
            return [0] * len(limits)
        seen = [self._seen.setdefault(sequence, _Acceptance()) for sequence in sequences]
        prior = self._of_all.share(_PRIOR_SHARE)
        lengths = self._best(
            np.array([each.share(prior) for each in seen]),
            np.array(limits),
            np.array([each.found_share(self._of_all.found_share(1.0)) for each in seen]),
        )
        if lengths.any():
            paces.until_plain -= 1
            self._next_rest = REST_STEPS
        else:
            paces.until_plain = _TRY_PLAIN
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, MOST_REST_STEPS)
            self._of_all.fade(_KEPT_AT_REST)
        for each, length in zip(seen, lengths, strict=True):
            if not length:
                each.fade(_KEPT_AT_REST)
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

    def observe_none(self, sequence: TokenSequence) -> None:
        """Note that nothing was drafted for a sequence though something might have been."""
        self._of_all.add_none(_KEPT_OF_ALL)
        if (seen := self._seen.get(sequence)) is not None:
            seen.add_none(_KEPT)

    def took(self, seconds: float, batch: int, drafted: Sequence[int] | None) -> None:
        """Note how long after the step before it a step of ``batch`` sequences was complete, where
        nothing else was computed between them. The lock is not needed, but the thread must be the
        one that chooses.

        Args:
            drafted: tokens of each draft that was verified, maybe none of them; None if the drafter
                was not asked.
        """
        costs = self._costs
        if costs is None:
            return
        paces = self._paces[batch.bit_length()]
        if drafted is None:
            cost = self._plain_seconds.get(batch)
            if cost is None:
                cost = self._plain_seconds[batch] = float(costs.at(costs.plain, batch))
            paces.plain.observe(seconds / cost, paces.drafting)
            return
        computed = costs.verify if drafted else costs.plain
        draft, deeper = (float(costs.at(each, batch)) for each in (costs.draft, costs.deeper))
        depth = self._shape.first(max(drafted)).depth if drafted else 1
        cost = float(costs.at(computed, batch + sum(drafted))) + draft + (depth - 1) * deeper
        paces.drafting.observe(seconds / cost, paces.plain)

    def forget(self, sequence: TokenSequence) -> None:
        """Drop the record of a sequence."""
        self._seen.pop(sequence, None)

    def _forget_rest(self) -> None:
        """Have what was seen before the last rest weigh less, by the steps of that."""
        kept, self._rested = _KEPT_AT_REST**self._rested, 0
        for each in (self._of_all, *self._seen.values()):
            each.fade(kept)

    def _best(
        self, shares: FloatArray, limits: npt.NDArray[np.int64], found: FloatArray
    ) -> npt.NDArray[np.int64]:
        """The lengths with the most expected tokens per second, where each sequence has a draft
        with the probability ``found``."""
        costs = self._costs
        assert costs is not None
        batch, most = len(shares), int(limits.max())
        paces = self._paces[batch.bit_length()]
        best = np.zeros(batch, dtype=np.int64)
        best_rate = float(batch / costs.at(costs.plain, batch)) / paces.plain.value
        if most == 0:
            return best
        shape = self._shape.first(most)
        # The passes that draft so many guesses, the first ones of the shape.
        passes = np.maximum.accumulate(shape.tree.depths)
        likely = np.where(np.arange(most) < limits[:, None], self._chances(shape, shares), 0.0)
        likely *= found[:, None]
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
            seconds = costs.at(costs.verify, sizes) + drafting + (depth - 1) * deeper
            rates = tokens / (seconds * paces.drafting.value)
            fastest = int(rates.argmax())
            if rates[fastest] > best_rate:
                best_rate = float(rates[fastest])
                best = np.bincount(order[: fastest + 1] // size, minlength=batch)
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
