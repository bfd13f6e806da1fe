"""Samples tokens from logits: token 1 on a prefill node in the same way as later tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pd.core.messages import TokenLogprobs
from pd.engine.device_copy import HostCopy, to_device
from pd.engine.penalties import PenalizedRows, Penalties
from pd.engine.sampling_state import Draw, SamplingState
from pd.engine.token_rules import MASK_SECONDS, fill_masks, mask_threads
from pd.kernels.sampling import sample_rows
from pd.kernels.staging import PinnedStaging
from pd.kernels.token_masks import BITS, apply_token_masks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from pd.core.sampling_params import SamplingParams
    from pd.engine.step_outcome import StepOutcome

    IntArray = npt.NDArray[np.int32]
    Int64Array = npt.NDArray[np.int64]

__all__ = ["PromptLogprobs", "SampledToken", "Sampler", "Samples"]


class SampledToken(NamedTuple):
    """The token of a row, or the reason why there is none.

    Attributes:
        token_id: -1 when ``error`` is set.
        logprobs: under the model's raw logits; None unless the request asked.
        error: the row's logits were not finite; the request must fail rather than go on.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Samples:
    """Tokens of a step on the device, with their copy to the host.

    Attributes:
        tokens: int64 ``[rows]`` on the device; a valid id even where the logits were not finite.
    """

    def __init__(
        self, tokens: torch.Tensor, finite: torch.Tensor, logprobs: _RowLogprobs | None
    ) -> None:
        self.tokens = tokens
        self._logprobs = logprobs
        wanted = [] if logprobs is None else logprobs.tensors
        self._copy = HostCopy([torch.where(finite, tokens, -1), *wanted])

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`result` would return at once."""
        return self._copy.is_complete

    def result(self) -> list[SampledToken]:
        """Wait for the device and return one token for each row."""
        tokens, *wanted = self._copy.wait()
        logprobs = {} if self._logprobs is None else self._logprobs.read(wanted)
        return [
            SampledToken(token, logprobs.get(i))
            if token >= 0
            else SampledToken(-1, error="the model's logits are not finite")
            for i, token in enumerate(tokens.tolist())
        ]


@dataclass(frozen=True)
class _RowLogprobs:
    """Log probabilities of some rows, under raw logits.

    Attributes:
        rows: indices of ``n`` of the step's rows.
        counts: how many of the likeliest tokens each wants.
        tensors: tokens int64 ``[n]``, their log probabilities ``[n]``, and the log probabilities
            and ids of the likeliest tokens, ``[n, max(counts)]``.
    """

    rows: Sequence[int]
    counts: Sequence[int]
    tensors: list[torch.Tensor]

    @classmethod
    def of(
        cls,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        rows: Sequence[int],
        counts: Sequence[int],
    ) -> _RowLogprobs:
        """Compute them from the ``logits`` and ``tokens`` of ``rows`` alone."""
        logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        top = logprobs.topk(min(max(counts, default=0), logits.shape[1]), dim=-1)
        return cls(rows, counts, [tokens, chosen, top.values, top.indices])

    def read(self, tensors: Sequence[torch.Tensor]) -> dict[int, TokenLogprobs]:
        """Return them by row, from the copies of :attr:`tensors` on the host."""
        tokens, chosen, values, ids = (tensor.tolist() for tensor in tensors)
        return {
            row: TokenLogprobs(tokens[i], chosen[i], ids[i][:count], values[i][:count])
            for i, (row, count) in enumerate(zip(self.rows, self.counts, strict=True))
        }


class PromptLogprobs:
    """Log probabilities of prompt tokens, with their copy to the host."""

    def __init__(self, logprobs: _RowLogprobs) -> None:
        self._logprobs = logprobs
        self._copy = HostCopy(logprobs.tensors)

    def result(self) -> list[TokenLogprobs]:
        """Wait for the device and return one for each token."""
        return list(self._logprobs.read(self._copy.wait()).values())


@dataclass(frozen=True, slots=True, eq=False)
class PreparedDraws:
    """The inputs of sampling besides logits. The tensors are arguments of
    :func:`pd.kernels.sampling.sample_rows`, on the device.

    Attributes:
        draws: in the order of their rows.
        counts: rows of each, int64.
        shortest: places of logits that minimum lengths forbid in rows without rules: rows and
            tokens, int64. Draws change once the step before is accounted for.
        penalized: rows with penalties, or None.
    """

    draws: Sequence[Draw]
    counts: Int64Array
    shortest: tuple[Int64Array, Int64Array]
    penalized: PenalizedRows | None
    noise_at: torch.Tensor
    temperatures: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


class _OfRows(NamedTuple):
    """What draws with the same parameters have in every step, on the device: the temperatures,
    ``top_k``, ``top_p`` and ``min_p`` of their rows. It must not keep their states alive."""

    params: list[SamplingParams]
    counts: Int64Array
    tensors: list[torch.Tensor]

    def fit(self, params: list[SamplingParams], counts: Int64Array) -> bool:
        """Whether the draws of a step have these parameters and numbers of rows."""
        return params == self.params and np.array_equal(counts, self.counts)


class TokenMasks(NamedTuple):
    """Rows with rules, int64 ``[m]``, and the tokens that these allow: arguments of
    :func:`pd.kernels.token_masks.apply_token_masks`, on the device."""

    rows: torch.Tensor
    masks: torch.Tensor


class Sampler:
    """Samples one token for each row of a step. Used by one thread.

    The order is: repetition, frequency and presence penalties, logit bias and minimum length on the
    raw logits; then temperature, top-k, top-p, min-p; then Gumbel noise keyed by
    (seed, position, token id), so that a row's token depends on nothing else in the batch.
    """

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self.device = torch.device(device)
        self._staging = PinnedStaging(self.device)
        self._penalties = Penalties(vocab_size, self.device)
        # The last prepared step has made it.
        self._of_rows: _OfRows | None = None

    def sample(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
        """Draw a token for each row of ``logits``, and return them."""
        draws = [Draw(state) for state in states]
        return self.launch(logits, self.prepare(draws)).result()

    @torch.inference_mode()
    def prepare(
        self,
        draws: Sequence[Draw],
        previous: torch.Tensor | None = None,
        drafts: torch.Tensor | None = None,
        outcome: StepOutcome | None = None,
    ) -> PreparedDraws:
        """Upload the inputs of :meth:`launch`. All that is prepared is launched, in the same order,
        but for what fails; see :meth:`pd.engine.penalties.Penalties.prepare`.

        Args:
            draws: in the order of the rows. What penalties count moves from their states to the
                device.
            previous: :attr:`Samples.tokens` of the previous step, to which ``Draw.follows`` refers.
            drafts: drafted tokens to which ``Draw.first`` refers, int64 on the device.
            outcome: of the previous step, to which ``Draw.work`` refers.
        """
        params = [draw.state.params for draw in draws]
        noise_at = [(draw.state.seed, draw.state.position(draw.ahead)) for draw in draws]
        arrays: list[npt.NDArray[Any]] = [np.array(noise_at, np.int64).reshape(-1, 2)]
        counts = np.array([draw.num_rows for draw in draws], np.int64)
        of_rows = self._of_rows
        if of_rows is None or not of_rows.fit(params, counts):
            of_rows = None
            arrays += self._arrays_of(params)
        if len(draws) and counts.max() > 1:
            arrays = [np.repeat(array, counts, axis=0) for array in arrays]
            for draw, end in zip(draws, np.cumsum(counts).tolist(), strict=True):
                if draw.tree is not None:
                    arrays[0][end - draw.tree.size : end, 1] += draw.tree.depths
        unread = outcome is not None and any(draw.unread for draw in draws)
        if unread:
            arrays.append(np.repeat([draw.work for draw in draws], counts))
        tensors = self._staging.upload(arrays)
        if outcome is not None and unread:
            tensors[0][:, 1] += outcome.counts_of(tensors.pop())
        if of_rows is None:
            of_rows = self._of_rows = _OfRows(params, counts, tensors[1:])
        penalized = self._penalties.prepare(draws, previous, drafts, outcome)
        too_short = _too_short(draws, counts)
        return PreparedDraws(draws, counts, too_short, penalized, tensors[0], *of_rows.tensors)

    def _arrays_of(self, params: Sequence[SamplingParams]) -> list[npt.NDArray[Any]]:
        """See ``PreparedDraws``: temperatures, ``top_k``, ``top_p`` and ``min_p``."""
        vocab = self._vocab_size
        return [
            np.array([0.0 if p.greedy else p.temperature for p in params], np.float32),
            np.array([min(p.top_k or vocab, vocab) for p in params], np.int64),
            np.array([p.top_p for p in params], np.float32),
            np.array([p.min_p for p in params], np.float32),
        ]

    @torch.inference_mode()
    def fill_masks(self, prepared: PreparedDraws, drafts: IntArray) -> TokenMasks | None:
        """Ask the rules of the draws that have some which tokens may come next, and upload it.

        Args:
            prepared: whose states have observed all tokens before their first row.
            drafts: drafted tokens to which ``Draw.first`` refers.

        Returns:
            None if no draw has rules.
        """
        ruled = [(draw, rows) for draw, rows in _rows_of(prepared) if draw.state.rules is not None]
        if not ruled:
            return None
        rows = [row for _, of_draw in ruled for row in of_draw]
        shape = len(rows), -(-self._vocab_size // BITS)
        places: list[npt.NDArray[Any]] = self._staging.reserve(
            [((len(rows),), np.int64), (shape, np.int32)]
        )
        places[0][:] = rows
        masks = places[1]
        plain, others, first = list[tuple[Draw, int]](), list[tuple[Draw, int]](), 0
        for draw, of_draw in ruled:
            (plain if _is_plain(draw) else others).append((draw, first))
            first += len(of_draw)
        _fill_plain(plain, masks, drafts)
        for draw, first in others:
            own = masks[first : first + draw.num_rows]
            own.fill(-1)
            _fill_alone(draw, own, drafts)
        for draw, first in plain + others:
            if not draw.state.must_continue():
                continue
            depths = [0] if draw.tree is None else [0, *draw.tree.depths.tolist()]
            for row, depth in enumerate(depths, first):
                if draw.state.must_continue(depth):
                    _forbid(masks[row], draw.state.stop_ids)
        return TokenMasks(*self._staging.send(places))

    @torch.inference_mode()
    def launch(
        self, logits: torch.Tensor, prepared: PreparedDraws, masks: TokenMasks | None = None
    ) -> Samples:
        """Choose a token for each row; on a GPU this is only queued.

        Args:
            logits: float32, bfloat16 or float16 ``[n, vocab_size]``, left as they are.
            prepared: for ``n`` rows. Without rows, too, the result is ready only when everything
                queued before is done.
            masks: what rules allow.
        """
        tokens, finite = self.choose(logits, prepared, masks)
        return Samples(tokens, finite, self._logprobs(logits, tokens, prepared))

    @torch.inference_mode()
    def choose(
        self, logits: torch.Tensor, prepared: PreparedDraws, masks: TokenMasks | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do as :meth:`launch`, for tokens that the host does not need.

        Returns:
            Tokens, int64 ``[n]``, and whether all logits of their rows were finite, bool ``[n]``;
            on the device.
        """
        draws, rows = prepared.draws, int(prepared.counts.sum())
        assert logits.shape == (rows, self._vocab_size)
        if not draws:
            nothing = torch.empty(0, dtype=torch.int64, device=self.device)
            return nothing, nothing.bool()
        params = [draw.state.params for draw in draws]
        return sample_rows(
            self._adjust(logits, prepared, masks),
            prepared.temperatures,
            prepared.noise_at,
            prepared.top_k,
            prepared.top_p,
            prepared.min_p,
            any_random=not all(p.greedy for p in params),
            any_filter=any(p.top_k or p.top_p < 1 or p.min_p > 0 for p in params),
        )

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: torch.Tensor, targets: IntArray, top_n: int
    ) -> PromptLogprobs:
        """Compute log probabilities of prompt tokens; on a GPU this is only queued.

        Args:
            logits: as in :meth:`launch`; row i follows the token before ``targets[i]``.
            targets: int32 ``[n]``, the prompt's tokens.
            top_n: how many likeliest tokens to report beside each.
        """
        chosen = self._index(targets)
        rows = range(len(targets))
        return PromptLogprobs(_RowLogprobs.of(logits, chosen, rows, [top_n] * len(targets)))

    def _logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, prepared: PreparedDraws
    ) -> _RowLogprobs | None:
        asked, counts = list[int](), list[int]()
        for draw, rows in _rows_of(prepared):
            if draw.state.params.logprobs:
                asked += rows
                counts += [draw.state.params.top_logprobs] * len(rows)
        if not asked:
            return None
        rows_there = self._index(asked)
        chosen = logits.index_select(0, rows_there)
        return _RowLogprobs.of(chosen, tokens[rows_there], asked, counts)

    def _adjust(
        self, logits: torch.Tensor, prepared: PreparedDraws, masks: TokenMasks | None
    ) -> torch.Tensor:
        """Apply penalties, bias, minimum length and masks to the rows that ask for them."""
        biased = list[tuple[int, SamplingState]]()
        for draw, rows in _rows_of(prepared):
            if draw.state.params.logit_bias:
                biased += [(row, draw.state) for row in rows]
        places_too_short, ids_too_short = prepared.shortest
        if not (prepared.penalized or biased or len(ids_too_short) or masks):
            return logits
        logits = logits.to(torch.float32, copy=True)
        if prepared.penalized is not None:
            self._penalties.apply(logits, prepared.penalized)
        if biased:
            places = np.repeat([i for i, _ in biased], [len(s.bias_ids) for _, s in biased])
            ids = np.concatenate([s.bias_ids for _, s in biased])
            index = self._index(places), self._index(ids)
            logits[index] += self._floats(np.concatenate([s.bias for _, s in biased]))
        if len(ids_too_short):
            logits[self._index(places_too_short), self._index(ids_too_short)] = float("-inf")
        if masks is not None:
            apply_token_masks(logits, *masks)
        return logits

    def _index(self, values: Sequence[int] | npt.NDArray[np.integer]) -> torch.Tensor:
        return to_device(values, torch.int64, self.device)

    def _floats(self, values: Sequence[float] | npt.NDArray[np.float64]) -> torch.Tensor:
        return to_device(values, torch.float32, self.device)


