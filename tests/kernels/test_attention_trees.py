"""Attention of speculative decoding by its definition: trees, and drafts that the GPU places."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import Case, DraftStep, make_step_without_first_keys, random_tree
from hypothesis import given, settings
from hypothesis import strategies as st

from pd.kernels.attention import make_attention_backend
from pd.kernels.attention.torch_backend import TorchAttention
from pd.kernels.attention.trees import MAX_TREE, find_trees, pack_trees

torch.set_num_threads(1)

CHAIN = np.tri(3, dtype=np.bool_)


def assert_right(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-4)


class TestMasks:
    def test_bits_are_the_tokens_that_a_token_sees(self) -> None:
        fork = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)
        masks = pack_trees(np.array([2, 3, 1]), [None, fork, np.ones((1, 1), np.bool_)])
        assert masks.tolist() == [0b1, 0b11, 0b1, 0b11, 0b101, 0b1]

    def test_a_full_chain_has_every_bit(self) -> None:
        whole = np.array([MAX_TREE])
        masks = pack_trees(whole, None)
        assert masks[:2].tolist() == [1, 3]
        assert masks[-2:].tolist() == [2**63 - 1, -1]
        assert (pack_trees(whole, [np.tri(MAX_TREE, dtype=np.bool_)]) == masks).all()

    def test_one_token_does_not_branch(self) -> None:
        lengths = np.array([1, 3, 3])
        trees = [np.ones((1, 1), np.bool_), None, CHAIN]
        assert find_trees(lengths, trees).tolist() == [False, False, True]
        assert find_trees(lengths, None).tolist() == [False] * 3

    @pytest.mark.parametrize(
        ("tree", "reason"),
        [
            (np.ones((3, 3), np.bool_), "sees one after it"),
            (np.zeros((3, 3), np.bool_), "does not see itself"),
            (np.tri(2, dtype=np.bool_), "a tree of 3 tokens is"),
        ],
    )
    def test_what_is_no_tree_is_refused(self, tree: np.ndarray, reason: str) -> None:
        with pytest.raises(AssertionError, match=reason):
            pack_trees(np.array([1, 3]), [None, tree])

    def test_more_tokens_than_bits_are_refused(self) -> None:
        with pytest.raises(AssertionError, match="64 are the most"):
            pack_trees(np.array([65]), [np.tri(65, dtype=np.bool_)])


tree_shapes = st.tuples(st.integers(0, 40), st.integers(1, 20), st.booleans())


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(tree_shapes, min_size=1, max_size=5),
    page_size=st.sampled_from([1, 4, 16, 64]),
    heads=st.sampled_from([(1, 1), (2, 2), (1, 4), (3, 2)]),
    seed=st.integers(0, 2**16),
)
def test_any_mixture_of_trees_and_chains(
    shapes: list[tuple[int, int, bool]], page_size: int, heads: tuple[int, int], seed: int
) -> None:
    random = np.random.default_rng(seed)
    trees = [random_tree(n, random) if is_tree else None for _, n, is_tree in shapes]
    case = Case([(start, n) for start, n, _ in shapes], page_size, *heads, seed=seed, trees=trees)
    case.spoil()
    out = case.attend(make_attention_backend("torch", case.pool, case.q.shape[1]))
    assert_right(out, case.expected(1))


def test_a_tree_that_is_a_chain_is_attended_as_a_chain() -> None:
    shapes = [(5, 3), (0, 3), (9, 3)]
    outs = []
    for trees in (None, [CHAIN] * 3):
        case = Case(shapes, 4, trees=trees)
        outs.append(case.attend(TorchAttention(case.pool, case.q.shape[1])))
    torch.testing.assert_close(outs[0], outs[1], atol=2e-6, rtol=2e-6)


class TestDraft:
    @settings(max_examples=30, deadline=None)
    @given(
        limits=st.lists(st.integers(8, 150), min_size=1, max_size=4),
        sequences=st.lists(st.integers(0, 3), min_size=1, max_size=8),
        page_size=st.sampled_from([1, 4, 16, 64]),
        heads=st.sampled_from([(1, 1), (2, 2), (1, 4), (3, 2)]),
        seed=st.integers(0, 2**16),
    )
    def test_rows_see_what_their_bases_and_masks_say(
        self,
        limits: list[int],
        sequences: list[int],
        page_size: int,
        heads: tuple[int, int],
        seed: int,
    ) -> None:
        """With NaN in everything that no row sees."""
        case = Case([(limit - 1, 1) for limit in limits], page_size, *heads, seed=seed)
        step = DraftStep(case, [i % len(limits) for i in sequences], np.random.default_rng(seed))
        step.spoil()
        graph = TorchAttention(case.pool, case.q.shape[1]).make_draft_graph(10, 256)
        graph.plan(step.limits, step.pages)
        out = step.attend(graph)[: len(sequences)]
        assert_right(out, step.expected())

    def test_first_keys_may_be_hidden(self) -> None:
        case = Case([(8, 1), (69, 1), (1, 1)], 4, 2, 2)
        step = make_step_without_first_keys(case)
        graph = TorchAttention(case.pool, case.q.shape[1]).make_draft_graph(8, 80, first_key=1)
        graph.plan(step.limits, step.pages)
        out = step.attend(graph)[:6]
        assert not out[-1].any()
        assert_right(out[:-1], step.expected()[:-1])

    def test_places_outside_of_the_limit_are_the_extra_page(self) -> None:
        case = Case([(9, 1), (30, 2)], 4)
        graph = TorchAttention(case.pool, case.q.shape[1]).make_draft_graph(4, 64)
        graph.plan(np.array([10, 32]), case.pages)
        extra = case.pool.num_pages * case.page_size
        for places, expected in (
            ([9, 31, 0, 5], [case.slots(0, 10)[9], case.slots(1, 32)[31], extra, extra]),
            ([10, -1, -5, 1 << 40], [extra] * 4),
        ):
            graph.places.copy_(torch.tensor(places))
            graph.locate_slots()
            assert graph.slots.tolist() == [int(slot) for slot in expected]
