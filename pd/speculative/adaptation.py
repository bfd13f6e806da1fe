"""Chooses how many tokens to draft for each sequence, to get the most tokens per second."""

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

    from pd.engine.draft_tree import DraftTree
    from pd.speculative.drafter import TokenSequence

    FloatArray = npt.NDArray[np.float64]

# Before the first draft of all we assume an accepted share of this many tokens. For a new sequence
# we assume the share of all sequences.
_PRIOR_SHARE, _PRIOR_WEIGHT = 0.75, 2.0
# The share of a record left after each draft, and after each step without one. We therefore try a
# sequence again after about two hundred steps without drafts.
_KEPT, _KEPT_AT_REST = 0.9, 0.99
# The share of the record of all sequences left after each draft.
_KEPT_OF_ALL = 0.98
# Number of steps for which we do not ask a batch again after it drafted nothing, first and at most.
# They double each time, because we cannot launch a step ahead if we ask before it, unless a head
# drafts.
REST_STEPS, MOST_REST_STEPS = 16, 64
# How far a step moves the pace of its own kind, with drafts or without. It also moves the pace of
# the other kind a little towards its own, so that we try that kind again.
_PACE_STEP, _PACE_FORGOTTEN = 0.1, 0.005
# After this many steps with drafts in a row, first and later, we make a few without to measure
# them. We need several, because the first ones were not launched ahead.
_TRY_PLAIN_FIRST, _TRY_PLAIN, _PLAIN_STEPS = 16, 1024, 8
# We clip the time of a step to this many times its cost, and to this fraction of it.
_PACE_MOST = 8.0


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step, measured at the start for some sizes, and linear in between and beyond.

    Attributes:
        sizes: tokens of a step, float64, increasing.
        plain: seconds of a step with one token for each of ``sizes`` sequences.
        verify: seconds of a step with ``sizes`` tokens in all, several for each sequence.
        draft: seconds to draft one token for each of ``sizes`` sequences.
        deeper: seconds for each further token of a draft. This is less, because most of the host's
            work happens once.
    """

    sizes: FloatArray
    plain: FloatArray
    verify: FloatArray
    draft: FloatArray
    deeper: FloatArray

    def interpolate_costs(self, costs: FloatArray, sizes: FloatArray | float) -> FloatArray:
        """Interpolate ``costs``, in seconds, for sizes between and beyond the measured ones."""
        inside = np.interp(sizes, self.sizes, costs)
        beyond = np.maximum(np.asarray(sizes) - self.sizes[-1], 0.0)
        slope = costs[-1] / self.sizes[-1]
        result: FloatArray = inside + beyond * slope
        return result


@dataclass(slots=True)
class _Acceptance:
    """Record of a sequence's drafts, in which older drafts weigh less.

    Attributes:
        num_tried: places at which we checked the first guess; we check none after a wrong one.
        num_accepted: places at which the first guess was right.
        num_asked: how often we asked the drafter.
        num_found: how often it had a draft.
    """

    num_tried: float = 0.0
    num_accepted: float = 0.0
    num_asked: float = 0.0
    num_found: float = 0.0

    def accepted_share(self, prior: float) -> float:
        """Return the probability that the first guess is right, starting at ``prior``."""
        return (self.num_accepted + prior * _PRIOR_WEIGHT) / (self.num_tried + _PRIOR_WEIGHT)

    def found_share(self, prior: float) -> float:
        """Return the probability that the drafter has a draft, starting at ``prior``."""
        return (self.num_found + prior * _PRIOR_WEIGHT) / (self.num_asked + _PRIOR_WEIGHT)

    def add_draft(self, tried: int, accepted: int, kept: float) -> None:
        """Count a draft."""
        self.fade_counts(kept)
        self.num_tried += tried
        self.num_accepted += accepted
        self.num_asked += 1
        self.num_found += 1

    def add_no_draft(self, kept: float) -> None:
        """Count an attempt without a draft."""
        self.num_asked, self.num_found = self.num_asked * kept + 1, self.num_found * kept

    def fade_counts(self, kept: float) -> None:
        self.num_tried *= kept
        self.num_accepted *= kept
        self.num_asked *= kept
        self.num_found *= kept


@dataclass(slots=True)
class _Pace:
    """The time of steps of one kind in the running node, as a multiple of their measured cost."""

    value: float = 1.0
    count: int = 0

    def observe_step(self, seen: float, other: _Pace) -> None:
        """Count a step of this kind.

        Until we have seen the ``other`` kind, we assume both are alike. After that its value slowly
        follows this one, so that we try it again.
        """
        self.count += 1
        seen = min(max(seen, 1 / _PACE_MOST), _PACE_MOST)
        self.value += max(_PACE_STEP, 1 / self.count) * (seen - self.value)
        other.value += (_PACE_FORGOTTEN if other.count else 1.0) * (self.value - other.value)


@dataclass(slots=True)
class _Paces:
    """The paces of steps with and without drafts, for batches of similar size.

    Sizes differ, because the host's work between steps matters less for larger batches.

    Attributes:
        until_plain: number of steps with drafts before we make some without.
    """

    plain: _Pace = field(default_factory=_Pace)
    drafting: _Pace = field(default_factory=_Pace)
    until_plain: int = _TRY_PLAIN_FIRST


class DraftLengths:
    """Chooses draft lengths from each sequence's acceptance and from the cost of the step.

    The caller holds the node's lock. We accept the ``j``-th token of a chain with probability
    ``p**j``, where ``p`` is the share of right first guesses: of this sequence lately, or at first
    of all sequences. Further guesses of the same token in a tree share the rest
    (:func:`pd.speculative.shape.rank_chances`). We multiply all of this by the probability of a
    draft. Then we draft the likeliest tokens of all sequences first, as long as the expected tokens
    per second grow.

    The costs were measured on steps running alone. In the running node the host works between
    steps, so :meth:`observe_time` scales the costs of steps with and without drafts, separately for
    each batch size up to the next power of two.

    Args:
        costs: seconds of steps; if None, we draft as many tokens as possible.
        shape: shape of the largest draft, by default a chain. Smaller drafts are its first tokens.

    Attributes:
        simulate: returns how many tokens of a draft to accept, given its size. We use it for
            benchmarks without trained weights. None if the model decides.
    """

    def __init__(self, costs: StepCosts | None, shape: DraftShape | None = None) -> None:
        self._shape = shape or DraftShape.build_best(MAX_DRAFT_TOKENS, 1)
        self.simulate: Callable[[int], int] | None = None
        self._costs = costs
        self._seen: dict[TokenSequence, _Acceptance] = {}
        self._of_all = _Acceptance()
        self._rest = 0
        # Steps made in the last rest, and steps of the next one.
        self._rested, self._next_rest = 0, REST_STEPS
        # By the number of bits of a batch's size.
        self._paces: defaultdict[int, _Paces] = defaultdict(_Paces)
        self._plain_seconds: dict[int, float] = {}

    @property
    def is_resting(self) -> bool:
        """Whether the next step drafts nothing for any sequence."""
        return self._rest > 0

    def choose_lengths(
        self, sequences: Sequence[TokenSequence], limits: Sequence[int]
    ) -> list[int]:
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
        prior = self._of_all.accepted_share(_PRIOR_SHARE)
        lengths = self._find_best_lengths(
            np.array([each.accepted_share(prior) for each in seen]),
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
            self._of_all.fade_counts(_KEPT_AT_REST)
        for each, length in zip(seen, lengths, strict=True):
            if not length:
                each.fade_counts(_KEPT_AT_REST)
        return [int(length) for length in lengths]

    def observe_draft(
        self, sequence: TokenSequence, tree: DraftTree, accepted: Sequence[int]
    ) -> None:
        """Count which guesses of a verified draft were accepted."""
        seen = self._seen.get(sequence)
        last = accepted[-1] if accepted else -1
        tried = len(accepted) + tree.has_followers[last + 1]
        right = sum(tree.first_guesses[guess] for guess in accepted)
        self._of_all.add_draft(tried, right, _KEPT_OF_ALL)
        if seen is not None:
            seen.add_draft(tried, right, _KEPT)

    def observe_no_draft(self, sequence: TokenSequence) -> None:
        """Count an attempt without a draft for a sequence."""
        self._of_all.add_no_draft(_KEPT_OF_ALL)
        if (seen := self._seen.get(sequence)) is not None:
            seen.add_no_draft(_KEPT)

    def observe_time(self, seconds: float, batch: int, drafted: Sequence[int] | None) -> None:
        """Count the seconds between the ends of two steps with nothing else between them.

        You do not need the lock, but call this from the thread that chooses.

        Args:
            seconds: time from the end of the previous step to the end of this one.
            batch: number of sequences.
            drafted: tokens of each verified draft; None if we did not ask the drafter.
        """
        costs = self._costs
        if costs is None:
            return
        paces = self._paces[batch.bit_length()]
        if drafted is None:
            cost = self._plain_seconds.get(batch)
            if cost is None:
                cost = self._plain_seconds[batch] = float(
                    costs.interpolate_costs(costs.plain, batch)
                )
            paces.plain.observe_step(seconds / cost, paces.drafting)
            return
        computed = costs.verify if drafted else costs.plain
        draft, deeper = (
            float(costs.interpolate_costs(each, batch)) for each in (costs.draft, costs.deeper)
        )
        depth = self._shape.take_first(max(drafted)).depth if drafted else 1
        cost = (
            float(costs.interpolate_costs(computed, batch + sum(drafted)))
            + draft
            + (depth - 1) * deeper
        )
        paces.drafting.observe_step(seconds / cost, paces.plain)

    def forget_sequence(self, sequence: TokenSequence) -> None:
        """Drop the record of a sequence."""
        self._seen.pop(sequence, None)

    def _forget_rest(self) -> None:
        """Let records weigh less, by the number of steps of the last rest."""
        kept, self._rested = _KEPT_AT_REST**self._rested, 0
        for each in (self._of_all, *self._seen.values()):
            each.fade_counts(kept)

    def _find_best_lengths(
        self, shares: FloatArray, limits: npt.NDArray[np.int64], found_shares: FloatArray
    ) -> npt.NDArray[np.int64]:
        """Find the lengths with the most expected tokens per second.

        Args:
            found_shares: probability that each sequence gets a draft at all.
        """
        costs = self._costs
        assert costs is not None
        batch, most = len(shares), int(limits.max())
        paces = self._paces[batch.bit_length()]
        best = np.zeros(batch, dtype=np.int64)
        best_rate = float(batch / costs.interpolate_costs(costs.plain, batch)) / paces.plain.value
        if most == 0:
            return best
        shape = self._shape.take_first(most)
        # For each number of first guesses, the number of passes to draft them.
        passes = np.maximum.accumulate(shape.tree.depths)
        likely = np.where(
            np.arange(most) < limits[:, None], self._accept_chances(shape, shares), 0.0
        )
        likely *= found_shares[:, None]
        drafting, deeper = (
            float(costs.interpolate_costs(each, batch)) for each in (costs.draft, costs.deeper)
        )
        for depth in range(1, int(passes[-1]) + 1):
            size = int(np.searchsorted(passes, depth, side="right"))
            chances = likely[:, :size].ravel()
            # Each guess needs all guesses before it.
            order = np.argsort(
                -np.minimum.accumulate(likely[:, :size], axis=1).ravel(), kind="stable"
            )
            order = order[chances[order] > 0]
            if len(order) == 0:
                break
            tokens = batch + np.cumsum(chances[order])
            sizes = batch + np.arange(1, len(order) + 1, dtype=np.float64)
            seconds = costs.interpolate_costs(costs.verify, sizes) + drafting + (depth - 1) * deeper
            rates = tokens / (seconds * paces.drafting.value)
            fastest = int(rates.argmax())
            if rates[fastest] > best_rate:
                best_rate = float(rates[fastest])
                best = np.bincount(order[: fastest + 1] // size, minlength=batch)
        return best

    @staticmethod
    def _accept_chances(shape: DraftShape, shares: FloatArray) -> FloatArray:
        """Return the probability of accepting each guess, ``[sequences, guesses]``."""
        by_rank = np.array([rank_chances(shape.topk, share) for share in shares.tolist()])
        chances = np.empty((len(shares), shape.tree.size))
        rows = zip(shape.tree.parents.tolist(), shape.ranks, strict=True)
        for guess, (parent, rank) in enumerate(rows):
            above = 1.0 if parent < 0 else chances[:, parent]
            chances[:, guess] = above * by_rank[:, rank]
        return chances
