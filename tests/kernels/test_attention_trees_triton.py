"""The Triton kernels of speculative decoding by the torch reference."""

from __future__ import annotations

import itertools
import random as stdlib_random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from attention_cases import (
    Case,
    DraftStep,
    make_step_without_first_keys,
    poisoned_memory,
    random_tree,
)
from triton_device import DEVICE, SEED

from pd.kernels.attention.base import UnreadStarts
from pd.kernels.attention.triton_backend import TritonAttention
from pd.kernels.attention.triton_work import Tiles
from pd.kernels.kv_store import store_kv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _pytest.mark import ParameterSet

    from pd.kernels.attention.triton_graphs import TritonDraft, TritonMixed, TritonVerify

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3}
# KV heads, query heads per KV head, head size, page size.
SHAPES = [
    (2, 1, 16, 1),
    (2, 2, 32, 16),
    (1, 4, 64, 64),
    (1, 8, 128, 16),
    (2, 5, 80, 1),
]
# (tokens in the pool, new tokens, whether they are a tree) of each sequence. Contexts are empty,
# short, and such as are split; trees are one tile and several, and as large as they may be.
STEPS = [
    [(40, 4, True), (300, 4, True), (0, 4, True)],
    [(290, 4, False), (3, 1, False), (127, 7, True), (0, 2, False), (61, 3, True)],
    [(515, 64, True), (64, 9, False), (1, 1, True)],
]


def every_cell(count: int, shapes: int) -> list[ParameterSet]:
    """Every one of ``count`` steps with every shape. In ``make test`` each of the first ``shapes``
    shapes once, with a step of its own."""
    return [
        pytest.param(
            step,
            SHAPES[shape],
            id=f"step{step}-shape{shape}",
            marks=() if shape % count == step and shape < shapes else pytest.mark.full,
        )
        for step, shape in itertools.product(range(count), range(len(SHAPES)))
    ]


def make_case(
    step: Sequence[tuple[int, int, bool]], shape: tuple, dtype: torch.dtype = torch.float32
) -> Case:
    print(f"seed {SEED}")
    random = np.random.default_rng(SEED)
    trees = [random_tree(n, random) if is_tree else None for _, n, is_tree in step]
    kv_heads, group, head_dim, page_size = shape
    shapes = [(start, n) for start, n, _ in step]
    case = Case(shapes, page_size, kv_heads, group, dtype, SEED, head_dim, DEVICE, trees=trees)
    case.spoil()
    return case


def assert_right(out: torch.Tensor, expected: torch.Tensor) -> None:
    error = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.float().cpu(), expected, atol=error, rtol=error)


class TestEager:
    @pytest.mark.parametrize(("step", "shape"), every_cell(len(STEPS), 3))
    def test_steps_are_those_of_the_reference(self, step: int, shape: tuple) -> None:
        case = make_case(STEPS[step], shape)
        assert_right(case.attend(TritonAttention(case.pool, case.q.shape[1])), case.reference())

    def test_trees_chunks_and_single_tokens_in_one_step(self) -> None:
        step = [(5, 70, False), (33, 1, True), (9, 5, True), (150, 1, False), (0, 3, True)]
        case = make_case(step, SHAPES[1], torch.float16)
        backend = TritonAttention(case.pool, case.q.shape[1])
        assert_right(case.attend(backend), case.reference())
        items = torch.cat([work.items for _, _, work, _ in backend._launches])
        assert int(items[items[:, 4] == 0, 1].sum()) == len(case.q), "every token once"
        # The masks of that step are not those of the next.
        case.trees = None
        assert_right(case.attend(backend), case.reference())


def addresses(graph: TritonVerify | TritonDraft, *tensors: torch.Tensor) -> list[int]:
    work = graph._launch.works[0]
    mine = (graph.slots, work.num_items, work.items, graph._launch.tables)
    return [tensor.data_ptr() for tensor in (*mine, *tensors)]


