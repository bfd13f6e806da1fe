"""Accepted guesses are those that the definition accepts, on both devices."""

from __future__ import annotations

import random

import pytest
import torch
from triton_device import DEVICE, SEED

from pd.kernels.acceptance import accept_drafts
from pd.kernels.draft_tensors import Accepted, Trees

WIDTH = 8


def example(rng: random.Random, works: int) -> tuple[torch.Tensor, Trees, list[list[int]]]:
    """Random trees over few tokens, so that many guesses are right; and for each work its last
    accepted guess, the token after it, its position and the path to it, by the definition."""
    sampled: list[int] = []
    tokens: list[int] = []
    parents: list[int] = []
    columns: list[list[int]] = []
    expected = []
    for _ in range(works):
        count = rng.choice((0, 1, 3, 8))
        row, first = len(sampled), len(tokens)
        drawn = [rng.randrange(3) for _ in range(count + 1)]
        tree = [rng.randrange(-1, guess) for guess in range(count)]
        guesses: list[int] = []
        for guess in range(count):
            taken = {guesses[other] for other in range(guess) if tree[other] == tree[guess]}
            guesses.append(rng.choice([t for t in range(9) if t not in taken][:3]))
        forced = rng.randrange(count + 1) if rng.random() < 0.2 else -1
        path, last = list[int](), -1
        while True:
            found = [g for g in range(count) if tree[g] == last and guesses[g] == drawn[last + 1]]
            if not found:
                break
            (last,) = found
            path.append(last)
        if forced >= 0:
            path = list(range(forced))
        end = path[-1] if path else -1
        stop = rng.randrange(100)
        expected.append([end, drawn[end + 1], stop + len(path), *path, *[-1] * (WIDTH - len(path))])
        sampled += drawn
        tokens += guesses
        parents += tree
        columns.append([row, first, count, forced, stop])
    rows, firsts, counts, forced_all, stops = torch.tensor(columns).T.contiguous()
    there = torch.tensor(tokens, dtype=torch.int64), torch.tensor(parents, dtype=torch.int64)
    return torch.tensor(sampled), Trees(*there, rows, firsts, counts, forced_all, stops), expected


def table(found: Accepted) -> list[list[int]]:
    ends = torch.stack((found.last, found.tokens, found.positions), dim=1)
    return torch.cat((ends, found.path), dim=1).tolist()


# Paths that are longer than the width are cut.
@pytest.mark.parametrize("width", [WIDTH, 2])
@pytest.mark.parametrize("seed", range(SEED, SEED + 20))
def test_the_reference(seed: int, width: int) -> None:
    sampled, trees, expected = example(random.Random(seed), 12)
    assert table(accept_drafts(sampled, trees, width)) == [each[: 3 + width] for each in expected]


@pytest.mark.usefixtures("triton_works")
@pytest.mark.parametrize("width", [WIDTH, 2])
@pytest.mark.parametrize("seed", range(SEED, SEED + 5))
def test_the_kernel(seed: int, width: int) -> None:
    from pd.kernels import acceptance_triton

    sampled, trees, expected = example(random.Random(seed), 12)
    there = Trees(*(column.to(DEVICE) for column in trees))
    found = Accepted(*acceptance_triton.accept_drafts(sampled.to(DEVICE), there, width))
    assert table(found) == [each[: 3 + width] for each in expected]


def test_paths_may_be_left_out() -> None:
    sampled, trees, expected = example(random.Random(SEED), 12)
    assert table(accept_drafts(sampled, trees)) == [each[:3] for each in expected]
