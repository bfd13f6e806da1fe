"""Drafts by an EAGLE head, which reads the model's hidden states.

After Li et al. (EAGLE, 2024; EAGLE-2, 2024; EAGLE-3, 2025). The head draws with the temperature and
the noise of the request, so that it agrees with the model where both give a token about the same
probability, at any temperature.

Drafts are made right after the step that they follow was launched, from what that step leaves on
the device. So while the device drafts, the host reads the step's tokens and plans the next one.
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
from pd.kernels.acceptance import Trees, accept
from pd.kernels.drafting import (
    DraftRoots,
    DraftRows,
    DraftTables,
    branch_rows,
    likeliest,
    start_rows,
)
from pd.kernels.paging import token_slots
from pd.kernels.staging import PinnedStaging, packed_bytes
from pd.speculative.draft import Draft, DraftedTokens
from pd.speculative.drafter import Drafter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from pd.core.request import Sequence as TokenSequence
    from pd.engine.cuda_graphs import GraphRecorder
    from pd.engine.eagle import EagleWriter
    from pd.engine.sampling_state import SamplingState
    from pd.kernels.attention import AttentionBackend
    from pd.kernels.attention.base import DraftAttention
    from pd.kernels.staging import Array
    from pd.speculative.drafter import DraftedWork, DraftRequest, StepOnDevice
    from pd.speculative.shape import DraftShape

    IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Ask:
    """One sequence to draft for, as the host knows it.

    Attributes:
        most: tokens that the sequence may have by the last of its drafted ones.
    """

    sequence: TokenSequence
    state: CarriedState
    choice: SamplingState
    limit: int
    most: int


@dataclass(frozen=True, slots=True)
class _Ends:
    """Last known tokens on the device, int64, and which of them belong to what is asked.

    Attributes:
        positions: of the tokens in their sequences.
        index: for each ask the index of its token, on the host.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    index: Sequence[int]