def verified(
    graph: TritonVerify, case: Case, rows: int, later: Sequence[tuple[int, int]] | None = None
) -> torch.Tensor:
    """Plan a verify graph for a case and replay it; the rest of its rows is padding.

    Args:
        later: for each sequence by how much it starts later than the host says, and how much that
            may be at most.
    """
    starts, lengths = np.array(case.shapes, np.int64).reshape(-1, 2).T
    tokens = int(lengths.sum())
    if later is None:
        graph.plan(starts, lengths, case.pages, case.trees)
    else:
        by, most = np.array(later, np.int64).T
        # What a sequence may need and does not is neither read nor written: it is a page of others.
        others = np.array([case.pages[0][0]] * int(most.max() + 1), np.int32)
        pages = [np.concatenate((mine, others)) for mine in case.pages]
        counts = torch.zeros(rows, dtype=torch.int64)
        counts[:tokens] = torch.from_numpy(np.repeat(by, lengths))
        unread = UnreadStarts(most, counts.to(DEVICE))
        graph.plan(starts - by, lengths, pages, case.trees, unread)
        assert (
            graph.slots[:tokens].tolist()
            == torch.cat(
                [case.slots(i, s + n)[s:] for i, (s, n) in enumerate(case.shapes)]
            ).tolist()
        )
    q, k, v = (
        torch.cat((x[:tokens], torch.zeros(rows - tokens, *x.shape[1:], device=DEVICE)))
        for x in (case.q, case.k, case.v)
    )
    extra = case.pool.num_pages * case.page_size
    assert graph.slots[tokens:].tolist() == [extra] * (rows - tokens)
    store_kv(case.pool.get_keys(1), case.pool.get_values(1), graph.slots, k, v)
    with poisoned_memory():
        out = graph.attend(1, q, k, v)
    assert not out.isnan().any()
    return out[:tokens]


class TestVerify:
    @pytest.mark.parametrize(("step", "shape"), every_cell(len(STEPS), 2))
    def test_sequences_start_where_only_the_device_knows(self, step: int, shape: tuple) -> None:
        case = make_case(STEPS[step], shape)
        rng, rows = stdlib_random.Random(SEED), len(case.q) + 3
        graph = TritonAttention(case.pool, case.q.shape[1]).make_verify_graph(rows, 700)
        later = []
        for start, _ in case.shapes:
            by = rng.randint(0, min(start, 9))
            later.append((by, by + rng.choice((0, 1, 40))))
        assert_right(verified(graph, case, rows, later), case.reference())

    @pytest.mark.parametrize(("step", "shape"), every_cell(len(STEPS), 2))
    def test_steps_are_those_of_the_reference(self, step: int, shape: tuple) -> None:
        case = make_case(STEPS[step], shape)
        rows = len(case.q) + 3
        graph = TritonAttention(case.pool, case.q.shape[1]).make_verify_graph(rows, 600)
        assert_right(verified(graph, case, rows), case.reference())

    def test_one_graph_is_planned_again_with_other_divisions(self) -> None:
        """Larger and smaller, of trees and of chains, down to no sequence at all."""
        shape = SHAPES[2]
        case = make_case([(300, 8, True), (150, 4, True), (7, 4, True)], shape)
        graph = TritonAttention(case.pool, case.q.shape[1]).make_verify_graph(16, 400)
        pieces = [
            ([0, 1, 2], [8, 4, 4], True),
            ([2, 0], [3, 1], True),
            ([0, 1, 2], [1, 1, 1], False),
            ([1, 0], [4, 8], False),
            ([], [], False),
        ]
        whole = case.shapes, case.pages, case.trees, case.q, case.k, case.v
        for members, lengths, has_trees in pieces:
            case.shapes = [(whole[0][i][0], n) for i, n in zip(members, lengths, strict=True)]
            case.pages = [whole[1][i] for i in members]
            trees = [whole[2][i][:n, :n] for i, n in zip(members, lengths, strict=True)]
            case.trees = trees if has_trees else None
            case.q, case.k, case.v = (x[: sum(lengths)] for x in whole[3:])
            out = verified(graph, case, 16)
            if members:
                assert_right(out, case.reference())

    def test_many_tokens_have_a_tile_shape_of_their_own(self) -> None:
        rng = stdlib_random.Random(SEED)
        step = [(rng.randrange(200), 4, rng.random() < 0.5) for _ in range(35)]
        case = make_case(step, (1, 4, 16, 16))
        backend = TritonAttention(case.pool, case.q.shape[1])
        assert backend.kernels.get_tree_kernel(140) is not backend.kernels.get_tree_kernel(32)
        assert_right(verified(backend.make_verify_graph(140, 256), case, 140), case.reference())

    def test_tokens_of_a_tile_share_its_keys(self) -> None:
        """Four tokens with four query heads per KV head are one tile of 16 rows."""
        case = make_case([(600, 4, True)], SHAPES[2])
        backend = TritonAttention(case.pool, case.q.shape[1])
        assert backend.kernels.get_tree_kernel(4).tile_tokens == 4
        graph = backend.make_verify_graph(4, 640)
        graph.plan(np.array([600]), np.array([4]), case.pages)
        work = graph._launch.works[0]
        items = work.items[: int(work.num_items)]
        assert (items[:, 1] == 4).all()
        begins, ends = items[:, 4], items[:, 5]
        assert int((ends - begins).sum()) == 604, "every key once"

    def test_addresses_stay(self) -> None:
        case = make_case(STEPS[0], SHAPES[0])
        backend = TritonAttention(case.pool, case.q.shape[1])
        graph = backend.make_verify_graph(12, 400)
        before = addresses(graph, graph._masks)
        verified(graph, case, 12)
        assert addresses(graph, graph._masks) == before


