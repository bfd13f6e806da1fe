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
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.engine.device_copy import to_device
from pd.engine.draft_tree import chain
from pd.engine.eagle import NO_ROW, CarriedState
from pd.kernels.acceptance import Trees, accept
from pd.kernels.sampling import sample_rows
from pd.kernels.staging import PinnedStaging
from pd.speculative.draft import Draft, DraftedTokens
from pd.speculative.drafter import Drafter

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd.core.request import Sequence as TokenSequence
    from pd.engine.cuda_graphs import GraphRecorder
    from pd.engine.device_copy import HostCopy
    from pd.engine.eagle import EagleWriter
    from pd.engine.sampling_state import SamplingState
    from pd.kernels.attention import AttentionBackend
    from pd.kernels.attention.base import DraftAttention
    from pd.scheduling.step import Work
    from pd.speculative.drafter import DraftRequest, StepOnDevice

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
    """The last known token of each sequence to draft for, on the device; int64 ``[asks]`` each.

    Attributes:
        positions: of the tokens in their sequences.
    """

    tokens: torch.Tensor
    positions: torch.Tensor


class EagleDrafter(Drafter):
    """Runs the head as often as tokens are to be drafted.

    Args:
        writer: the head and the states that the model's passes leave for it.
        attention: over the head's K and V.
        sizes: numbers of sequences for which CUDA graphs are captured; empty on a CPU.
        max_context: tokens of a sequence.
        depth: most tokens of a draft.
    """

    drafts_ahead = True

    def __init__(
        self,
        writer: EagleWriter,
        attention: AttentionBackend,
        *,
        max_context: int,
        depth: int,
        sizes: Sequence[int] = (),
        recorder: GraphRecorder | None = None,
    ) -> None:
        self._writer, self._attention = writer, attention
        self._max_context, self._depth = max_context, depth
        self._device = writer.carried.device
        self._staging = PinnedStaging(self._device)
        self._last: DraftedTokens | None = None
        self._steppers: dict[int, _Stepper] = {}
        self._sizes = sorted(sizes)
        for size in reversed(self._sizes):
            assert recorder is not None
            stepper = self._stepper(size)
            stepper.capture(recorder)
            self._steppers[size] = stepper

    def begin(self, works: Sequence[Work]) -> None:
        """See :class:`pd.speculative.drafter.Drafter`."""
        for work in works:
            sequence = work.sequence
            if sequence.carried is None:
                sequence.carried = self._writer.take_row()
            state = sequence.carried
            self._writer.upload(state)
            # Without the state before its first token, the token before that is computed again.
            work.reread = work.start > 0 and not state.covers(work.start)
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
            made = self._draft(asks, _Ends(ends[0], ends[1]))
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
        self._draft(asks, _Ends(ends[0], ends[1]))
        self.catch_up()

    @torch.inference_mode()
    def follow(self, step: StepOnDevice) -> None:
        """See :class:`pd.speculative.drafter.Drafter`."""
        self._copy_states(step)
        works = [work for work in step.works if work.sequence.carried is not None]
        assert len(works) == len(step.works), "begin() was not called"
        states = [work.sequence.carried for work in works]
        counts = [work.num_drafted for work in works]
        parents = np.zeros(0 if step.drafts is None else len(step.drafts), np.int64)
        for work, first in zip(works, step.first_drafts, strict=True):
            if work.draft is not None:
                parents[first : first + work.draft.size] = work.draft.tree.parents
        firsts, forced = step.first_drafts, [-1 if w.forced is None else w.forced for w in works]
        # NOTE: a work without samples has no row; what is accepted there is not used.
        rows = [max(work.row, 0) if work.samples else 0 for work in works]
        table = [rows, firsts, counts, forced, step.roots, [work.stop for work in works]]
        carried = [NO_ROW if state is None else state.row for state in states]
        uploaded, parents_there = self._staging.upload(
            [np.array([*table, carried], np.int64), parents]
        )
        rows_there, firsts_there, counts_there, forced_there, roots, stops, kept = uploaded
        sampled = step.sampled
        if len(sampled) == 0:
            self._writer.keep(kept, roots)
            return
        drafts = sampled[:0] if step.drafts is None else step.drafts
        trees = Trees(drafts, parents_there, rows_there, firsts_there, counts_there, forced_there)
        found = accept(sampled, trees)
        self._writer.keep(kept, roots + 1 + found.last)
        asking = [place for place, work in enumerate(works) if work.ahead_limit]
        if not asking:
            return
        asks = []
        for place in asking:
            work, state = works[place], states[place]
            assert state is not None
            most = work.stop + counts[place] + 1 + work.ahead_limit
            choice = work.samples[0]
            asks.append(_Ask(work.sequence, state, choice, work.ahead_limit, most))
        tokens, positions = found.tokens, stops + found.depth
        if len(asking) < len(works):
            index = to_device(asking, torch.int64, self._device)
            tokens, positions = tokens[index], positions[index]
        made = self._draft(asks, _Ends(tokens, positions))
        for ask, draft in zip(asks, made, strict=True):
            ask.sequence.ahead = draft

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
        count = len(asks)
        if self._sizes and count <= self._sizes[-1]:
            stepper = self._steppers[self._sizes[bisect_left(self._sizes, count)]]
        else:
            stepper = self._stepper(count)
        steps = max(ask.limit for ask in asks)
        tokens = stepper.run(asks, ends, self._writer, self._staging, steps)
        self._last = batch = DraftedTokens(tokens)
        return [Draft(batch, i * self._depth, chain(ask.limit)) for i, ask in enumerate(asks)]

    def _stepper(self, rows: int) -> _Stepper:
        attention = self._attention.draft_graph(rows, self._max_context)
        if attention is None:
            raise ValueError(f"attention backend {self._attention.name} cannot draft")
        return _Stepper(self._writer, attention, rows, self._depth)


