"""Penalties with token counts on the device, so that no step waits until the tokens of the previous
one reach the host."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.kernels.penalties import apply_penalties, count_tokens
from pd.kernels.staging import PinnedStaging

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from pd.engine.sampling_state import Draw, SamplingState
    from pd.engine.step_outcome import StepOutcome

# Initial number of rows of the table. It grows by doubling.
_FIRST_ROWS = 4


@dataclass(frozen=True, slots=True, eq=False)
class PenalizedRows:
    """Rows of a step with penalties, and the changes that the table needs before we read them. All
    tensors are on the device. Indices are int64.

    Attributes:
        fresh: rows of the table to clear first.
        prompt: pairs of a table row and a token in its prompt, ``[2, pairs]``.
        counted: arguments of :func:`pd.kernels.penalties.count_tokens` after the table.
        previous: tokens that only the device knows, int64, or None; -1 stands for no token.
        rows, places, strengths, starts, paths: arguments of
            :func:`pd.kernels.penalties.apply_penalties`.
        drafts: the step's drafted tokens, int64, or None.
    """

    fresh: torch.Tensor
    prompt: torch.Tensor
    counted: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    previous: torch.Tensor | None
    rows: torch.Tensor
    places: torch.Tensor
    strengths: torch.Tensor
    starts: torch.Tensor
    paths: torch.Tensor
    drafts: torch.Tensor | None


class Penalties:
    """A table with a row for each choice that has penalties: how often each token occurs in its
    output, and whether the token occurs in its prompt. Used by one thread.

    A choice keeps its row as long as its :class:`SamplingState` lives.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._true = torch.ones(1, dtype=torch.bool, device=device)
        self._staging = PinnedStaging(device)
        # States may end on any thread.
        self._free: deque[int] = deque()

    def prepare_rows(
        self,
        draws: Sequence[Draw],
        previous: torch.Tensor | None,
        drafts: torch.Tensor | None,
        outcome: StepOutcome | None = None,
    ) -> PenalizedRows | None:
        """Upload the inputs of :meth:`apply_rows`; return None if no state has penalties.

        This takes the tokens output since the last step from the states. If the step then fails
        before :meth:`apply_rows`, the states have to count again
        (:meth:`~pd.engine.sampling_state.SamplingState.recount_output`).

        Args:
            draws: draws of the step, in the order of its rows.
            previous: tokens that ``Draw.follows`` refers to, int64 on the device.
            drafts: tokens that ``Draw.first`` refers to, int64 on the device.
            outcome: outcome of the previous step. It includes the tokens if a draw with penalties
                has ``Draw.unread``.
        """
        if not any(draw.state.has_penalties for draw in draws):
            return None
        step = _CollectedRows()
        row = 0
        for draw in draws:
            choice = draw.state
            first, row = row, row + draw.num_rows
            if not choice.has_penalties:
                continue
            if choice.penalty_row is None:
                choice.penalty_row = self._take_row(choice)
            place = choice.penalty_row
            if not choice.is_counted:
                step.begin_choice(place, choice.prompt_ids)
                choice.is_counted = True
            step.counted += [(place, token, 0) for token in choice.uncounted]
            choice.uncounted.clear()
            if draw.follows is not None:
                step.counted.append((place, -1, draw.follows))
                choice.counted_ahead += 1
            if draw.unread:
                assert outcome is not None and outcome.tokens is not None
                begin = 0 if previous is None else len(previous)
                begin += draw.work * outcome.tokens.shape[1]
                step.counted += [(place, -1, begin + i) for i in range(1 + draw.unread)]
                choice.counted_ahead += 1 + draw.unread
            step.add_draw(draw, place, range(first, row))
        fresh, prompt, counted, rows, places, strengths, starts, paths = (
            self._staging.upload_arrays(step.to_arrays())
        )
        columns = counted.unbind(0)
        if outcome is not None and outcome.tokens is not None:
            known = [] if previous is None else [previous]
            previous = torch.cat([*known, outcome.tokens.flatten()])
        return PenalizedRows(
            fresh=fresh,
            prompt=prompt,
            counted=(columns[0], columns[1], columns[2]),
            previous=previous,
            rows=rows,
            places=places,
            strengths=strengths,
            starts=starts,
            paths=paths,
            drafts=drafts,
        )

    def apply_rows(self, logits: torch.Tensor, step: PenalizedRows) -> None:
        """Apply penalties in place: repetition over prompt and output, frequency and presence over
        output. On a GPU this is only queued.

        Args:
            logits: contiguous float32 ``[n, vocab_size]``.
        """
        if len(step.fresh):
            self._counts.index_fill_(0, step.fresh, 0)
            self._in_prompt.index_fill_(0, step.fresh, value=False)
        if step.prompt.shape[1]:
            places, tokens = step.prompt.unbind(0)
            self._in_prompt.index_put_((places, tokens), self._true.expand(len(places)))
        count_tokens(self._counts, *step.counted, step.previous)
        apply_penalties(
            logits,
            step.rows,
            step.places,
            step.strengths,
            self._counts,
            self._in_prompt,
            step.starts,
            step.paths,
            step.drafts,
        )

    def _take_row(self, choice: SamplingState) -> int:
        """Take a row of the table. It is free again once the choice is garbage."""
        if not self._free:
            rows, vocab_size = self._counts.shape
            more = max(_FIRST_ROWS, rows)
            # NOTE: both tables keep the same length even if memory runs out for one of them.
            counts = torch.cat((self._counts, self._counts.new_zeros(more, vocab_size)))
            grown = self._in_prompt.new_zeros(more, vocab_size)
            self._in_prompt = torch.cat((self._in_prompt, grown))
            self._counts = counts
            self._free.extend(range(rows, rows + more))
        row = self._free.popleft()
        weakref.finalize(choice, self._free.append, row)
        return row


