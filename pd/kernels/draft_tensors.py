"""Tensors of drafts: their trees, the accepted guesses, and the states and tables of an EAGLE head.

The states that a head needs lie in two tables: rows that sequences carry from one pass to the next,
and the rows of a pass's tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Number of columns of a level before its guesses, and number of fields of a guess.
LEVEL_HEAD, CHILD_FIELDS = 3, 5


class Trees(NamedTuple):
    """Drafts of a step; int64 tensors on the device, ``[works]`` each except the first two.

    Attributes:
        tokens: drafted tokens, ``[n]``.
        parents: index of each token's parent inside its draft, or -1; ``[n]``.
        rows: row of the token sampled after each root. Those after its guesses follow.
        firsts: start of each draft in ``tokens``.
        counts: number of its guesses, which may be 0.
        forced: number of leading guesses to accept regardless of the samples, or -1.
        stops: position of the token after each root.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    rows: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor
    forced: torch.Tensor
    stops: torch.Tensor


class Accepted(NamedTuple):
    """The accepted end of each draft; int64 tensors on the device, ``[works]`` each except the
    last.

    Attributes:
        last: index of the last accepted guess inside its draft, -1 for none.
        counts: number of accepted guesses.
        tokens: the model's own token after the last accepted guess.
        positions: positions of these tokens.
        path: int64 ``[works, width]``, the accepted guesses from the root on, then -1.
    """

    last: torch.Tensor
    counts: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    path: torch.Tensor

    def collect_tokens(self, samples: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the output tokens of each work, int64 ``[works, 1 + width]``: the token sampled
        after the root, and after each guess of ``path``; then -1.

        Args:
            samples: int64, the tokens that the step sampled.
            rows: int64 ``[works]``, as :attr:`Trees.rows`.
        """
        last = len(samples) - 1
        after = samples[(rows[:, None] + 1 + self.path.clamp(min=0)).clamp(max=last)]
        after = torch.where(self.path >= 0, after, -1)
        return torch.cat((samples[rows.clamp(max=last)][:, None], after), dim=1)


class States(NamedTuple):
    """Rows of two tables of hidden states, one after the other.

    Attributes:
        first, second: contiguous ``[n, size]`` and ``[m, size]`` of one dtype.
        places: int64 ``[rows]``: below ``n`` a row of ``first``, else of ``second``; None for all
            rows of ``first``.
    """

    first: torch.Tensor
    second: torch.Tensor
    places: torch.Tensor | None

    @classmethod
    def from_rows(cls, rows: torch.Tensor) -> States:
        """Make the states of all rows of one table."""
        return cls(rows, rows[:0], None)

    def gather_rows(self) -> torch.Tensor:
        """Return the rows, ``[rows, size]``."""
        if self.places is None:
            return self.first
        return torch.cat((self.first, self.second)).index_select(0, self.places)


class Norms(NamedTuple):
    """RMS norms of both halves of :func:`pd.kernels.drafting.join_states`: weights ``[size]`` each,
    and epsilon."""

    embedding: torch.Tensor
    state: torch.Tensor
    eps: float


class DraftRows(NamedTuple):
    """Rows that a head computes together; int64 ``[rows]`` unless noted.

    Each sequence has as many adjacent rows as the widest pass needs. Rows that a pass does not need
    write to the pool's extra page.

    Attributes:
        tokens: inputs.
        positions: positions of these tokens in the sequences that they continue.
        states: ``[rows, size]``, the states of the tokens before them.
        places, bases, masks: see :class:`pd.kernels.attention.base.DraftAttention`.
        noise_at: ``[rows, 2]``, seed and position of each row's draw.
        temperatures: float32.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    states: torch.Tensor
    places: torch.Tensor
    bases: torch.Tensor
    masks: torch.Tensor
    noise_at: torch.Tensor
    temperatures: torch.Tensor


class DraftRoots(NamedTuple):
    """The last known tokens of the sequences to draft for; int64 ``[sequences]`` unless noted. All
    except ``number`` may be longer.

    Attributes:
        number: number of sequences, ``[1]``.
        known: index of each sequence's token among the known ones.
        carried: index of its state among the carried ones.
        seeds: seeds of the noise.
        temperatures: float32.
        positions: positions of the tokens in their sequences.
    """

    number: torch.Tensor
    known: torch.Tensor
    carried: torch.Tensor
    seeds: torch.Tensor
    temperatures: torch.Tensor
    positions: torch.Tensor


class DraftTables(NamedTuple):
    """The shape of the drafts, and the drafted tokens; int64.

    Attributes:
        levels: ``[depths, LEVEL_HEAD + CHILD_FIELDS * children]``, the same tree for all sequences.
            Each depth starts with the number of rows of a sequence in any pass, the number of
            guesses that follow this depth's, and the number of rows of the next pass. Then each of
            these guesses has the row of its parent, its rank among the tokens drawn there, its
            index in the draft, its visibility of the draft as a bit mask, and its row in the next
            pass, or -1.
        level: ``[1]``, the depth of the next pass.
        drafted: ``[sequences, guesses]``, the tokens drafted so far.
    """

    levels: torch.Tensor
    level: torch.Tensor
    drafted: torch.Tensor