# Tokens in the pool and new tokens of each sequence.
MIXED = [
    [(40, 1), (300, 1), (0, 70), (130, 9), (3, 1)],
    [(290, 130), (61, 2), (5, 1)],
    [(515, 1), (64, 1)],
    [(17, 40)],
]


class TestMixed:
    @pytest.mark.parametrize(
        ("step", "shape"),
        [
            pytest.param(
                step,
                SHAPES[shape],
                id=f"step{step}-shape{shape}",
                marks=() if (step, shape) == (2, 1) else pytest.mark.full,
            )
            for step, shape in itertools.product(range(len(MIXED)), range(3))
        ],
    )
    def test_a_graph_is_planned_again(self, step: int, shape: tuple) -> None:
        """Single tokens and chunks, of one kind only, too, and in between no sequence at all."""
        case = make_case([(start, n, False) for start, n in MIXED[step]], shape)
        kv_heads, group, _, page_size = shape
        backend = TritonAttention(case.pool, kv_heads * group)
        graph = backend.make_mixed_graph(140, 3, 2, 600)
        before = mixed_addresses(graph)
        for _ in range(2):
            out = replayed(graph, case, 140)
            assert_right(out, case.reference())
            none = np.empty(0, np.int64)
            graph.plan(none, none, [])
            extra = case.pool.num_pages * page_size
            assert graph.slots.tolist() == [extra] * 140
            assert [int(work.num_items) for work in graph._launch.works] == [0, 0]
        assert mixed_addresses(graph) == before

    def test_chunks_each_leave_a_tile_partly_empty(self) -> None:
        """As many as there may be, of the most tokens that do."""
        case = make_case([(9, 33, False)] * 4, (1, 4, 64, 16))
        backend = TritonAttention(case.pool, 4)
        size = backend.kernels.chunk_kernel.tile_tokens
        case = make_case([(9, size + 1, False)] * 4, (1, 4, 64, 16))
        backend = TritonAttention(case.pool, 4)
        tokens = 4 * (size + 1)
        graph = backend.make_mixed_graph(tokens, 1, 4, 256)
        assert_right(replayed(graph, case, tokens), case.reference())


def mixed_addresses(graph: TritonMixed) -> list[int]:
    tensors = [graph.slots, graph._launch.tables]
    for work in graph._launch.works:
        tensors += [work.num_items, work.items]
    return [tensor.data_ptr() for tensor in tensors]


def replayed(graph: TritonMixed, case: Case, tokens: int) -> torch.Tensor:
    """Plan a mixed graph for a case and replay it; the rest of its tokens is padding."""
    starts, lengths = np.array(case.shapes, np.int64).reshape(-1, 2).T
    count = int(lengths.sum())
    graph.plan(starts, lengths, case.pages)
    q, k, v = (
        torch.cat((x, torch.zeros(tokens - count, *x.shape[1:], dtype=x.dtype, device=DEVICE)))
        for x in (case.q, case.k, case.v)
    )
    store_kv(case.pool.get_keys(1), case.pool.get_values(1), graph.slots, k, v)
    with poisoned_memory():
        out = graph.attend(1, q, k, v)
    assert not out[count:].any()
    return out[:count]


# Tokens of each sequence at most, and the sequences of the rows.
DRAFTS = [
    ([300, 20, 64, 129], [0, 1, 2, 3]),
    ([515, 70], [0, 0, 1, 0, 1]),
    ([8, 400], [1, 0]),
]


def make_step(limits: Sequence[int], sequences: Sequence[int], shape: tuple) -> DraftStep:
    case = make_case([(limit - 1, 1, False) for limit in limits], shape)
    step = DraftStep(case, sequences, np.random.default_rng(SEED))
    step.spoil()
    return step


