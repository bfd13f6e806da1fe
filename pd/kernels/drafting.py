"""Tensor work of drafting with an EAGLE head, except the head's own layer."""

from __future__ import annotations

import torch
from torch.nn import functional

from pd.kernels.dispatch import uses_triton
from pd.kernels.draft_tensors import CHILD_FIELDS, DraftRoots, DraftRows, DraftTables, Norms, States
from pd.kernels.norm import rms_norm


def join_states(
    token_ids: torch.Tensor, embedding: torch.Tensor, states: States, norms: Norms | None
) -> torch.Tensor:
    """Put the embedding and the state of each token side by side, each normalized if ``norms`` are
    given (:func:`pd.kernels.norm.rms_norm`).

    Args:
        token_ids: int64 ``[rows]``.
        embedding: contiguous ``[vocab_size, size]``, in the dtype of the states.

    Returns:
        ``[rows, 2 * size]``.
    """
    if uses_triton(embedding):
        from pd.kernels import drafting_triton

        return drafting_triton.join_states(token_ids, embedding, states, norms)
    embedded, state = functional.embedding(token_ids, embedding), states.gather_rows()
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
    """Copy ``fused[roots[i] + 1 + last[i]]`` to ``carried[rows[i]]``. If a row occurs twice, one of
    the writes wins.

    Args:
        carried, fused: ``[n, size]`` and ``[tokens, size]`` of one dtype.
        rows, roots, last: int64 ``[works]``.
    """
    if uses_triton(carried):
        from pd.kernels import drafting_triton

        drafting_triton.carry_states(carried, rows, fused, roots, last)
        return
    carried.index_copy_(0, rows, fused.index_select(0, roots + 1 + last))


def start_rows(
    roots: DraftRoots,
    rows: DraftRows,
    tables: DraftTables,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    carried: torch.Tensor,
) -> None:
    """Make the rows of the first pass. The first row of each sequence is its last known token.

    Args:
        roots: filled except for its ``positions``, which this fills.
        tables: its ``level`` is set to 0.
        tokens, positions: int64, the known tokens and their positions in their sequences.
        carried: ``[n, size]``, the carried states.
    """
    if uses_triton(carried):
        from pd.kernels import drafting_triton

        drafting_triton.start_rows(roots, rows, tables, tokens, positions, carried)
        return
    tables.level.zero_()
    count, width = int(roots.number), int(tables.levels[0, 0])
    index, first = roots.known[:count], torch.arange(count) * width
    roots.positions[:count] = ends = positions[index]
    _reset_rows(rows)
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
    """Record the tokens that a pass drew, and make the rows of the next pass: the guesses with
    children.

    Args:
        tables: its ``level`` counts up.
        best: int64 ``[rows, ranks]``, columns of the logits, the likeliest first.
        target_ids: the tokens that columns stand for; None if columns are tokens.
        hidden: ``[rows, size]``, the states for the children of each row.
    """
    if uses_triton(hidden):
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
    _reset_rows(rows)
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


def _reset_rows(rows: DraftRows) -> None:
    """Keep all rows from writing to a page of a sequence."""
    rows.places.fill_(-1)
    rows.bases.fill_(1)
    rows.masks.zero_()


def find_likeliest(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    noise_at: torch.Tensor,
    token_ids: torch.Tensor | None,
    count: int,
) -> torch.Tensor:
    """Return the columns with the largest sums of noise and logit divided by temperature, the
    largest first. At temperature 0 there is no noise. The first column is the one that
    :func:`pd.kernels.sampling.sample_rows` draws without filters.

    Args:
        logits: ``[rows, columns]``. For the other arguments see ``sample_rows``.

    Returns:
        int64 ``[rows, count]``.
    """
    from pd.kernels.sampling import compute_scores, sample_rows

    if count == 1:
        nothing = (noise_at[:, 0], temperatures, temperatures)
        columns, _ = sample_rows(
            logits, temperatures, noise_at, *nothing, any_filter=False, token_ids=token_ids
        )
        return columns[:, None]
    return compute_scores(logits, temperatures, noise_at, token_ids).topk(count, dim=-1).indices