def _is_plain(draw: Draw) -> bool:
    """Whether its rules fill a single mask."""
    return draw.tree is None and draw.state.rules is not None and not draw.state.rules.ended


def _fill_plain(draws: Sequence[tuple[Draw, int]], masks: IntArray, drafts: IntArray) -> None:
    """Fill the masks of plain draws, each with its row, and note how long those took that may have
    taken too long.

    All together may take long because they are many. In groups of one for each thread it is a few
    masks that do, and only these are filled once more, one after the other.
    """
    timed = [each for each in draws if each[0].state.is_timed]
    others = [each for each in draws if not each[0].state.is_timed]
    if not _fill_together(others, masks):
        for draw, _ in others:
            draw.state.is_timed = len(others) > 1
        timed += others
    for start in range(0, len(timed), mask_threads()):
        group = timed[start : start + mask_threads()]
        if not _fill_together(group, masks):
            for draw, row in group:
                _fill_alone(draw, masks[row : row + 1], drafts)


def _fill_together(draws: Sequence[tuple[Draw, int]], masks: IntArray) -> bool:
    """Fill the masks of several plain draws. False if there is one, or if that took so long that
    the time of each has to be known."""
    states = [draw.state for draw, _ in draws]
    rules = [state.rules for state in states]
    if len(rules) < 2 or rules[0] is None:
        return False
    began = time.perf_counter()
    rules[0].fill_together(rules, masks, [row for _, row in draws])
    if time.perf_counter() - began > MASK_SECONDS:
        return False
    for state in states:
        state.mask_seconds = 0.0
    return True


