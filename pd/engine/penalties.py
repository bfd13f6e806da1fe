"""Penalties whose token counts live on the device, so that no step waits for the tokens of the one
before it to reach the host."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.engine.device_copy import to_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from pd.engine.sampling_state import Draw, SamplingState

# Rows of the table at first; it grows by doubling.
_FIRST_ROWS = 4
# Logits rows that are adjusted at a time, which bounds the memory for intermediate results.
_PIECE = 32


@dataclass(frozen=True, slots=True, eq=False)
class PenalizedRows:
    """Rows of a step that have penalties, and changes of the table to make before they are read.
    All indices are int64 on the device; pairs are (table row, token id).

    Attributes:
        rows: of the step's logits, ``[n]``.
        places: rows of the table, ``[n]``.
        repetition, frequency, presence: penalties, float32 ``[n, 1]``.
        fresh: rows of the table to clear first.
        prompt: pairs that occur in prompts of fresh rows.
        output: pairs of output tokens that the host has.
        following: rows of the table, and rows of ``previous`` whose token each of them gets.
        previous: tokens that only the device has, int64, or None.
        drafted: pairs of (index into ``rows``, index into ``drafts``): drafted tokens before a row.
        drafts: the step's drafted tokens, int64, or None.
    """

    rows: torch.Tensor
    places: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    fresh: torch.Tensor
    prompt: tuple[torch.Tensor, torch.Tensor]
    output: tuple[torch.Tensor, torch.Tensor]
    following: tuple[torch.Tensor, torch.Tensor]
    previous: torch.Tensor | None
    drafted: tuple[torch.Tensor, torch.Tensor]
    drafts: torch.Tensor | None


class Penalties:
    """A table of how often each token occurs in the output of each choice that has penalties, and
    whether it occurs in its prompt. Used by one thread.

    A choice keeps its row of the table for as long as its :class:`SamplingState` lives.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        # States end on any thread.
        self._free: deque[int] = deque()

    def prepare(
        self,
        draws: Sequence[Draw],
        previous: torch.Tensor | None,
        drafts: torch.Tensor | None,
    ) -> PenalizedRows | None:
        """Upload what :meth:`apply` needs; None if no state has penalties. What the states' choices
        have output since their last step is taken from them.

        Args:
            draws: of the step, in the order of its rows.
            previous: tokens that ``Draw.follows`` refers to, int64 on the device.
            drafts: tokens that ``Draw.first`` refers to, int64 on the device.
        """
        if not any(draw.state.has_penalties for draw in draws):
            return None
        rows, places = list[int](), list[int]()
        penalties: list[tuple[float, float, float]] = []
        fresh, prompt, output, following, drafted = [], _Pairs(), _Pairs(), _Pairs(), _Pairs()
        row = 0
        for draw in draws:
            choice = draw.state
            first, row = row, row + draw.num_rows
            if not choice.has_penalties:
                continue
            if choice.penalty_row is None:
                choice.penalty_row = self._take_row(choice)
                fresh.append(choice.penalty_row)
                prompt.add(choice.penalty_row, choice.prompt_ids)
            place = choice.penalty_row
            output.add(place, choice.uncounted)
            choice.uncounted.clear()
            if draw.follows is not None:
                following.add(place, [draw.follows])
                choice.counted_ahead += 1
            drafted.add(len(rows), range(draw.first, draw.first + draw.drawn))
            if draw.tree is not None:
                for guess, path in enumerate(draw.tree.paths):
                    drafted.add(len(rows) + 1 + guess, [draw.first + index for index in path])
            rows += range(first, row)
            places += [place] * draw.num_rows
            p = choice.params
            penalties += [
                (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
            ] * draw.num_rows
        repetition, frequency, presence = zip(*penalties, strict=True)
        return PenalizedRows(
            rows=self._index(rows),
            places=self._index(places),
            repetition=self._floats(repetition),
            frequency=self._floats(frequency),
            presence=self._floats(presence),
            fresh=self._index(fresh),
            prompt=prompt.on(self._device),
            output=output.on(self._device),
            following=following.on(self._device),
            previous=previous,
            drafted=drafted.on(self._device),
            drafts=drafts,
        )

    def apply(self, logits: torch.Tensor, step: PenalizedRows) -> None:
        """Apply penalties in place: repetition over prompt and output, frequency and presence over
        output. On a GPU this is only queued.

        Args:
            logits: float32 ``[n, vocab_size]``.
        """
        self._update(step)
        for first in range(0, len(step.rows), _PIECE):
            some = slice(first, first + _PIECE)
            places, rows = step.places[some], step.rows[some]
            counts = self._counts.index_select(0, places)
            index, places_of_drafts = step.drafted
            if step.drafts is not None and len(index):
                tokens = step.drafts.index_select(0, places_of_drafts)
                inside = (index >= first) & (index < first + len(rows))
                # NOTE: for other pieces this adds 0 to the first row, so that nothing waits.
                where = torch.where(inside, index - first, 0)
                counts.index_put_((where, tokens), inside.to(counts.dtype), accumulate=True)
            occurs = counts > 0
            repetition = step.repetition[some]
            values = logits.index_select(0, rows)
            repeated = torch.where(values > 0, values / repetition, values * repetition)
            seen = occurs | self._in_prompt.index_select(0, places)
            values = torch.where(seen, repeated, values)
            values = values - step.frequency[some] * counts - step.presence[some] * occurs
            logits.index_copy_(0, rows, values)

    def _update(self, step: PenalizedRows) -> None:
        """Bring the table up to the tokens before this step's."""
        if len(step.fresh):
            self._counts.index_fill_(0, step.fresh, 0)
            self._in_prompt.index_fill_(0, step.fresh, value=False)
        self._in_prompt[step.prompt] = True
        _count(self._counts, *step.output)
        if step.previous is not None:
            places, rows = step.following
            _count(self._counts, places, step.previous.index_select(0, rows))

    def _take_row(self, choice: SamplingState) -> int:
        """A row of the table, which comes free again when the choice is no more."""
        if not self._free:
            rows, vocab_size = self._counts.shape
            more = max(_FIRST_ROWS, rows)
            self._counts = torch.cat((self._counts, self._counts.new_zeros(more, vocab_size)))
            grown = self._in_prompt.new_zeros(more, vocab_size)
            self._in_prompt = torch.cat((self._in_prompt, grown))
            self._free.extend(range(rows, rows + more))
        row = self._free.popleft()
        weakref.finalize(choice, self._free.append, row)
        return row

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        return to_device(values, torch.int64, self._device)

    def _floats(self, values: Sequence[float]) -> torch.Tensor:
        return to_device(values, torch.float32, self._device)[:, None]


class _Pairs:
    """Pairs of a row and a token, collected on the host."""

    def __init__(self) -> None:
        self._rows = [np.empty(0, dtype=np.int64)]
        self._tokens = [np.empty(0, dtype=np.int64)]

    def add(self, row: int, tokens: Iterable[int] | npt.NDArray[np.integer]) -> None:
        """Add ``row`` with each of ``tokens``."""
        ids = np.asarray(tokens, dtype=np.int64)
        self._rows.append(np.full(len(ids), row, dtype=np.int64))
        self._tokens.append(ids)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and tokens, int64 ``[pairs]`` on the device."""
        rows, tokens = np.concatenate(self._rows), np.concatenate(self._tokens)
        return to_device(rows, torch.int64, device), to_device(tokens, torch.int64, device)


def _count(table: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """Add 1 for each pair, as often as it occurs."""
    ones = torch.ones(len(rows), dtype=table.dtype, device=table.device)
    table.index_put_((rows, tokens), ones, accumulate=True)
