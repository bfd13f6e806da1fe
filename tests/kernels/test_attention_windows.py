"""Layers with sliding windows and sinks, in every kind of step, by the definition of attention."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from attention_cases import Case, DraftStep, poisoned_memory, random_tree

from pd.core.errors import UsageError
from pd.kernels.attention import find_attention_backend, make_attention_backend
from pd.kernels.attention.base import UnreadStarts
from pd.kernels.kv_store import store_kv

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

    from pd.kernels.attention import PlannedAttention
    from pd.kernels.attention.triton_backend import TritonAttention

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
DEVICE = "cuda:0" if ON_GPU else "cpu"

# Tokens in the pool, new tokens, and whether these form a tree.
STEPS = [
    [(6, 1, False), (300, 1, False), (0, 1, False), (64, 1, False)],
    [(0, 50, False), (90, 40, False), (17, 1, False), (33, 2, False)],
    [(29, 1, False), (40, 9, True), (0, 12, True), (130, 30, False), (200, 5, True)],
]
# Shorter than a page or a tree, as long as a page, longer than a chunk and than every sequence.
WINDOWS = [1, 3, 16, 70, 1000]
PAGE_SIZES = [1, 16, 64]
CELLS = list(itertools.product(range(len(STEPS)), WINDOWS, PAGE_SIZES))


def mark_cells(*sample: tuple[int, int, int]) -> list[ParameterSet]:
    """List all cells. Those outside of the sample are full, except on a GPU."""
    return [
        pytest.param(*cell, marks=() if ON_GPU or cell in sample else pytest.mark.full)
        for cell in CELLS
    ]


def make_case(
    step: list[tuple[int, int, bool]], window: int, page_size: int, device: str = DEVICE
) -> Case:
    """Make a case whose second layer has a window and sinks. What no window needs is NaN there."""
    random = np.random.default_rng(window)
    trees = [random_tree(n, random) if is_tree else None for _, n, is_tree in step]
    shapes = [(start, n) for start, n, _ in step]
    case = Case(
        shapes,
        page_size,
        device=device,
        trees=trees,
        windows=(0, window),
        sinks=True,
    )
    case.spoil()
    return case


def spoil_before_windows(case: Case) -> None:
    """Fill the slots that no window reaches with NaN, in the layer that has one."""
    for i, (start, _) in enumerate(case.shapes):
        before = case.slots(i, max(0, start - case.windows[1] + 1))
        case.pool.buffer[1][:, before.to(case.pool.buffer.device)] = float("nan")


def make_backend(name: str, case: Case) -> Any:
    if name == "triton" and not ON_GPU:  # interpreted
        from pd.kernels.attention.triton_backend import TritonAttention

        return TritonAttention(case.pool, case.q.shape[1], None, case.windows)
    return make_attention_backend(name, case.pool, case.q.shape[1], None, case.windows)


def assert_right(out: torch.Tensor, case: Case, layer: int = 1) -> None:
    expected = case.expected(layer)[: len(out)]
    torch.testing.assert_close(out.double().cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("step", "window", "page_size"), mark_cells((0, 70, 1), (1, 16, 64), (2, 3, 16))
)
def test_the_torch_backend_does_what_the_definition_says(
    step: int, window: int, page_size: int
) -> None:
    case = make_case(STEPS[step], window, page_size, "cpu")
    for layer in (0, 1):
        assert_right(case.attend(make_backend("torch", case), layer), case, layer)


def test_long_chunks_of_the_torch_backend_are_attended_block_by_block() -> None:
    case = make_case([(60, 280, False)], 90, 16, "cpu")
    assert_right(case.attend(make_backend("torch", case)), case)


@pytest.mark.parametrize("window", [1, 3, 16, 70])
def test_drafts_of_the_torch_backend_see_the_last_of_their_keys(window: int) -> None:
    check_drafts("torch", window, "cpu")


def check_drafts(name: str, window: int, device: str) -> None:
    random = np.random.default_rng(window)
    case = make_case([(0, 40, False), (89, 1, False)], window, 4, device)
    step = DraftStep(case, [0, 1, 1, 0], random)
    graph = make_backend(name, case).make_draft_graph(6, 100)
    graph.plan(step.limits, step.pages)
    found = step.attend(graph)[:4].double().cpu()
    torch.testing.assert_close(found, step.expected(), atol=1e-5, rtol=1e-5)


class TestTriton:
    @pytest.fixture(autouse=True)
    def triton(self) -> None:
        pytest.importorskip("triton", reason="Triton is not installed")

    @pytest.mark.parametrize(
        ("step", "window", "page_size"),
        mark_cells((0, 16, 64), (1, 70, 1), (2, 3, 16)),
    )
    def test_steps_read_their_windows_alone(self, step: int, window: int, page_size: int) -> None:
        case = make_case(STEPS[step], window, page_size)
        backend = make_backend("triton", case)
        assert_right(case.attend(backend, 0), case, 0)
        spoil_before_windows(case)
        assert_right(case.attend(backend), case)

    def test_a_decode_graph(self) -> None:
        case = make_case([(40, 1, False), (3, 1, False), (300, 1, False)], 20, 16)
        spoil_before_windows(case)
        graph = make_backend("triton", case).make_decode_graph(5, 400)
        graph.plan(np.array([40, 3, 300]), case.pages)
        assert_right(replay(graph, case, 5), case)

    def test_a_mixed_graph(self) -> None:
        case = make_case([(40, 1, False), (150, 40, False), (7, 1, False)], 20, 16)
        spoil_before_windows(case)
        graph = make_backend("triton", case).make_mixed_graph(50, 3, 2, 400)
        graph.plan(np.array([40, 150, 7]), np.array([1, 40, 1]), case.pages)
        assert_right(replay(graph, case, 50), case)

    @pytest.mark.parametrize("window", [2, 20])
    def test_a_verify_graph_whose_sequences_start_later_than_the_host_knows(
        self, window: int
    ) -> None:
        case = make_case([(40, 6, True), (150, 4, False), (9, 1, False)], window, 16)
        spoil_before_windows(case)
        graph = make_backend("triton", case).make_verify_graph(14, 400)
        starts, lengths = np.array(case.shapes, np.int64).T
        later, most = np.array([3, 0, 5]), np.array([5, 5, 5])
        spare = [np.concatenate((pages, case.pages[0][:1])) for pages in case.pages]
        counts = torch.zeros(14, dtype=torch.int64)
        counts[: lengths.sum()] = torch.from_numpy(np.repeat(later, lengths))
        graph.plan(
            starts - later, lengths, spare, case.trees, UnreadStarts(most, counts.to(DEVICE))
        )
        assert_right(replay(graph, case, 14), case)

    @pytest.mark.parametrize("window", [3, 70])
    def test_drafts_see_the_last_of_their_keys(self, window: int) -> None:
        check_drafts("triton", window, DEVICE)

    def test_split_keys_count_sinks_once(self) -> None:
        case = make_case([(3000, 1, False)], 0, 16)
        case.windows = ()
        backend: TritonAttention = make_backend("triton", case)
        out = case.attend(backend)
        assert int(backend._launches[0].work.items[:, 8].max()) > 1, "the test needs splits"
        assert_right(out, case)


def replay(graph: PlannedAttention, case: Case, rows: int) -> torch.Tensor:
    """Replay a planned graph; the rest of its rows is padding."""
    tokens = len(case.q)
    q, k, v = (
        torch.cat((x, torch.zeros(rows - tokens, *x.shape[1:], device=DEVICE)))
        for x in (case.q, case.k, case.v)
    )
    store_kv(case.pool.get_keys(1), case.pool.get_values(1), graph.slots, k, v)
    with poisoned_memory():
        out = graph.attend(1, q, k, v, case.sinks)
    assert not out.isnan().any()
    return out[:tokens]


def test_flashinfer_is_refused_by_name_and_auto_takes_another() -> None:
    gpu = torch.device("cuda:0")
    with pytest.raises(UsageError, match="no sliding windows or attention sinks"):
        find_attention_backend("flashinfer", gpu, torch.bfloat16, 64, windows=True)
    assert find_attention_backend("auto", gpu, torch.bfloat16, 64, windows=True).name == "triton"
