"""Tensor work of drafting with an EAGLE head beside the head's own layer.

The states that a head needs lie in two tables: rows that sequences carry from one pass to the next,
and the rows of the tokens of a pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from pd.kernels.dispatch import use_triton
from pd.kernels.draft_levels import CHILD_FIELDS
from pd.kernels.norm import rms_norm


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
    def of(cls, rows: torch.Tensor) -> States:
        """All rows of one table."""
        return cls(rows, rows[:0], None)

    def gather(self) -> torch.Tensor:
        """Return the rows, ``[rows, size]``."""
        if self.places is None:
            return self.first
        return torch.cat((self.first, self.second)).index_select(0, self.places)


class Norms(NamedTuple):
    """RMS norms of both halves of :func:`join_states`: weights ``[size]`` each, and epsilon."""

    embedding: torch.Tensor
    state: torch.Tensor
    eps: float


def join_states(
    token_ids: torch.Tensor, embedding: torch.Tensor, states: States, norms: Norms | None
) -> torch.Tensor:
    """Put the embedding of each token and its state side by side, each normalized if ``norms`` are
    given (:func:`pd.kernels.norm.rms_norm`).

    Args:
        token_ids: int64 ``[rows]``.
        embedding: contiguous ``[vocab_size, size]``, in the dtype of the states.

    Returns:
        ``[rows, 2 * size]``.
    """
    if use_triton(embedding):
        from pd.kernels import drafting_triton

        return drafting_triton.join_states(token_ids, embedding, states, norms)
    embedded, state = functional.embedding(token_ids, embedding), states.gather()
    if norms is not None:
        embedded = rms_norm(embedded, norms.embedding, norms.eps)
        state = rms_norm(state, norms.state, norms.eps)
    return torch.cat((embedded, state), dim=-1)


def carry_states(
    carried: torch.Tensor,
    rows: torch.Tensor,
    fused: torch.Tensor,
    roots: torch.Tensor,
    last: torch.Tensor,
) -> None:
    """Copy ``fused[roots[i] + 1 + last[i]]`` to ``carried[rows[i]]``; of equal rows any is kept.

    Args:
        carried, fused: ``[n, size]`` and ``[tokens, size]`` of one dtype.
        rows, roots, last: int64 ``[works]``.
    """
    if use_triton(carried):
        from pd.kernels import drafting_triton

        drafting_triton.carry_states(carried, rows, fused, roots, last)
        return
    carried.index_copy_(0, rows, fused.index_select(0, roots + 1 + last))


class DraftRows(NamedTuple):
    """Rows that a head computes together; int64 ``[rows]`` unless noted.

    Each sequence has as many rows, one after another, as the widest pass needs; those that a pass
    does not need write to the pool's extra page.

    Attributes:
        tokens: inputs; ``positions`` are theirs in the sequences that they continue.
        states: ``[rows, size]``, the states of the tokens before them.
        places, bases, masks: see :class:`pd.kernels.attention.base.DraftAttention`.
        noise_at: ``[rows, 2]``, seed and position of what each row draws.
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
    but ``number`` may be longer.

    Attributes:
        number: how many sequences there are, ``[1]``.
        known: where each sequence's token is among the known ones.
        carried: where its state is among the carried ones.
        seeds: of the noise. ``temperatures`` are float32.
        positions: of the tokens in their sequences.
    """

    number: torch.Tensor
    known: torch.Tensor
    carried: torch.Tensor
    seeds: torch.Tensor
    temperatures: torch.Tensor
    positions: torch.Tensor


class DraftTables(NamedTuple):
    """The shape of the drafts, and what is drafted; int64.

    Attributes:
        levels: ``[depths, LEVEL_HEAD + CHILD_FIELDS * children]``, the same tree for all sequences.
            For each depth: rows of a sequence in any pass, guesses that follow this depth's, and
            rows of the next pass. Then for each of these guesses the row that it follows, its rank
            among the tokens drawn there, its index in the draft, what it sees of the draft as a bit
            mask, and its row in the next pass, or -1.
        level: ``[1]``, the depth of the next pass.
        drafted: ``[sequences, guesses]``, the tokens drafted so far.
    """

    levels: torch.Tensor
    level: torch.Tensor
    drafted: torch.Tensor


def start_rows(
    roots: DraftRoots,
    rows: DraftRows,
    tables: DraftTables,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    carried: torch.Tensor,
) -> None:
    """Make the rows of the first pass: the first row of each sequence is its last known token.

    Args:
        roots: filled but for its ``positions``, which this fills.
        tables: its ``level`` is set to 0.
        tokens, positions: int64, the known tokens and where they are in their sequences.
        carried: ``[n, size]``, the carried states.
    """
    if use_triton(carried):
        from pd.kernels import drafting_triton

        drafting_triton.start_rows(roots, rows, tables, tokens, positions, carried)
        return
    tables.level.zero_()
    count, width = int(roots.number), int(tables.levels[0, 0])
    index, first = roots.known[:count], torch.arange(count) * width
    roots.positions[:count] = ends = positions[index]
    _rest(rows)
    rows.tokens[first], rows.positions[first] = tokens[index], ends
    rows.states[first] = carried[roots.carried[:count]]
    rows.places[first], rows.bases[first] = ends, ends + 1
    rows.noise_at[first, 0], rows.noise_at[first, 1] = roots.seeds[:count], ends + 1
    rows.temperatures[first] = roots.temperatures[:count]


def branch_rows(
    roots: DraftRoots,
    rows: DraftRows,
    tables: DraftTables,
    best: torch.Tensor,
    target_ids: torch.Tensor | None,
    hidden: torch.Tensor,
) -> None:
    """Note what a pass drew, and make the rows of the next pass: the guesses that have guesses
    behind them.

    Args:
        tables: its ``level`` counts up.
        best: int64 ``[rows, ranks]``, columns of the logits, the likeliest first.
        target_ids: the tokens that columns stand for; None where they are the same.
        hidden: ``[rows, size]``, the states for what follows each row.
    """
    if use_triton(hidden):
        from pd.kernels import drafting_triton

        drafting_triton.branch_rows(roots, rows, tables, best, target_ids, hidden)
        return
    depth, count = int(tables.level), int(roots.number)
    tables.level.add_(1)
    width, num_guesses, _, *fields = tables.levels[depth].tolist()
    guesses = torch.tensor(fields[: CHILD_FIELDS * num_guesses], dtype=torch.int64)
    parent, rank, guess, mask, row = guesses.view(num_guesses, CHILD_FIELDS).T
    sequence = torch.arange(count)[:, None]
    source = sequence * width + parent
    tokens = best[source, rank]
    if target_ids is not None:
        tokens = target_ids[tokens]
    tables.drafted[sequence, guess] = tokens
    _rest(rows)
    on = row >= 0
    there = sequence * width + row[on]
    ends = roots.positions[:count, None].expand_as(there)
    rows.states[there] = hidden[source[:, on]]
    rows.tokens[there], rows.positions[there] = tokens[:, on], ends + depth + 1
    rows.places[there], rows.bases[there] = ends + 1 + guess[on], ends + 1
    rows.masks[there] = mask[on].expand_as(there)
    rows.noise_at[there, 0] = roots.seeds[:count, None].expand_as(there)
    rows.noise_at[there, 1] = ends + depth + 2
    rows.temperatures[there] = roots.temperatures[:count, None].expand_as(there)


def _rest(rows: DraftRows) -> None:
    """Have no row write to a page of a sequence."""
    rows.places.fill_(-1)
    rows.bases.fill_(1)
    rows.masks.zero_()


def likeliest(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    noise_at: torch.Tensor,
    token_ids: torch.Tensor | None,
    count: int,
) -> torch.Tensor:
    """Return the columns with the largest sums of logit, divided by the temperature, and noise, the
    largest first; without noise at temperature 0. The first is what
    :func:`pd.kernels.sampling.sample_rows` draws without filters.

    Args:
        logits: ``[rows, columns]``; the other arguments are those of ``sample_rows``.

    Returns:
        int64 ``[rows, count]``.
    """
    from pd.kernels.sampling import sample_rows, scores

    if count == 1:
        nothing = (noise_at[:, 0], temperatures, temperatures)
        columns, _ = sample_rows(
            logits, temperatures, noise_at, *nothing, any_filter=False, token_ids=token_ids
        )
        return columns[:, None]
    return scores(logits, temperatures, noise_at, token_ids).topk(count, dim=-1).indices