class TestDraft:
    @pytest.mark.parametrize(("draft", "shape"), every_cell(len(DRAFTS), 3))
    def test_steps_are_those_of_the_reference(self, draft: int, shape: tuple) -> None:
        """With NaN in everything that no row sees, up to the planned limits."""
        step = make_step(*DRAFTS[draft], shape)
        expected = step.reference()
        graph = TritonAttention(step.case.pool, step.q.shape[1]).make_draft_graph(6, 600)
        graph.plan(step.limits, step.pages)
        n = len(step.sequences)
        out = step.attend(graph)
        extra = step.case.pool.num_pages * step.case.page_size
        assert graph.slots[n:].tolist() == [extra] * (6 - n)
        assert not out.isnan().any()
        assert_right(out[:n], expected)

    def test_first_keys_may_be_hidden(self) -> None:
        case = make_case([(8, 1, False), (599, 1, False), (1, 1, False)], SHAPES[2])
        step = make_step_without_first_keys(case)
        expected = step.reference()
        backend = TritonAttention(case.pool, case.q.shape[1])
        graph = backend.make_draft_graph(8, 600, first_key=1)
        graph.plan(step.limits, step.pages)
        out = step.attend(graph)
        assert not out.isnan().any()
        assert not out[5].any()
        assert_right(out[:6], expected)

    def test_several_steps_of_one_plan_and_plans_again(self) -> None:
        """Chains of drafts behind a context whose end the host does not know, and behind it NaN."""
        limits, shape = [320, 40, 150], SHAPES[2]
        case = make_case([(limit - 1, 1, False) for limit in limits], shape)
        backend = TritonAttention(case.pool, case.q.shape[1])
        graph = backend.make_draft_graph(4, 400)
        random = np.random.default_rng(SEED)
        before = addresses(graph, graph._limits, graph._firsts)
        for sequences, behind in (([0, 1, 2], 9), ([2, 1], 30), ([0], 200)):
            case.pool.buffer.normal_()
            first = DraftStep(case, sequences, random)
            graph.plan(first.limits, first.pages)
            for number in range(3):
                step = DraftStep(case, sequences, random)
                step.places = step.limits - behind + number
                step.bases = step.limits - behind
                step.masks = np.full(len(sequences), (2 << number) - 1)
                for row in range(len(sequences)):
                    slots = case.slots(sequences[row], int(step.limits[row]))
                    case.pool.buffer[:, :, slots[int(step.places[row]) :]] = float("nan")
                expected = step.reference()
                assert_right(step.attend(graph)[: len(sequences)], expected)
        assert addresses(graph, graph._limits, graph._firsts) == before

    def test_bases_may_reach_beyond_the_own_token(self) -> None:
        """A row whose base lies behind its place needs no mask."""
        step = make_step([90, 200], [0, 1], SHAPES[1])
        step.case.pool.buffer.normal_()
        step.bases, step.masks = step.places + 1, np.zeros(2, np.int64)
        expected = step.reference()
        graph = TritonAttention(step.case.pool, step.q.shape[1]).make_draft_graph(2, 256)
        graph.plan(step.limits, step.pages)
        assert_right(step.attend(graph), expected)

    def test_places_outside_of_the_limit_are_the_extra_page(self) -> None:
        case = make_case([(9, 1, False), (30, 2, False)], (1, 1, 16, 4))
        graph = TritonAttention(case.pool, 1).make_draft_graph(200, 64)
        graph.plan(np.array([10, 32]), case.pages)
        extra = case.pool.num_pages * case.page_size
        graph.places.fill_(3)
        graph.places[:2] = torch.tensor([9, 31])
        graph.locate_slots()
        expected = [int(case.slots(0, 10)[9]), int(case.slots(1, 32)[31])]
        assert graph.slots.tolist() == [*expected, *[extra] * 198]
        graph.places[:2] = torch.tensor([10, -1])
        graph.places[2:] = 1 << 40
        graph.locate_slots()
        assert graph.slots.tolist() == [extra] * 200


def test_tiles_of_a_tree_begin_at_its_first_token() -> None:
    arrays = (np.array(x) for x in ([0, 9], [100, 3], [9, 2], [0, 7]))
    tiles = Tiles.cut_chunks(*arrays, 4, trees=True)
    assert tiles.rows.tolist() == [0, 4, 8, 9]
    assert tiles.tokens.tolist() == [4, 4, 1, 2]
    assert tiles.positions.tolist() == [100, 100, 100, 3]
    assert tiles.ends.tolist() == [104, 108, 109, 5]
    assert tiles.tables.tolist() == [0, 0, 0, 7]