class EagleDrafter(Drafter):
    """Runs the head as often as tokens are to be drafted.

    Args:
        writer: the head and the states that the model's passes leave for it.
        attention: over the head's K and V.
        shape: of the largest draft.
        move_tokens: see :meth:`pd.engine.kv_pool.KVPool.move_tokens`.
        sizes: numbers of rows for which CUDA graphs are captured; empty on a CPU.
        max_context: tokens of a sequence.
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
        # Each of its own, so that none waits for a copy behind the step before.
        self._staging, self._roots_staging = (PinnedStaging(self._device) for _ in range(2))
        self._last: DraftedTokens | None = None
        self._steppers: dict[int, _Stepper] = {}
        self._sizes = sorted(sizes)
        for size in reversed(self._sizes):
            assert recorder is not None
            stepper = self._stepper(size)
            stepper.capture(recorder)
            self._steppers[size] = stepper

    def begin(self, works: Sequence[DraftedWork]) -> None:
        """See :class:`pd.speculative.drafter.Drafter`."""
        for work in works:
            sequence = work.sequence
            state = sequence.carried
            if state is None or state.row == NO_ROW:  # a row may have come free
                state = sequence.carried = self._writer.take_row()
            self._writer.upload(state)
            # Without the state before its first token, the token before that is computed again.
            # Behind unread guesses it is there, or none would have been drafted.
            work.reread = not work.unread and work.start > 0 and not state.covers(work.start)
            state.stop = work.stop

    def draft(self, requests: Sequence[DraftRequest], prompt_tokens: int) -> list[Draft | None]:
        """See :class:`pd.speculative.drafter.Drafter`."""
        drafts = list[Draft | None]([None] * len(requests))
        asks, places = [], []
        for place, (sequence, choice, limit) in enumerate(requests):
            state, work = sequence.carried, sequence.launched
            if state is None or state.row == NO_ROW or work is None:
                continue
            # The state of the token before the last one is there if that one alone is computed.
            if work.reread or work.start != sequence.num_tokens - 1:
                continue
            asks.append(_Ask(sequence, state, choice, limit, sequence.num_tokens + limit))
            places.append(place)
        if asks:
            known = [(int(ask.sequence.ids[-1]), ask.sequence.num_tokens - 1) for ask in asks]
            ends = to_device(np.array(known).T, torch.int64, self._device)
            made = self._draft(asks, _Ends(ends[0], ends[1], range(len(asks))))
            for place, draft in zip(places, made, strict=True):
                drafts[place] = draft
        return drafts

    def rehearse(self, requests: Sequence[DraftRequest]) -> None:
        """See :class:`pd.speculative.drafter.Drafter`."""
        # All read the same state, whatever it is, and have room for one token more.
        state, count = CarriedState(NO_ROW), len(requests)
        asks = [
            _Ask(sequence, state, choice, limit, sequence.num_tokens)
            for sequence, choice, limit in requests
        ]
        ends = to_device(np.zeros((2, count)), torch.int64, self._device)
        self._draft(asks, _Ends(ends[0], ends[1], range(count)))
        self.catch_up()

    @torch.inference_mode()
    def follow(self, step: StepOnDevice) -> StepOutcome | None:
        """See :class:`pd.speculative.drafter.Drafter`."""
        self._copy_states(step)
        works = step.works
        states = [work.sequence.carried for work in works if work.sequence.carried is not None]
        if len(states) < len(works):  # begin() failed
            return None
        trees, roots, rows = self._upload(step, states)
        if len(step.sampled) == 0:
            self._writer.keep(rows, roots, torch.full_like(roots, -1))
            return None
        drafted = [work for work in works if work.draft is not None]
        counting = any(work.samples[0].has_penalties for work in drafted)
        branching = any(work.draft and not work.draft.tree.is_chain for work in drafted)
        width = max((work.most_accepted for work in drafted), default=0)
        found = accept(step.sampled, trees, width if counting or branching else 0)
        counts = HostCopy([found.counts])  # before more is drafted, which it would wait for
        self._writer.keep(rows, roots, found.last)
        if branching:
            self._move_accepted(step, found.path)
        asks, asking = [], []
        for place, (work, state) in enumerate(zip(works, states, strict=True)):
            if work.ahead_limit and state.row != NO_ROW:
                choice, limit = work.samples[0], work.ahead_limit
                asks.append(_Ask(work.sequence, state, choice, limit, work.ahead_stop))
                asking.append(place)
        if asks:
            made = self._draft(asks, _Ends(found.tokens, found.positions, asking))
            for ask, draft in zip(asks, made, strict=True):
                ask.sequence.ahead = draft
        tokens = found.sampled(step.sampled, trees.rows) if counting else None
        return StepOutcome(found.counts, found.tokens, tokens, counts)

    def _upload(
        self, step: StepOnDevice, states: Sequence[CarriedState]
    ) -> tuple[Trees, torch.Tensor, torch.Tensor]:
        """Upload the drafts of a step, and for each work its root among the pass's tokens and its
        row among the carried states."""
        works, drafts = step.works, step.drafts
        parents = np.zeros(0 if drafts is None else len(drafts), np.int64)
        for work, first in zip(works, step.first_drafts, strict=True):
            if work.draft is not None:
                parents[first : first + work.draft.size] = work.draft.tree.parents
        columns = (
            # NOTE: a work without samples has no row; what is accepted there is not used.
            [work.row if work.samples else 0 for work in works],
            step.first_drafts,
            [0 if work.draft is None else work.draft.size for work in works],
            [-1 if work.forced is None else work.forced for work in works],
            step.stops,
            step.roots,
            [state.row for state in states],
            step.followed,
        )
        table, parents_there = self._staging.upload([np.array(columns, np.int64), parents])
        *tree_columns, roots, rows, followed = table
        if step.before is not None:
            tree_columns[-1] += step.before.counts_of(followed)
        tokens = step.sampled[:0] if drafts is None else drafts
        return Trees(tokens, parents_there, *tree_columns), roots, rows

    def _move_accepted(self, step: StepOnDevice, path: torch.Tensor) -> None:
        """Move KV of accepted guesses to where it stands in a sequence: guess ``i`` of a draft was
        computed ``i + 1`` places behind the root, however deep in the tree it is.

        Args:
            path: accepted guesses of each work's draft, int64 ``[works, width]``, then -1.
        """
        works, pool, width = step.works, self._writer.kv, path.shape[1]
        sizes = [
            most + (0 if work.draft is None else work.draft.size)
            for work, most in zip(works, step.most_unread, strict=True)
        ]
        # What is not accepted moves inside the pool's extra page.
        extra_slot = pool.num_pages * pool.page_size
        slots = np.full((len(works), max(width, *sizes)), extra_slot, np.int64)
        for row, work, stop, size in zip(slots, works, step.stops, sizes, strict=True):
            places = np.arange(stop, stop + size)
            row[:size] = token_slots(work.sequence.pages, places, pool.page_size)
        there = to_device(slots, torch.int64, self._device)
        begins = torch.zeros_like(path[:, :1])
        if step.before is not None:
            followed = to_device(step.followed, torch.int64, self._device)
            begins = step.before.counts_of(followed)[:, None]
        accepted, extra = path >= 0, torch.full_like(path, extra_slot)

        def slots_of(places: torch.Tensor) -> torch.Tensor:
            last = there.shape[1] - 1
            return torch.where(accepted, there.gather(1, (begins + places).clamp(0, last)), extra)

        source, to = slots_of(path), slots_of(torch.arange(width, device=self._device))
        self._move_tokens(source.flatten(), to.flatten())

    def catch_up(self) -> bool:
        """Wait until all drafts are made: sequences that ended keep their pages so long."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()
        return last is not None

    def _copy_states(self, step: StepOnDevice) -> None:
        """Queue copies of the states that other nodes need: of prompts that are complete."""
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
            work.drafter_state = partial(_bytes_of, copies, place)

    def _draft(self, asks: Sequence[_Ask], ends: _Ends) -> list[Draft | None]:
        """Draft for sequences whose last known tokens are ``ends``."""
        shape = self._shape.first(max(ask.limit for ask in asks))
        rows = len(asks) * shape.width
        if self._sizes and rows <= self._sizes[-1]:
            stepper = self._steppers[self._sizes[bisect_left(self._sizes, rows)]]
        else:
            stepper = self._stepper(rows)
        tokens = stepper.run(asks, ends, shape)
        self._last = batch = DraftedTokens(tokens)
        size, full = self._shape.tree.size, self._shape
        return [Draft(batch, i * size, full.first(ask.limit).tree) for i, ask in enumerate(asks)]

    def _stepper(self, rows: int) -> _Stepper:
        attention = self._attention.draft_graph(rows, self._max_context)
        if attention is None:
            raise ValueError(f"attention backend {self._attention.name} cannot draft")
        return _Stepper(self._writer, attention, rows, self._shape, self._roots_staging)


