"""Samples tokens from logits. Prefill nodes sample the first token in the same way as decode nodes
sample the later ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pd.core.messages import TokenLogprobs
from pd.engine.device_copy import HostCopy, to_device
from pd.engine.penalties import PenalizedRows, Penalties
from pd.engine.quick_masks import MaskRequest
from pd.engine.rule_lanes import RuleLanes
from pd.engine.sampling_state import Draw, SamplingState
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
        token_id: -1 if ``error`` is set.
        logprobs: log probabilities under the model's raw logits; None unless the request wants
            them.
        error: set if the row's logits were not finite. The request must fail then.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Samples:
    """Tokens of a step on the device, with their copy to the host.

    Attributes:
        tokens: int64 ``[rows]`` on the device. Even rows without finite logits hold a valid id.
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
        """Whether :meth:`read_tokens` would return at once."""
        return self._copy.is_complete

    def read_tokens(self) -> list[SampledToken]:
        """Wait for the device and return one token for each row."""
        tokens, *wanted = self._copy.wait()
        logprobs = {} if self._logprobs is None else self._logprobs.read_rows(wanted)
        return [
            SampledToken(token, logprobs.get(i))
            if token >= 0
            else SampledToken(-1, error="the model's logits are not finite")
            for i, token in enumerate(tokens.tolist())
        ]


@dataclass(frozen=True)
class _RowLogprobs:
    """Log probabilities of some rows under raw logits.

    Attributes:
        rows: indices of ``n`` rows of the step.
        counts: number of likeliest tokens to report for each row.
        named: further tokens to report for each row.
        tensors: tokens int64 ``[n]``, their log probabilities ``[n]``, then log probabilities and
            ids of the likeliest tokens, ``[n, max(counts)]``, and log probabilities of ``named``,
            ``[n, max(map(len, named))]``.
    """

    rows: Sequence[int]
    counts: Sequence[int]
    named: Sequence[tuple[int, ...]]
    tensors: list[torch.Tensor]

    @classmethod
    def compute_rows(
        cls,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        rows: Sequence[int],
        counts: Sequence[int],
        named: Sequence[tuple[int, ...]],
    ) -> _RowLogprobs:
        """Compute the log probabilities. ``logits`` and ``tokens`` are those of ``rows`` only."""
        logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        top = logprobs.topk(min(max(counts, default=0), logits.shape[1]), dim=-1)
        width = max(map(len, named), default=0)
        padded = [(*ids, *(0,) * (width - len(ids))) for ids in named] if width else []
        places = np.array(padded, np.int64).reshape(len(named), width)
        of_named = logprobs.gather(1, to_device(places, torch.int64, logits.device))
        tensors = [tokens, chosen, top.values, top.indices, of_named]
        return cls(rows, counts, named, tensors)

    def read_rows(self, tensors: Sequence[torch.Tensor]) -> dict[int, TokenLogprobs]:
        """Return the log probabilities by row, given copies of :attr:`tensors` on the host."""
        tokens, chosen, values, ids, of_named = (tensor.tolist() for tensor in tensors)
        wanted = zip(self.rows, self.counts, self.named, strict=True)
        return {
            row: TokenLogprobs(
                tokens[i],
                chosen[i],
                [*ids[i][:count], *named],
                [*values[i][:count], *of_named[i][: len(named)]],
            )
            for i, (row, count, named) in enumerate(wanted)
        }


class PromptLogprobs:
    """Log probabilities of prompt tokens, with their copy to the host."""

    def __init__(self, logprobs: _RowLogprobs) -> None:
        self._logprobs = logprobs
        self._copy = HostCopy(logprobs.tensors)

    def read_logprobs(self) -> list[TokenLogprobs]:
        """Wait for the device and return the log probabilities of each token."""
        return list(self._logprobs.read_rows(self._copy.wait()).values())