def _fill_alone(draw: Draw, masks: IntArray, drafts: IntArray) -> None:
    """Fill the masks of one draw, and note how long it took."""
    state = draw.state
    assert state.rules is not None
    size = 0 if draw.tree is None else draw.tree.size
    guesses = drafts[draw.first : draw.first + size].tolist()
    began = time.thread_time()
    fill_masks(state.rules, masks, draw.tree, guesses)
    state.mask_seconds = (time.thread_time() - began) / len(masks)


def _forbid(mask: IntArray, token_ids: Int64Array) -> None:
    """Take tokens out of a mask, unless it allows no other."""
    without = mask.copy()
    bits = np.left_shift(np.uint32(1), (token_ids % BITS).astype(np.uint32))
    np.bitwise_and.at(without.view(np.uint32), token_ids // BITS, ~bits)
    if without.any():
        mask[:] = without


def _too_short(draws: Sequence[Draw], counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """See ``PreparedDraws.shortest``."""
    places, ids = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for draw, rows in _with_rows(draws, counts):
        # NOTE: of a draw with unread guesses, all rows or none are too short.
        state, ahead = draw.state, draw.ahead
        # Masks of rules are made with the minimum length in mind.
        if state.rules is not None or not state.must_continue(ahead):
            continue
        depths = [0] if draw.tree is None else [0, *draw.tree.depths.tolist()]
        for row, depth in zip(rows, depths, strict=True):
            if state.must_continue(ahead + depth):
                places.append(np.full(len(state.stop_ids), row, np.int64))
                ids.append(state.stop_ids)
    return np.concatenate(places), np.concatenate(ids)


def _rows_of(prepared: PreparedDraws) -> Iterator[tuple[Draw, range]]:
    """Each draw with its rows."""
    return _with_rows(prepared.draws, prepared.counts)


def _with_rows(draws: Sequence[Draw], counts: Int64Array) -> Iterator[tuple[Draw, range]]:
    row = 0
    for draw, count in zip(draws, counts.tolist(), strict=True):
        yield draw, range(row, row + count)
        row += count
