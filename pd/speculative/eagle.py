"""Drafts with an EAGLE head, which reads the model's hidden states.

After Li et al. (EAGLE, 2024; EAGLE-2, 2024; EAGLE-3, 2025). The head draws with the temperature and
the noise of the request. It therefore agrees with the model, at any temperature, if both give a
token about the same probability.

We draft right after the launch of a step, from the states it leaves on the device. While the device
drafts, the host reads the step's tokens and plans the next one.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pd.engine.device_copy import HostCopy, to_device
from pd.engine.eagle import NO_ROW, CarriedState
from pd.engine.step_outcome import StepOutcome
from pd.kernels.acceptance import accept_drafts
from pd.kernels.draft_tensors import DraftRoots, DraftRows, DraftTables, Trees
from pd.kernels.drafting import (
    branch_rows,
    find_likeliest,
    start_rows,
)
from pd.kernels.paging import find_token_slots
from pd.kernels.staging import PinnedStaging, count_packed_bytes
from pd.speculative.draft import Draft, DraftedTokens
from pd.speculative.drafter import Drafter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from pd.engine.cuda_graphs import GraphRecorder
    from pd.engine.eagle import EagleWriter
    from pd.engine.sampling_state import SamplingState
    from pd.kernels.attention import AttentionBackend
    from pd.kernels.attention.base import DraftAttention
    from pd.kernels.staging import Array
    from pd.speculative.drafter import DraftedWork, DraftRequest, StepOnDevice, TokenSequence
    from pd.speculative.shape import DraftShape

    IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Ask:
    """One sequence to draft for, seen from the host.

    Attributes:
        most: number of tokens up to which the sequence has pages.
    """

    sequence: TokenSequence
    state: CarriedState
    choice: SamplingState
    limit: int
    most: int


@dataclass(frozen=True, slots=True)
class _Ends:
    """Last known tokens on the device, int64, and their places in the asks.

    Attributes:
        positions: positions of the tokens in their sequences.
        index: index of each ask's token, on the host.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    index: Sequence[int]