@dataclass(frozen=True, slots=True, eq=False)
class PreparedDraws:
    """The inputs of sampling except the logits. The tensors are arguments of
    :func:`pd.kernels.sampling.sample_rows` on the device.

    Attributes:
        draws: in the order of their rows.
        counts: number of rows of each draw, int64.
        shortest: rows and tokens, int64, of the logits that minimum lengths forbid in rows without
            rules. We list them early, because draws change once the previous step is accounted for.
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


class _RowParams(NamedTuple):
    """Temperatures, ``top_k``, ``top_p`` and ``min_p`` of rows, on the device. Steps whose draws
    have the same parameters reuse them, so this must not keep states alive."""

    params: list[SamplingParams]
    counts: Int64Array
    tensors: list[torch.Tensor]

    def has_params(self, params: list[SamplingParams], counts: Int64Array) -> bool:
        """Whether the draws of a step have these parameters and numbers of rows."""
        return params == self.params and np.array_equal(counts, self.counts)


class TokenMasks(NamedTuple):
    """Rows with rules, int64 ``[m]``, and masks of their allowed tokens: arguments of
    :func:`pd.kernels.token_masks.apply_token_masks` on the device."""

    rows: torch.Tensor
    masks: torch.Tensor


class Sampler:
    """Samples one token for each row of a step. Used by one thread.

    Raw logits first get repetition, frequency and presence penalties, logit bias and minimum
    length. Then come temperature, top-k, top-p and min-p. The Gumbel noise added last is keyed by
    (seed, position, token id), so a row's token does not depend on the rest of the batch.

    Attributes:
        rule_lanes: advances the rules of choices over their outputs.
    """

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self.device = torch.device(device)
        self._staging = PinnedStaging(self.device)
        self._penalties = Penalties(vocab_size, self.device)
        # Made by the last prepared step.
        self._of_rows: _RowParams | None = None
        self.rule_lanes = RuleLanes(vocab_size)

    def sample_tokens(
        self, logits: torch.Tensor, states: Sequence[SamplingState]
    ) -> list[SampledToken]:
        """Draw and return a token for each row of ``logits``."""
        draws = [Draw(state) for state in states]
        return self.launch_draws(logits, self.prepare_draws(draws)).read_tokens()

    @torch.inference_mode()
    def prepare_draws(
        self,
        draws: Sequence[Draw],
        previous: torch.Tensor | None = None,
        drafts: torch.Tensor | None = None,
        outcome: StepOutcome | None = None,
    ) -> PreparedDraws:
        """Upload the inputs of :meth:`launch_draws`. Launch everything that you prepare, in the
        same order, unless a step fails; see :meth:`pd.engine.penalties.Penalties.prepare_rows`.

        Args:
            draws: in the order of the rows. Token counts for penalties move from their states to
                the device.
            previous: :attr:`Samples.tokens` of the previous step, which ``Draw.follows`` refers to.
            drafts: drafted tokens that ``Draw.first`` refers to, int64 on the device.
            outcome: outcome of the previous step, which ``Draw.work`` refers to.
        """
        params = [draw.state.params for draw in draws]
        noise_at = [(draw.state.seed, draw.state.find_position(draw.ahead)) for draw in draws]
        arrays: list[npt.NDArray[Any]] = [np.array(noise_at, np.int64).reshape(-1, 2)]
        counts = np.array([draw.num_rows for draw in draws], np.int64)
        of_rows = self._of_rows
        if of_rows is None or not of_rows.has_params(params, counts):
            of_rows = None
            arrays += self._make_param_arrays(params)
        if len(draws) and counts.max() > 1:
            arrays = [np.repeat(array, counts, axis=0) for array in arrays]
            for draw, end in zip(draws, np.cumsum(counts).tolist(), strict=True):
                if draw.tree is not None:
                    arrays[0][end - draw.tree.size : end, 1] += draw.tree.depths
        unread = outcome is not None and any(draw.unread for draw in draws)
        if unread:
            arrays.append(np.repeat([draw.work for draw in draws], counts))
        tensors = self._staging.upload_arrays(arrays)
        if outcome is not None and unread:
            tensors[0][:, 1] += outcome.counts_of(tensors.pop())
        if of_rows is None:
            of_rows = self._of_rows = _RowParams(params, counts, tensors[1:])
        penalized = self._penalties.prepare_rows(draws, previous, drafts, outcome)
        too_short = _find_too_short(draws, counts)
        return PreparedDraws(draws, counts, too_short, penalized, tensors[0], *of_rows.tensors)

    def _make_param_arrays(self, params: Sequence[SamplingParams]) -> list[npt.NDArray[Any]]:
        """Make the arrays of temperatures, ``top_k``, ``top_p`` and ``min_p`` for
        :class:`PreparedDraws`."""
        vocab = self._vocab_size
        return [
            np.array([0.0 if p.greedy else p.temperature for p in params], np.float32),
            np.array([min(p.top_k or vocab, vocab) for p in params], np.int64),
            np.array([p.top_p for p in params], np.float32),
            np.array([p.min_p for p in params], np.float32),
        ]

    @torch.inference_mode()
    def fill_masks(self, prepared: PreparedDraws, drafts: IntArray) -> TokenMasks | None:
        """Ask the draws' rules which tokens may come next, and upload the masks. Do not use the
        tokens drawn for choices that are late afterwards.

        Args:
            prepared: its states have observed all tokens before their first row.
            drafts: drafted tokens that ``Draw.first`` refers to.

        Returns:
            None if no draw has rules.
        """
        ruled = [(draw, rows) for draw, rows in _rows_of(prepared) if draw.state.rules is not None]
        if not ruled:
            return None
        rows = [row for _, of_draw in ruled for row in of_draw]
        shape = len(rows), -(-self._vocab_size // BITS)
        places: list[npt.NDArray[Any]] = self._staging.reserve_arrays(
            [((len(rows),), np.int64), (shape, np.int32)]
        )
        places[0][:] = rows
        masks = places[1]
        requests, first = list[MaskRequest](), 0
        for draw, of_draw in ruled:
            rules = draw.state.rules
            assert rules is not None
            if draw.tree is not None:
                guesses = drafts[draw.first : draw.first + draw.tree.size].tolist()
                request = MaskRequest(rules, first, draw.tree, guesses)
            else:
                request = MaskRequest(rules, first)
            if not _fill_known_masks(request, masks):
                requests.append(request)
            first += len(of_draw)
        is_over = not requests or self.rule_lanes.fill_masks(requests, masks)
        first = 0
        for draw, of_draw in ruled:
            if draw.state.must_continue():
                depths = [0] if draw.tree is None else [0, *draw.tree.depths.tolist()]
                for row, depth in enumerate(depths, first):
                    if draw.state.must_continue(depth):
                        _forbid_tokens(masks[row], draw.state.stop_ids)
            first += len(of_draw)
        sent = TokenMasks(*self._staging.send_arrays(places))
        if not is_over:
            self._staging = PinnedStaging(self.device)  # nobody knows when the other is free
        return sent

    @torch.inference_mode()
    def launch_draws(
        self, logits: torch.Tensor, prepared: PreparedDraws, masks: TokenMasks | None = None
    ) -> Samples:
        """Choose a token for each row. On a GPU this is only queued.

        Args:
            logits: float32, bfloat16 or float16 ``[n, vocab_size]``, not modified.
            prepared: for ``n`` rows. Even without rows, the result is ready only once all work
                queued before is done.
            masks: tokens that rules allow.
        """
        tokens, finite = self.choose_tokens(logits, prepared, masks)
        return Samples(tokens, finite, self._compute_logprobs(logits, tokens, prepared))

    @torch.inference_mode()
    def choose_tokens(
        self, logits: torch.Tensor, prepared: PreparedDraws, masks: TokenMasks | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do the same as :meth:`launch_draws` for tokens that the host does not need.

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
            self._adjust_logits(logits, prepared, masks),
            prepared.temperatures,
            prepared.noise_at,
            prepared.top_k,
            prepared.top_p,
            prepared.min_p,
            any_random=not all(p.greedy for p in params),
            any_filter=any(p.top_k or p.top_p < 1 or p.min_p > 0 for p in params),
        )

    @torch.inference_mode()
    def compute_prompt_logprobs(
        self, logits: torch.Tensor, targets: IntArray, top_n: int, named: tuple[int, ...] = ()
    ) -> PromptLogprobs:
        """Compute log probabilities of prompt tokens. On a GPU this is only queued.

        Args:
            logits: as in :meth:`launch_draws`; row i follows the token before ``targets[i]``.
            targets: int32 ``[n]``, tokens of the prompt.
            top_n: number of likeliest tokens to report for each.
            named: further tokens to report for each.
        """
        chosen = self._to_index(targets)
        rows = range(len(targets))
        count = len(targets)
        return PromptLogprobs(
            _RowLogprobs.compute_rows(logits, chosen, rows, [top_n] * count, [named] * count)
        )

    def _compute_logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, prepared: PreparedDraws
    ) -> _RowLogprobs | None:
        asked, counts, named = list[int](), list[int](), list[tuple[int, ...]]()
        for draw, rows in _rows_of(prepared):
            if draw.state.params.logprobs:
                asked += rows
                counts += [draw.state.params.top_logprobs] * len(rows)
                named += [draw.state.params.logprob_token_ids] * len(rows)
        if not asked:
            return None
        rows_there = self._to_index(asked)
        chosen = logits.index_select(0, rows_there)
        return _RowLogprobs.compute_rows(chosen, tokens[rows_there], asked, counts, named)

    def _adjust_logits(
        self, logits: torch.Tensor, prepared: PreparedDraws, masks: TokenMasks | None
    ) -> torch.Tensor:
        """Apply penalties, bias, minimum length and masks to the rows that need them."""
        biased = list[tuple[int, SamplingState]]()
        for draw, rows in _rows_of(prepared):
            if draw.state.params.logit_bias:
                biased += [(row, draw.state) for row in rows]
        places_too_short, ids_too_short = prepared.shortest
        if not (prepared.penalized or biased or len(ids_too_short) or masks):
            return logits
        logits = logits.to(torch.float32, copy=True)
        if prepared.penalized is not None:
            self._penalties.apply_rows(logits, prepared.penalized)
        if biased:
            places = np.repeat([i for i, _ in biased], [len(s.bias_ids) for _, s in biased])
            ids = np.concatenate([s.bias_ids for _, s in biased])
            index = self._to_index(places), self._to_index(ids)
            logits[index] += self._floats(np.concatenate([s.bias for _, s in biased]))
        if len(ids_too_short):
            logits[self._to_index(places_too_short), self._to_index(ids_too_short)] = float("-inf")
        if masks is not None:
            apply_token_masks(logits, *masks)
        return logits

    def _to_index(self, values: Sequence[int] | npt.NDArray[np.integer]) -> torch.Tensor:
        return to_device(values, torch.int64, self.device)

    def _floats(self, values: Sequence[float] | npt.NDArray[np.float64]) -> torch.Tensor:
        return to_device(values, torch.float32, self.device)


def _fill_known_masks(request: MaskRequest, masks: IntArray) -> bool:
    """Fill the masks of a choice if that takes no time, and return whether they are done. Otherwise
    set all bits of the rows that may stay unfilled."""
    choice = request.choice
    choice.is_late = False
    if request.tree is None and choice.mask is not None:
        masks[request.row] = choice.mask
        return True
    if request.tree is not None or choice.has_ended:
        request.select_rows(masks).fill(-1)
    if choice.is_new:
        choice.fill_masks(request.select_rows(masks))
        return True
    return choice.has_ended


def _forbid_tokens(mask: IntArray, token_ids: Int64Array) -> None:
    """Remove tokens from a mask, unless nothing else is allowed."""
    without = mask.copy()
    bits = np.left_shift(np.uint32(1), (token_ids % BITS).astype(np.uint32))
    np.bitwise_and.at(without.view(np.uint32), token_ids // BITS, ~bits)
    if without.any():
        mask[:] = without


def _find_too_short(draws: Sequence[Draw], counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Find the places of :attr:`PreparedDraws.shortest`."""
    places, ids = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for draw, rows in _with_rows(draws, counts):
        # NOTE: in a draw with unread guesses, either all rows are too short or none.
        state, ahead = draw.state, draw.ahead
        # Masks of rules already respect the minimum length.
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