def _bytes_of(copies: HostCopy, row: int) -> bytes:
    return copies.wait()[0][row].numpy().tobytes()


class _Stepper:
    """Drafts one token after another for a fixed number of rows, in a CUDA graph if captured.

    Attributes:
        drafted: int64 ``[rows, depth]``, the tokens drafted so far.
    """

    def __init__(
        self, writer: EagleWriter, attention: DraftAttention, rows: int, depth: int
    ) -> None:
        device = writer.carried.device
        self._writer, self._attention, self._rows = writer, attention, rows
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._fused = writer.carried.new_zeros(rows, writer.carried.shape[1])
        # Seeds, and the positions of the tokens to draw.
        self._noise_at = torch.zeros(rows, 2, dtype=torch.int64, device=device)
        self._temperatures = torch.zeros(rows, dtype=torch.float32, device=device)
        self._column = torch.zeros(1, dtype=torch.int64, device=device)
        self.drafted = torch.zeros(rows, depth, dtype=torch.int64, device=device)
        vocab = writer.head.config.draft_vocab_size
        self._filters = (
            torch.full((rows,), vocab, dtype=torch.int64, device=device),
            torch.ones(rows, dtype=torch.float32, device=device),
            torch.zeros(rows, dtype=torch.float32, device=device),
        )

    def capture(self, recorder: GraphRecorder) -> None:
        """Have further steps replayed."""
        self._attention.plan(np.zeros(0, np.int64), [])
        self._graph, _ = recorder.record(self._step)

    @torch.inference_mode()
    def run(
        self,
        asks: Sequence[_Ask],
        ends: _Ends,
        writer: EagleWriter,
        staging: PinnedStaging,
        steps: int,
    ) -> torch.Tensor:
        """Draft ``steps`` tokens for each sequence.

        Returns:
            int64 ``[asks * depth]``, a copy of the drafted tokens.
        """
        count = len(asks)
        seeds = np.array([ask.choice.seed for ask in asks], np.int64)
        rows = np.array([ask.state.row for ask in asks], np.int64)
        params = [ask.choice.params for ask in asks]
        temperatures = np.array([0.0 if p.greedy else p.temperature for p in params], np.float32)
        seeds_there, rows_there, temperatures_there = staging.upload([seeds, rows, temperatures])
        self._attention.plan(
            np.array([ask.most for ask in asks], np.int64), [ask.sequence.pages for ask in asks]
        )
        self._tokens[:count].copy_(ends.tokens)
        torch.index_select(writer.carried, 0, rows_there, out=self._fused[:count])
        self._attention.places[:count].copy_(ends.positions)
        self._noise_at[:count, 0].copy_(seeds_there)
        self._temperatures[:count].copy_(temperatures_there)
        self._column.zero_()
        for _ in range(steps):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
        return self.drafted[:count].flatten().clone()

    @torch.inference_mode()
    def _step(self) -> torch.Tensor:
        """Draw one token for each row, and prepare the next step."""
        attention, head = self._attention, self._writer.head
        torch.add(attention.places, 1, out=attention.bases)
        attention.locate()
        logits, hidden = head(self._tokens, self._fused, attention.places, attention)
        self._noise_at[:, 1].copy_(attention.bases)
        columns, _ = sample_rows(
            logits,
            self._temperatures,
            self._noise_at,
            *self._filters,
            any_filter=False,
            token_ids=head.target_ids,
        )
        drawn = columns if head.target_ids is None else head.target_ids[columns]
        self.drafted.index_copy_(1, self._column, drawn[:, None])
        self._tokens.copy_(drawn)
        self._fused.copy_(hidden)
        attention.places.add_(1)
        self._column.add_(1)
        return self.drafted
