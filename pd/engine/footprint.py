"""Measures how much of a GPU's memory the KV cache cannot have."""

from __future__ import annotations

import gc
import logging
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pd.engine.cuda_graphs import GraphRecorder
from pd.engine.eagle import EagleWriter
from pd.engine.forward_item import ForwardItem
from pd.engine.kv_pool import KVPool
from pd.engine.model_runner import ModelRunner
from pd.engine.step_graphs import MIXED_SIZES, capture_drafting, capture_steps
from pd.kernels.paging import count_needed_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pd.core.config import NodeConfig
    from pd.core.node_info import KVLayout
    from pd.engine.step_graphs import CapturedSteps
    from pd.kernels.attention import AttentionBackend
    from pd.models.causal_lm import CausalLM
    from pd.models.draft_head import DraftHead

logger = logging.getLogger(__name__)


class Footprint(NamedTuple):
    """Memory in addition to weights and KV cache. We do not measure graphs of chunks, because they
    take little.

    Attributes:
        step_bytes: needed by the largest prefill step while it runs.
        lasting_bytes: graphs and work space, needed as long as the node lives.
    """

    step_bytes: int = 0
    lasting_bytes: int = 0


class ExtraMemory(NamedTuple):
    """Memory to leave free for things that a node creates after its KV cache.

    Attributes:
        page_bytes: for each page of the cache.
        lasting_bytes: graphs and work space.
    """

    page_bytes: int = 0
    lasting_bytes: int = 0


NO_EXTRA_MEMORY = ExtraMemory()


def measure_footprint(
    model: CausalLM,
    layout: KVLayout,
    attention: type[AttentionBackend],
    config: NodeConfig,
    graph_sizes: Sequence[int],
    max_context: int,
    head: DraftHead | None = None,
) -> Footprint:
    """Run the largest step and capture the largest graph over a small pool.

    On a GPU this also compiles kernels, so that the first requests need not wait for them. On a CPU
    nothing runs.

    Args:
        graph_sizes: batch sizes of the CUDA graphs to capture later. Graphs of one kind share the
            memory of the largest.
        max_context: longest sequence in tokens.
        head: draft head of the model, if any.
    """
    device = model.embedding.device
    if device.type != "cuda":
        return Footprint()
    tokens = min(config.chunked_prefill_size, max_context)
    pages = np.arange(count_needed_pages(tokens, layout.page_size), dtype=np.int32)
    pool = KVPool(layout, len(pages), device)
    before = torch.cuda.memory_allocated(device)
    eagle = None if head is None else EagleWriter.build_for_pool(head, model, pool, config)
    runner = ModelRunner.build(model, pool, attention, prompts=config.computes_prompts, eagle=eagle)
    lasting = torch.cuda.memory_allocated(device) - before
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.forward([ForwardItem(np.zeros(tokens, np.int32), 0, pool.repeat_table(pages))])
    torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_allocated(device) - before
    step += runner.attention.scratch_bytes
    torch.cuda.empty_cache()
    if graph_sizes:
        capture = partial(capture_steps, config=config, sizes=graph_sizes, max_context=max_context)
        lasting += _measure_graphs(runner, capture)
    del runner, pool
    gc.collect()  # attention backends refer to themselves
    torch.cuda.empty_cache()
    return Footprint(step, lasting)


def measure_draft_memory(
    model: CausalLM,
    layout: KVLayout,
    attention: type[AttentionBackend],
    config: NodeConfig,
    graph_sizes: Sequence[int],
    max_context: int,
) -> int:
    """Measure the memory that the graphs and work space of a draft model take as long as the node
    lives, in bytes; 0 on a CPU.

    We assume that its largest pass needs no more than the node's largest step, because the two
    never run at the same time.

    Args:
        graph_sizes, max_context: see :func:`measure_footprint`.
    """
    device = model.embedding.device
    if device.type != "cuda":
        return 0
    tokens = min(MIXED_SIZES[-1], max_context)
    pages = np.arange(count_needed_pages(tokens, layout.page_size), dtype=np.int32)
    pool = KVPool(layout, len(pages), device)
    before = torch.cuda.memory_allocated(device)
    runner = ModelRunner.build(model, pool, attention, prompts=False)
    lasting = torch.cuda.memory_allocated(device) - before
    # NOTE: this loads kernels first. They stay loaded and would otherwise count as memory of the
    # graphs.
    runner.forward([ForwardItem(np.zeros(tokens, np.int32), 0, pool.repeat_table(pages))])
    torch.cuda.synchronize(device)
    if graph_sizes:
        capture = partial(
            capture_drafting, config=config, sizes=graph_sizes, max_context=max_context
        )
        lasting += _measure_graphs(runner, capture)
    del runner, pool
    gc.collect()  # attention backends refer to themselves
    torch.cuda.empty_cache()
    return lasting


def _measure_graphs(runner: ModelRunner, capture: Callable[..., CapturedSteps | None]) -> int:
    """Capture the smallest and the largest graph of each kind and drop them again. Returns the
    bytes that they took. ``capture`` accepts the other arguments of :func:`capture_steps`."""
    device = runner.pool.device
    # NOTE: a capture frees garbage. We do so before, or the freed memory would hide some of the
    # graphs'.
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    captured = capture(runner, GraphRecorder(device), only_extremes=True, progress=False)
    taken = max(0, free - torch.cuda.mem_get_info(device)[0])
    del captured
    return taken


def log_memory_use(
    model: CausalLM,
    pool: KVPool,
    step: int,
    graphs: int,
    captured: Mapping[str, Sequence[int]],
) -> None:
    """Log how a GPU's memory is used; do nothing on a CPU.

    Args:
        step: bytes that the largest prefill step needs while it runs.
        graphs: bytes that torch allocated for CUDA graphs.
        captured: sizes of the graphs, by kind.
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
