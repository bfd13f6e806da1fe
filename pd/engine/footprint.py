"""Measures how much of a GPU's memory is not available to the KV cache."""

from __future__ import annotations

import gc
import logging
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pd.engine.cuda_graphs import GraphRecorder
from pd.engine.eagle import EagleWriter
from pd.engine.kv_pool import KVPool
from pd.engine.model_runner import ForwardItem, ModelRunner
from pd.engine.step_graphs import MIXED_SIZES, capture_drafting, capture_steps
from pd.kernels.paging import page_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pd.core.config import NodeConfig
    from pd.core.node_info import KVLayout
    from pd.engine.step_graphs import CapturedSteps
    from pd.kernels.attention import AttentionBackend
    from pd.models.causal_lm import CausalLM
    from pd.models.eagle import EagleHead

logger = logging.getLogger(__name__)


class Footprint(NamedTuple):
    """Bytes beside weights and KV cache: ``step`` of the largest prefill step while it runs,
    ``lasting`` of graphs and work space for as long as the node lives. Graphs of chunks are not
    tried: they take little."""

    step: int = 0
    lasting: int = 0


class MemoryBeside(NamedTuple):
    """Bytes to leave on a device for what a node makes there after its KV cache: ``page`` for each
    page of the cache, and ``lasting`` of graphs and work space."""

    page: int = 0
    lasting: int = 0


NOTHING_BESIDE = MemoryBeside()


def footprint(
    model: CausalLM,
    layout: KVLayout,
    attention: type[AttentionBackend],
    config: NodeConfig,
    graph_sizes: Sequence[int],
    max_context: int,
    head: EagleHead | None = None,
) -> Footprint:
    """Run the largest step and capture the largest graph over a small pool.

    On a GPU this also compiles kernels, for which the first requests would otherwise wait. On a CPU
    nothing is run.

    Args:
        graph_sizes: batch sizes of the CUDA graphs to come. Those of one kind share the memory of
            the largest.
        max_context: tokens of a sequence.
        head: an EAGLE head beside the model.
    """
    device = model.embedding.device
    if device.type != "cuda":
        return Footprint()
    tokens = min(config.chunked_prefill_size, max_context)
    pages = np.arange(page_count(tokens, layout.page_size), dtype=np.int32)
    pool = KVPool(layout, len(pages), device)
    before = torch.cuda.memory_allocated(device)
    eagle = None if head is None else EagleWriter.of(head, model, pool, config)
    runner = ModelRunner.build(model, pool, attention, prompts=config.computes_prompts, eagle=eagle)
    lasting = torch.cuda.memory_allocated(device) - before
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.forward([ForwardItem(np.zeros(tokens, np.int32), 0, pages)])
    torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_allocated(device) - before
    step += runner.attention.scratch_bytes
    torch.cuda.empty_cache()
    if graph_sizes:
        capture = partial(capture_steps, config=config, sizes=graph_sizes, max_context=max_context)
        lasting += _graph_bytes(runner, capture)
    del runner, pool
    gc.collect()  # attention backends refer to themselves
    torch.cuda.empty_cache()
    return Footprint(step, lasting)


def lasting_of_drafting(
    model: CausalLM,
    layout: KVLayout,
    attention: type[AttentionBackend],
    config: NodeConfig,
    graph_sizes: Sequence[int],
    max_context: int,
) -> int:
    """Measure what graphs and work space of a draft model will take as long as the node lives, in
    bytes; 0 on a CPU. Its largest pass is taken to need no more than the node's largest step,
    beside which it does not run.

    Args:
        graph_sizes, max_context: as of :func:`footprint`.
    """
    device = model.embedding.device
    if device.type != "cuda":
        return 0
    tokens = min(MIXED_SIZES[-1], max_context)
    pages = np.arange(page_count(tokens, layout.page_size), dtype=np.int32)
    pool = KVPool(layout, len(pages), device)
    before = torch.cuda.memory_allocated(device)
    runner = ModelRunner.build(model, pool, attention, prompts=False)
    lasting = torch.cuda.memory_allocated(device) - before
    # NOTE: this loads kernels, which stay and would count as memory of the graphs.
    runner.forward([ForwardItem(np.zeros(tokens, np.int32), 0, pages)])
    torch.cuda.synchronize(device)
    if graph_sizes:
        capture = partial(
            capture_drafting, config=config, sizes=graph_sizes, max_context=max_context
        )
        lasting += _graph_bytes(runner, capture)
    del runner, pool
    gc.collect()  # attention backends refer to themselves
    torch.cuda.empty_cache()
    return lasting


def _graph_bytes(runner: ModelRunner, capture: Callable[..., CapturedSteps | None]) -> int:
    """Capture the smallest and the largest graphs of each kind and drop them; returns the bytes
    that they took. ``capture`` takes the other arguments of :func:`capture_steps`."""
    device = runner.pool.device
    # NOTE: a capture frees what is garbage, which must not count as taken before.
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    captured = capture(runner, GraphRecorder(device), only_extremes=True, progress=False)
    taken = max(0, free - torch.cuda.mem_get_info(device)[0])
    del captured
    return taken


def report(
    model: CausalLM,
    pool: KVPool,
    step: int,
    graphs: int,
    captured: Mapping[str, Sequence[int]],
) -> None:
    """Log the use of a GPU's memory; on a CPU, do nothing.

    Args:
        step: bytes of the largest prefill step while it runs.
        graphs: bytes that torch allocated for CUDA graphs.
        captured: their sizes, by what they compute.
    """
    device = pool.device
    if device.type != "cuda":
        return
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    free, total = torch.cuda.mem_get_info(device)
    ladders = [
        f"{len(sizes)} {what} sizes up to {max(sizes)}" for what, sizes in captured.items() if sizes
    ]
    cache = pool.memory.nbytes
    other = total - free - weights - cache - graphs
    rows = (
        ("weights", weights, ""),
        ("KV cache", cache, ""),
        ("CUDA graphs", graphs, ", ".join(ladders) or "none"),
        ("other", other, "work space, CUDA and its kernels, other processes"),
        ("free now", free, f"of {total / 2**30:.1f} GiB"),
        ("largest prefill step", step, "of what is free, while it runs"),
    )
    for name, size, note in rows:
        logger.info("  %-22s %8.2f GiB  %s", name, size / 2**30, note)