class EagleDrafter(Drafter):
    """Drafts with an EAGLE head, one pass for each depth of the draft.

    Args:
        writer: the head, and its states left by the model's passes.
        attention: attention backend over the head's K and V.
        shape: shape of the largest draft.
        move_tokens: see :meth:`pd.engine.kv_pool.KVPool.move_tokens`.
        max_context: maximum tokens of a sequence.
        sizes: make_zeros of rows for which we capture CUDA graphs; empty on a CPU.
        recorder: captures the graphs; needed for ``sizes``.
    """

    drafts_ahead = True

    def __init__(
        self,
        writer: EagleWriter,
        attention: AttentionBackend,
        shape: DraftShape,
        move_tokens: Callable[[torch.Tensor, torch.Tensor], None],
        *,
        max_context: int,
        sizes: Sequence[int] = (),
        recorder: GraphRecorder | None = None,
    ) -> None:
        self._writer, self._attention = writer, attention
        self._shape, self._move_tokens, self._max_context = shape, move_tokens, max_context
        self._device = writer.carried.device
        # Two, so that neither waits for a copy after the previous step.
        self._staging, self._roots_staging = (PinnedStaging(self._device) for _ in range(2))
        self._last: DraftedTokens | None = None
        self._steppers: dict[int, _Stepper] = {}
        self._sizes = sorted(sizes)
        for size in reversed(self._sizes):
            assert recorder is not None
            stepper = self._make_stepper(size)
            stepper.capture_graph(recorder)
            self._steppers[size] = stepper

    def begin_step(self, works: Sequence[DraftedWork]) -> None:
        """See :class:`pd.speculative.drafter.Drafter`."""
        for work in works:
            sequence = work.sequence
            state = sequence.carried_state
            if state is None or state.row == NO_ROW:  # a row may have come free
                state = sequence.carried_state = self._writer.take_row()
            self._writer.upload_state(state)
            # Without the state before the first token, we compute the previous token again. After
            # unread guesses the state is there, because we needed it to draft them.
            work.reread = (
                not work.num_unread and work.start > 0 and not state.has_state_for(work.start)
            )
            state.stop = work.stop

    def draft_tokens(
        self, requests: Sequence[DraftRequest], prompt_tokens: int
    ) -> list[Draft | None]:
        """See :class:`pd.speculative.drafter.Drafter`."""
        drafts = list[Draft | None]([None] * len(requests))
        asks, places = [], []
        for place, (sequence, choice, limit, work) in enumerate(requests):
            state = sequence.carried_state
            if state is None or state.row == NO_ROW or work is None:
                continue
            # We have the state before the last token if the work computes only that token.
            if work.reread or work.start != sequence.num_tokens - 1:
                continue
            asks.append(_Ask(sequence, state, choice, limit, sequence.num_tokens + limit))
            places.append(place)
        if asks:
            known = [(int(ask.sequence.ids[-1]), ask.sequence.num_tokens - 1) for ask in asks]
            ends = to_device(np.array(known).T, torch.int64, self._device)
            made = self._draft_asks(asks, _Ends(ends[0], ends[1], range(len(asks))))
            for place, draft in zip(places, made, strict=True):
                drafts[place] = draft
        return drafts

    def rehearse_draft(self, requests: Sequence[DraftRequest]) -> None:
        """See :class:`pd.speculative.drafter.Drafter`."""
        # All sequences read the same state and have room for one more token.
        state, count = CarriedState(NO_ROW), len(requests)
        asks = [
            _Ask(sequence, state, choice, limit, sequence.num_tokens)
            for sequence, choice, limit, _ in requests
        ]
        ends = to_device(np.zeros((2, count)), torch.int64, self._device)
        self._draft_asks(asks, _Ends(ends[0], ends[1], range(count)))
        self.catch_up()

    @torch.inference_mode()
    def follow_step(self, step: StepOnDevice) -> StepOutcome | None:
        """See :class:`pd.speculative.drafter.Drafter`."""
        self._copy_states(step)
        works = step.works
        states = [
            work.sequence.carried_state for work in works if work.sequence.carried_state is not None
        ]
        if len(states) < len(works):  # begin_step() failed
            return None
        trees, roots, rows = self._upload_step(step, states)
        if len(step.sampled) == 0:
            self._writer.keep_states(rows, roots, torch.full_like(roots, -1))
            return None
        drafted = [work for work in works if work.draft is not None]
        counting = any(work.samples[0].has_penalties for work in drafted)
        branching = any(work.draft and not work.draft.tree.is_chain for work in drafted)
        width = max((work.max_accepted for work in drafted), default=0)
        accepted = accept_drafts(step.sampled, trees, width if counting or branching else 0)
        counts = HostCopy([accepted.counts])  # before we draft, or it would wait for that
        self._writer.keep_states(rows, roots, accepted.last)
        if branching:
            self._move_accepted(step, accepted.path)
        asks, asking = [], []
        for place, (work, state) in enumerate(zip(works, states, strict=True)):
            if work.ahead_limit and state.row != NO_ROW:
                choice, limit = work.samples[0], work.ahead_limit
                asks.append(_Ask(work.sequence, state, choice, limit, work.ahead_stop))
                asking.append(place)
        if asks:
            made = self._draft_asks(asks, _Ends(accepted.tokens, accepted.positions, asking))
            for ask, draft in zip(asks, made, strict=True):
                ask.sequence.next_draft = draft
        tokens = accepted.collect_tokens(step.sampled, trees.rows) if counting else None
        return StepOutcome(accepted.counts, accepted.tokens, tokens, counts)

    def _upload_step(
        self, step: StepOnDevice, states: Sequence[CarriedState]
    ) -> tuple[Trees, torch.Tensor, torch.Tensor]:
        """Upload the drafts of a step, the root of each work, and its row of the carried states."""
        works, drafts = step.works, step.drafts
        parents = np.zeros(0 if drafts is None else len(drafts), np.int64)
        for work, first in zip(works, step.first_drafts, strict=True):
            if work.draft is not None:
                parents[first : first + work.draft.size] = work.draft.tree.parents
        columns = (
            # A work without samples has no row, and we do not use its result.
            [work.row if work.samples else 0 for work in works],
            step.first_drafts,
            [0 if work.draft is None else work.draft.size for work in works],
            [-1 if work.num_forced is None else work.num_forced for work in works],
            step.stops,
            step.roots,
            [state.row for state in states],
            step.followed,
        )
        table, parents_there = self._staging.upload_arrays([np.array(columns, np.int64), parents])
        *tree_columns, roots, rows, followed = table
        if step.before is not None:
            tree_columns[-1] += step.before.counts_of(followed)
        tokens = step.sampled[:0] if drafts is None else drafts
        return Trees(tokens, parents_there, *tree_columns), roots, rows

    def _move_accepted(self, step: StepOnDevice, path: torch.Tensor) -> None:
        """Move KV of accepted guesses to its place in the sequence.

        We computed guess ``i`` of a draft ``i + 1`` places after the root, whatever its depth in
        the tree.

        Args:
            path: accepted guesses of each draft, int64 ``[works, width]``, padded with -1.
        """
        works, pool, width = step.works, self._writer.kv, path.shape[1]
        sizes = [
            most + (0 if work.draft is None else work.draft.size)
            for work, most in zip(works, step.most_unread, strict=True)
        ]
        # Other guesses move inside the pool's extra page.
        extra_slot = pool.num_pages * pool.page_size
        tables = [np.atleast_2d(work.sequence.tables) for work in works]
        shape = len(tables[0]), len(works), max(width, *sizes)
        slots = np.full(shape, extra_slot, np.int64)
        for index, (stop, size) in enumerate(zip(step.stops, sizes, strict=True)):
            places = np.arange(stop, stop + size)
            for rows, table in zip(slots, tables[index], strict=True):
                rows[index, :size] = find_token_slots(table, places, pool.page_size)
        there = to_device(slots, torch.int64, self._device)
        begins = torch.zeros_like(path[:, :1])
        if step.before is not None:
            followed = to_device(step.followed, torch.int64, self._device)
            begins = step.before.counts_of(followed)[:, None]
        accepted, extra = path >= 0, torch.full_like(path, extra_slot)

        def slots_of(places: torch.Tensor) -> torch.Tensor:
            last = there.shape[2] - 1
            index = (begins + places).clamp(0, last).expand(len(there), *path.shape)
            return torch.where(accepted, there.gather(2, index), extra)

        source, to = slots_of(path), slots_of(torch.arange(width, device=self._device))
        self._move_tokens(source.flatten(1), to.flatten(1))

    def catch_up(self) -> bool:
        """Wait for all drafts, because ended sequences keep their pages until then."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()
        return last is not None

    def _copy_states(self, step: StepOnDevice) -> None:
        """Queue copies of the states of complete prompts for other nodes."""
        leaving = [
            (work, root)
            for work, root in zip(step.works, step.roots, strict=True)
            if work.sequence.request.outgoing is not None
            and work.stop == len(work.sequence.request.prompt)
        ]
        if not leaving:
            return
        roots = to_device([root for _, root in leaving], torch.int64, self._device)
        copies = self._writer.copy_states(roots)
        for place, (work, _) in enumerate(leaving):
            work.drafter_state = partial(_read_row, copies, place)

    def _draft_asks(self, asks: Sequence[_Ask], ends: _Ends) -> list[Draft | None]:
        """Draft for sequences whose last known tokens are ``ends``."""
        shape = self._shape.take_first(max(ask.limit for ask in asks))
        rows = len(asks) * shape.width
        if self._sizes and rows <= self._sizes[-1]:
            stepper = self._steppers[self._sizes[bisect_left(self._sizes, rows)]]
        else:
            stepper = self._make_stepper(rows)
        tokens = stepper.run_head(asks, ends, shape)
        self._last = batch = DraftedTokens(tokens)
        size, full = self._shape.tree.size, self._shape
        return [
            Draft(batch, i * size, full.take_first(ask.limit).tree) for i, ask in enumerate(asks)
        ]

    def _make_stepper(self, rows: int) -> _Stepper:
        attention = self._attention.make_draft_graph(
            rows, self._max_context, self._writer.head.first_key
        )
        if attention is None:
            raise ValueError(f"attention backend {self._attention.name} cannot draft")
        return _Stepper(self._writer, attention, rows, self._shape, self._roots_staging)


def _read_row(copies: HostCopy, row: int) -> bytes:
    return copies.wait()[0][row].numpy().tobytes()


class _Stepper:
    """Runs the head over a fixed number of rows, once for each depth of a tree.

    If captured, each pass is a CUDA graph.
    """

    def __init__(
        self,
        writer: EagleWriter,
        attention: DraftAttention,
        rows: int,
        shape: DraftShape,
        staging: PinnedStaging,
    ) -> None:
        device, states = writer.carried.device, writer.carried
        self._writer, self._attention, self._num_rows = writer, attention, rows
        self._staging, self._topk = staging, shape.topk
        self._graph: torch.cuda.CUDAGraph | None = None

        def make_zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self._rows = DraftRows(
            tokens=make_zeros(rows),
            positions=make_zeros(rows),
            states=states.new_zeros(rows, states.shape[1]),
            places=attention.places,
            bases=attention.bases,
            masks=attention.masks,
            noise_at=make_zeros(rows, 2),
            temperatures=torch.zeros(rows, dtype=torch.float32, device=device),
        )
        columns, depths = shape.levels.shape[1], shape.depth
        self._tables = DraftTables(
            make_zeros(depths, columns), make_zeros(1), make_zeros(rows, shape.tree.size)
        )
        self._shape: DraftShape | None = None
        self._inputs = torch.zeros(
            count_packed_bytes(self._pack_roots([], [], [], [])), dtype=torch.uint8, device=device
        )
        self._roots = self._upload_roots([], [], [], [])

    def _pack_roots(
        self,
        index: Sequence[int],
        carried: Sequence[int],
        seeds: Sequence[int],
        temperatures: Sequence[float],
    ) -> list[Array]:
        """Make the arrays of :class:`pd.kernels.drafting.DraftRoots`, always in the same sizes."""
        columns = np.zeros((3, self._num_rows), np.int64)
        for column, values in zip(columns, (index, carried, seeds), strict=True):
            column[: len(values)] = values
        floats = np.zeros(self._num_rows, np.float32)
        floats[: len(temperatures)] = temperatures
        return [np.array([len(index)], np.int64), *columns, floats]

    def _upload_roots(self, *columns: Sequence[Any]) -> DraftRoots:
        positions = torch.zeros(self._num_rows, dtype=torch.int64, device=self._inputs.device)
        packed = self._pack_roots(*columns)
        return DraftRoots._make([*self._staging.upload_arrays(packed, self._inputs), positions])

    def capture_graph(self, recorder: GraphRecorder) -> None:
        """Capture a pass. Later passes replay it."""
        self._attention.plan(np.zeros(0, np.int64), [])
        self._graph, _ = recorder.capture_graph(self._run_pass)

    @torch.inference_mode()
    def run_head(self, asks: Sequence[_Ask], ends: _Ends, shape: DraftShape) -> torch.Tensor:
        """Draft guesses of this shape for each sequence.

        Returns:
            A copy of the drafted tokens, int64 ``[asks * size]``, with ``size`` guesses of the
            largest shape.
        """
        params = [ask.choice.params for ask in asks]
        packed = self._pack_roots(
            ends.index,
            [ask.state.row for ask in asks],
            [ask.choice.seed for ask in asks],
            [0.0 if p.greedy else p.temperature for p in params],
        )
        self._staging.upload_arrays(packed, self._inputs)
        if shape is not self._shape:
            levels = shape.levels
            there = to_device(levels, torch.int64, self._inputs.device)
            self._tables.levels[: levels.shape[0], : levels.shape[1]].copy_(there)
            self._shape = shape
        limits = np.repeat(np.array([ask.most for ask in asks], np.int64), shape.width)
        pages = [ask.sequence.pages for ask in asks for _ in range(shape.width)]
        self._attention.plan(limits, pages)
        start_rows(
            self._roots,
            self._rows,
            self._tables,
            ends.tokens,
            ends.positions,
            self._writer.carried,
        )
        for _ in range(shape.depth):
            if self._graph is None:
                self._run_pass()
            else:
                self._graph.replay()
        return self._tables.drafted[: len(asks)].flatten().clone()

    @torch.inference_mode()
    def _run_pass(self) -> torch.Tensor:
        """Compute the rows of one depth, and make the rows of the next."""
        rows, head = self._rows, self._writer.head
        self._attention.locate_slots()
        logits, hidden = head(rows.tokens, rows.states, rows.positions, self._attention)
        best = find_likeliest(logits, rows.temperatures, rows.noise_at, head.target_ids, self._topk)
        branch_rows(self._roots, rows, self._tables, best, head.target_ids, hidden)
        return self._tables.drafted
