"""The kernels of drafting do what their references do."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from triton_device import DEVICE, EACH_DTYPE, normal, seeded

from pd.kernels import drafting
from pd.kernels.draft_tensors import DraftRoots, DraftRows, DraftTables, Norms, States
from pd.speculative.shape import DraftShape

pytestmark = pytest.mark.usefixtures("triton_works")


def there(value: object) -> object:
    """A copy on the kernels' device."""
    if isinstance(value, torch.Tensor):
        return value.clone().to(DEVICE)
    if isinstance(value, tuple):
        return type(value)(*map(there, value))
    return value


def same(ours: NamedTuple, theirs: NamedTuple, names: tuple[str, ...]) -> None:
    for name in names:
        assert torch.equal(getattr(ours, name).cpu(), getattr(theirs, name)), name


@EACH_DTYPE
@pytest.mark.parametrize("size", [24, 64])
@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize("is_gathered", [True, False])
def test_embeddings_and_states_side_by_side(
    dtype: torch.dtype, error: float, size: int, is_normed: bool, is_gathered: bool
) -> None:
    from pd.kernels import drafting_triton

    generator = seeded()
    embedding, first, second = (normal(generator, count, size).to(dtype) for count in (9, 5, 7))
    tokens = torch.tensor([3, 8, 0, 3, 1])
    places = torch.tensor([0, 4, 5, 11, 2]) if is_gathered else None
    states = States(first, second, places)
    norms = None
    if is_normed:
        weights = (normal(generator, size).to(dtype) for _ in range(2))
        norms = Norms(*weights, 1e-5)
    expected = drafting.join_states(tokens, embedding, states, norms)
    arguments = [there(each) for each in (tokens, embedding, states, norms)]
    found = drafting_triton.join_states(*arguments)  # type: ignore[arg-type]
    torch.testing.assert_close(found.cpu(), expected, atol=4 * error, rtol=4 * error)


def test_states_are_carried() -> None:
    from pd.kernels import drafting_triton

    generator = seeded()
    carried, fused = normal(generator, 6, 24), normal(generator, 9, 24)
    rows, roots = torch.tensor([5, 2, 3]), torch.tensor([0, 3, 7])
    last = torch.tensor([1, -1, 0])
    expected, found = carried.clone(), carried.clone().to(DEVICE)
    drafting.carry_states(expected, rows, fused, roots, last)
    drafting_triton.carry_states(found, *(x.to(DEVICE) for x in (rows, fused, roots, last)))
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(expected[5], fused[2]) and torch.equal(expected[2], fused[3])


@pytest.mark.parametrize("size,topk", [(3, 1), (1, 1), (7, 3), (12, 2), (6, 4)])
@pytest.mark.parametrize("is_named", [True, False])
def test_rows_of_every_depth(size: int, topk: int, is_named: bool) -> None:
    from pd.kernels import drafting_triton

    generator, shape = seeded(), DraftShape.build_best(size, topk)
    count, spare, width = 3, 2, 20
    num_rows = (count + spare) * shape.width
    roots = DraftRoots(
        number=torch.tensor([count]),
        known=torch.tensor([4, 0, 2, 0, 0]),
        carried=torch.tensor([1, 5, 3, 0, 0]),
        seeds=torch.tensor([7, 1 << 40, 9, 0, 0]),
        temperatures=torch.tensor([0.0, 0.5, 1.0, 0.0, 0.0]),
        positions=torch.zeros(5, dtype=torch.int64),
    )
    numbers = [torch.zeros(num_rows, dtype=torch.int64) for _ in range(5)]
    rows = DraftRows(
        numbers[0],
        numbers[1],
        torch.zeros(num_rows, width),
        *numbers[2:],
        torch.zeros(num_rows, 2, dtype=torch.int64),
        torch.zeros(num_rows),
    )
    drafted = torch.zeros(count + spare, size, dtype=torch.int64)
    tables = DraftTables(torch.from_numpy(shape.levels), torch.tensor([9]), drafted)
    tokens, positions = torch.arange(40, 45), torch.arange(100, 150, 10)
    carried = normal(generator, 6, width)
    names = torch.randperm(50, generator=generator) if is_named else None
    mine = [there(each) for each in (roots, rows, tables)]
    drafting.start_rows(roots, rows, tables, tokens, positions, carried)
    inputs = (there(each) for each in (tokens, positions, carried))
    drafting_triton.start_rows(*mine, *inputs)  # type: ignore[arg-type]
    used = ("tokens", "positions", "states", "places", "bases", "masks", "noise_at", "temperatures")
    for depth in range(shape.depth + 1):
        same(mine[1], rows, used)  # type: ignore[arg-type]
        same(mine[2], tables, ("level", "drafted"))  # type: ignore[arg-type]
        # Every row that is in use writes to a place of its own.
        active = rows.places[rows.places >= 0].tolist()
        assert len(active) == count * len(shape._rows[depth]) if depth < shape.depth else True
        if depth == shape.depth:
            break
        best = torch.randint(50, (num_rows, topk), generator=generator)
        hidden = normal(generator, num_rows, width)
        drafting.branch_rows(roots, rows, tables, best, names, hidden)
        more = (there(each) for each in (best, names, hidden))
        drafting_triton.branch_rows(*mine, *more)  # type: ignore[arg-type]
    assert int(tables.level) == shape.depth
    assert bool((tables.drafted[:count] >= 0).all()) and not bool(tables.drafted[count:].any())
