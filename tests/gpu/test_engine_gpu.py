"""The engine on a GPU computes what transformers does, in graphs and without."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from checkpoints import (
    ARCHITECTURES,
    LATENT,
    VOCAB_SIZE,
    make_checkpoint,
    reference_generate,
    reference_model,
)
from greedy_engine import generate, make_runner

from pd.engine.chunk_graphs import SIZES, ChunkGraphs
from pd.engine.cuda_graphs import GraphRecorder
from pd.engine.forward_item import ForwardItem
from pd.engine.step_graphs import MAX_CHUNKS, DecodeGraphs, MixedGraphs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pd.engine.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NEW_TOKENS = 24
MIXED = (64, 128, 256)


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]


def with_graphs(runner: ModelRunner) -> ModelRunner:
    recorder = GraphRecorder(runner.pool.device)
    runner.graphs = DecodeGraphs(runner, recorder, (1, 2, 4), max_tokens=8, max_context=2048)
    if runner.attention.make_mixed_graph(2, 1, 1, 2) is not None:
        runner.mixed_graphs = MixedGraphs(
            runner, recorder, MIXED, max_running=8, max_tokens=8, max_context=2048
        )
    runner.chunk_graphs = ChunkGraphs(runner, recorder, max_context=2048)
    return runner


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_float32_tokens_equal_transformers(
    checkpoint: Callable[[str], Path], architecture: str, graphs: bool
) -> None:
    path = checkpoint(architecture)
    prompts = prompts_of([1, 2, 17, 64, 150, 420])
    expected = reference_generate(path, prompts, NEW_TOKENS)
    for page_size, max_chunk in ((1, 5), (16, 4096), (4, 1)):
        few = prompts if max_chunk > 1 else prompts[:4]
        runner = make_runner(
            path, page_size=page_size, device="cuda", attention="triton", last_alone=not graphs
        )
        if graphs:
            with_graphs(runner)
        found = generate(runner, few, NEW_TOKENS, max_chunk=max_chunk, seed=page_size)
        where = f"page size {page_size}, chunks up to {max_chunk}"
        assert [s.output for s in found] == expected[: len(few)], where


@pytest.mark.parametrize("attention", ["flashinfer", "triton"])
@pytest.mark.parametrize("architecture", ["llama3", "qwen3", "qwen3_moe"])
def test_bfloat16_logits_are_as_close_as_those_of_transformers(
    tmp_path: Path, architecture: str, attention: str
) -> None:
    if attention == "flashinfer":
        pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    # Of those that FlashInfer has.
    path = make_wide_checkpoint(architecture, tmp_path)
    exact_model = copy.deepcopy(reference_model(path)).cuda()
    rounded_model = copy.deepcopy(exact_model).to(torch.bfloat16)
    runner = make_runner(
        path, dtype="bfloat16", device="cuda", attention=attention, last_alone=True
    )
    ours, theirs = [], []
    for prompt in prompts_of([40, 200, 333]):
        ids = torch.tensor([prompt], device="cuda")
        with torch.inference_mode():
            exact = exact_model(ids).logits[0].float()
            rounded = rounded_model(ids).logits[0].float()
        pages = np.arange(-(-len(prompt) // 16), dtype=np.int32)
        item = ForwardItem(np.array(prompt, np.int32), 0, pages, len(prompt))
        ours.append((runner.forward([item]).float() - exact).flatten())
        theirs.append((rounded - exact).flatten())
        item = ForwardItem(item.token_ids, 0, pages, 4)
        ours.append((runner.forward([item]).float() - exact[-4:]).flatten())
        theirs.append((rounded - exact)[-4:].flatten())
    ratio = torch.cat(ours).norm() / torch.cat(theirs).norm()
    print(f"{architecture}, {attention}: error {ratio:.3f} of that of transformers")
    assert ratio < 1.1


def make_wide_checkpoint(architecture: str, directory: Path) -> Path:
    """Make one with heads of 128 values, which FlashInfer takes. Latents keep their sizes."""
    sizes = {} if architecture in LATENT else {"head_dim": 128}
    return make_checkpoint(architecture, directory, **sizes)


@pytest.mark.parametrize("attention", ["auto", "triton"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_logits_of_decode_steps_are_as_close_as_those_of_transformers(
    tmp_path: Path, architecture: str, attention: str
) -> None:
    """In graphs: by the products for few rows, one sequence alone and three together."""
    path = make_wide_checkpoint(architecture, tmp_path)
    exact_model = copy.deepcopy(reference_model(path)).cuda()
    rounded_model = copy.deepcopy(exact_model).to(torch.bfloat16)
    runner = make_runner(path, dtype="bfloat16", device="cuda", attention=attention)
    with_graphs(runner)
    prompts, steps = prompts_of([40, 200, 333]), 12
    tables = np.random.default_rng(0).permutation(72).astype(np.int32).reshape(3, 24)
    computed = [len(prompt) - 2 * steps for prompt in prompts]
    exact, rounded = [], []
    for prompt, table, count in zip(prompts, tables, computed, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        with torch.inference_mode():
            exact.append(exact_model(ids).logits[0].float())
            rounded.append(rounded_model(ids).logits[0].float())
        runner.forward([ForwardItem(np.array(prompt[:count], np.int32), 0, table)])
    ours, theirs = [], []
    for chosen in [[0], [1], [2]] * steps + [[0, 1, 2]] * steps:
        new = [np.array([prompts[i][computed[i]]], np.int32) for i in chosen]
        items = [ForwardItem(t, computed[i], tables[i]) for t, i in zip(new, chosen, strict=True)]
        for i, row in zip(chosen, runner.forward(items).float(), strict=True):
            ours.append(row - exact[i][computed[i]])
            theirs.append((rounded[i] - exact[i])[computed[i]])
            computed[i] += 1
    ratio = torch.cat(ours).norm() / torch.cat(theirs).norm()
    print(f"{architecture}, {attention}: error {ratio:.3f} of that of transformers")
    assert ratio < 1.1


def test_chunks_in_graphs_are_those_without(tmp_path: Path, monkeypatch) -> None:
    """Of every length around the captured ones, behind prefixes of several pages and of none."""
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    in_graphs = []
    run = ChunkGraphs.run
    monkeypatch.setattr(
        ChunkGraphs, "run", lambda *args: in_graphs.append(len(args[1].token_ids)) or run(*args)
    )
    lengths = (2, 15, 16, 17, 100, 128, 129, 2, 192, 255, 256, 257)
    path = make_checkpoint("llama3", tmp_path, head_dim=128)
    (prompt,) = prompts_of([sum(lengths)])
    pages = np.random.default_rng(0).permutation(100).astype(np.int32)
    found = []
    for graphs in (False, True):
        runner = make_runner(path, dtype="bfloat16", device="cuda", attention="flashinfer")
        if graphs:
            with_graphs(runner)
        logits, start = [], 0
        for length in lengths:
            chunk = np.array(prompt[start : start + length], np.int32)
            logits.append(runner.forward([ForwardItem(chunk, start, pages)]).float().clone())
            start += length
        found.append(torch.cat(logits))
    assert in_graphs == [length for length in lengths if length <= SIZES[-1]]
    error = (found[0] - found[1]).norm() / found[0].norm()
    assert error < 0.01, f"{error:.4f}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mixed_steps_in_graphs_are_those_without(
    checkpoint: Callable[[str], Path], monkeypatch, architecture: str
) -> None:
    """Chunks of several prompts beside sequences whose tokens only the GPU knows, of every number
    of tokens around the captured ones; those that do not fit are launched one by one. In float32,
    since routers of experts decide by the last bits."""
    in_graphs = []
    run = MixedGraphs.run
    monkeypatch.setattr(
        MixedGraphs, "run", lambda *args: in_graphs.append(len(args[1])) or run(*args)
    )
    path = checkpoint(architecture)
    many = [2] * (MAX_CHUNKS + 1)
    steps = [[50, 9], [60, 4], [61, 4], [2, 3], [200, 31, 20], [200, 53], [200, 54], [2], many]
    prompts = prompts_of([600, 40, 130, *[sum(map(len, steps)) * 40] * len(many)])
    sequences = 3 + len(many)
    tables = np.random.default_rng(0).permutation(64 * sequences).astype(np.int32)
    tables = tables.reshape(sequences, 64)
    found = []
    for graphs in (False, True):
        slots = 64 * 16 * sequences
        runner = make_runner(path, num_tokens=slots, device="cuda", attention="triton")
        if graphs:
            with_graphs(runner)
            runner.chunk_graphs = None
        for prompt, table in zip(prompts[:3], tables, strict=False):
            runner.forward([ForwardItem(np.array(prompt, np.int32), 0, table)])
        in_graphs.clear()
        lengths, starts = [600, 40, 130], [0] * len(many)
        logits = []
        for number, chunks in enumerate(steps):
            items = []
            for i in range(3):
                token = np.array([-1 - i], np.int32)
                items.append(ForwardItem(token, lengths[i], tables[i]))
                lengths[i] += 1
            for i, count in enumerate(chunks):
                ids = np.array(prompts[3 + i][starts[i] : starts[i] + count], np.int32)
                wanted = int((number + i) % 2)
                items.append(ForwardItem(ids, starts[i], tables[3 + i], wanted))
                starts[i] += count
            known = torch.tensor([number, 7, 9], device="cuda")
            logits.append(runner.forward(items, None, known).float().clone())
        found.append(torch.cat(logits))
    assert in_graphs == [3 + len(c) for c in steps if sum(c) <= MIXED[-1] - 3 and c is not many]
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("graphs", [False, True])
def test_tokens_that_only_the_gpu_knows(tmp_path: Path, graphs: bool) -> None:
    """They are those of the step before, in whatever rows of it, beside one that the host knows."""
    runner = make_runner(make_checkpoint("llama3", tmp_path), device="cuda", attention="triton")
    if graphs:
        with_graphs(runner)
    prompts = prompts_of([40, 17, 5])
    pages = np.random.default_rng(0).permutation(12).astype(np.int32).reshape(3, 4)
    for prompt, table in zip(prompts, pages, strict=True):
        runner.forward([ForwardItem(np.array(prompt, np.int32), 0, table)])

    def step(tokens: list[int], previous: torch.Tensor | None = None) -> torch.Tensor:
        rows = zip(tokens, prompts, pages, strict=True)
        items = [ForwardItem(np.array([t], np.int32), len(p), table) for t, p, table in rows]
        return runner.forward(items, None, previous).clone()

    known = step([7, 8, 9])
    previous = torch.tensor([1, 9, 2, 7, 3], device="cuda")
    assert torch.equal(step([-1 - 3, 8, -1 - 1], previous), known)
    assert not torch.equal(step([-1 - 3, 8, -1 - 2], previous), known)