class _CollectedRows:
    """Contents of :class:`PenalizedRows`, collected on the host."""

    def __init__(self) -> None:
        self.counted: list[tuple[int, int, int]] = []
        self._fresh: list[int] = []
        self._prompts: list[npt.NDArray[np.int64]] = []
        self._rows: list[int] = []
        self._places: list[int] = []
        self._strengths: list[tuple[float, float, float]] = []
        self._starts, self._paths = [0], list[int]()

    def begin_choice(self, place: int, prompt_ids: npt.NDArray[np.int32]) -> None:
        """Start counting a choice in a row of the table."""
        self._fresh.append(place)
        self._prompts.append(np.stack([np.full(len(prompt_ids), place), prompt_ids]))

    def add_draw(self, draw: Draw, place: int, rows: range) -> None:
        """Add the rows of a draw. Each follows some of its drafted tokens."""
        self._rows += rows
        self._places += [place] * len(rows)
        p = draw.state.params
        strengths = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
        self._strengths += [strengths] * len(rows)
        self._add_path(range(draw.drawn), draw.first)
        for path in () if draw.tree is None else draw.tree.paths:
            self._add_path(path, draw.first)

    def _add_path(self, path: Iterable[int], first: int) -> None:
        self._paths += [first + index for index in path]
        self._starts.append(len(self._paths))

    def to_arrays(self) -> list[npt.NDArray[np.generic]]:
        """Return fresh rows, prompts ``[2, pairs]``, counted tokens ``[3, pairs]``, rows, places,
        strengths ``[n, 3]``, starts and paths."""
        nothing = np.empty((2, 0), np.int64)
        return [
            np.array(self._fresh, np.int64),
            np.concatenate([nothing, *self._prompts], axis=1),
            np.array(self.counted, np.int64).reshape(-1, 3).T,
            np.array(self._rows, np.int64),
            np.array(self._places, np.int64),
            np.array(self._strengths, np.float32),
            np.array(self._starts, np.int64),
            np.array(self._paths, np.int64),
        ]