def _bytes_of(copies: HostCopy, row: int) -> bytes:
    return copies.wait()[0][row].numpy().tobytes()


class _Stepper:
    """Runs the head over a fixed number of rows, once for each depth of a tree; as a CUDA graph if
    captured."""

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

        def numbers(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self._rows = DraftRows(
            tokens=numbers(rows),
            positions=numbers(rows),
            states=states.new_zeros(rows, states.shape[1]),
            places=attention.places,
            bases=attention.bases,
            masks=attention.masks,
            noise_at=numbers(rows, 2),
            temperatures=torch.zeros(rows, dtype=torch.float32, device=device),
        )
        columns, depths = shape.levels.shape[1], shape.depth
        self._tables = DraftTables(
            numbers(depths, columns), numbers(1), numbers(rows, shape.tree.size)
        )
        self._shape: DraftShape | None = None
        self._inputs = torch.zeros(
            packed_bytes(self._packed([], [], [], [])), dtype=torch.uint8, device=device
        )
        self._roots = self._upload([], [], [], [])

    def _packed(
        self,
        index: Sequence[int],
        carried: Sequence[int],
        seeds: Sequence[int],
        temperatures: Sequence[float],
    ) -> list[Array]:
        """Arrays of :class:`pd.kernels.drafting.DraftRoots`, always of the same sizes."""
        columns = np.zeros((3, self._num_rows), np.int64)
        for column, values in zip(columns, (index, carried, seeds), strict=True):
            column[: len(values)] = values
        floats = np.zeros(self._num_rows, np.float32)
        floats[: len(temperatures)] = temperatures
        return [np.array([len(index)], np.int64), *columns, floats]

    def _upload(self, *columns: Sequence[Any]) -> DraftRoots:
        positions = torch.zeros(self._num_rows, dtype=torch.int64, device=self._inputs.device)
        packed = self._packed(*columns)
        return DraftRoots._make([*self._staging.upload(packed, self._inputs), positions])

    def capture(self, recorder: GraphRecorder) -> None:
        """Have further passes replayed."""
        self._attention.plan(np.zeros(0, np.int64), [])
        self._graph, _ = recorder.record(self._step)

    @torch.inference_mode()
    def run(self, asks: Sequence[_Ask], ends: _Ends, shape: DraftShape) -> torch.Tensor:
        """Draft guesses of this shape for each sequence.

        Returns:
            int64 ``[asks * size]``, a copy of the drafted tokens, where ``size`` is that of the
            largest shape.
        """
        params = [ask.choice.params for ask in asks]
        packed = self._packed(
            ends.index,
            [ask.state.row for ask in asks],
            [ask.choice.seed for ask in asks],
            [0.0 if p.greedy else p.temperature for p in params],
        )
        self._staging.upload(packed, self._inputs)
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
                self._step()
            else:
                self._graph.replay()
        return self._tables.drafted[: len(asks)].flatten().clone()

    @torch.inference_mode()
    def _step(self) -> torch.Tensor:
        """Compute the rows of one depth, and make those of the next."""
        rows, head = self._rows, self._writer.head
        self._attention.locate()
        logits, hidden = head(rows.tokens, rows.states, rows.positions, self._attention)
        best = likeliest(logits, rows.temperatures, rows.noise_at, head.target_ids, self._topk)
        branch_rows(self._roots, rows, self._tables, best, head.target_ids, hidden)
        return self._tables.drafted
