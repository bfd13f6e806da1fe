"""The least of an engine: continuous batching of greedy requests with random chunks and pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.core.node_info import KVLayout
from pd.engine.forward_item import ForwardItem
from pd.engine.kv_pool import KVPool
from pd.engine.model_runner import ModelRunner
from pd.kernels.attention import make_attention_backend
from pd.models.config_reader import read_model_config
from pd.models.latent_attention import find_latent_shape
from pd.models.loader import load_model

if TYPE_CHECKING:
    from pathlib import Path


def make_runner(
    path: Path,
    *,
    page_size: int = 16,
    num_tokens: int = 8192,
    dtype: str = "float32",
    device: str = "cpu",
    attention: str = "auto",
    last_alone: bool = False,
) -> ModelRunner:
    """Make a runner over the checkpoint at ``path`` with a pool of ``num_tokens`` slots.

    Args:
        last_alone: short steps, too, compute only the needed part of the last layer.
    """
    config = read_model_config(path)
    model = load_model(path, config, dtype=getattr(torch, dtype), device=device)
    layout = KVLayout((config.make_plane(dtype),), page_size)
    pool = KVPool(layout, num_tokens // page_size, device)
    latent = find_latent_shape(config)
    backend, last = (
        make_attention_backend(attention, pool, config.num_heads, latent, config.windows)
        for _ in range(2)
    )
    runner = ModelRunner(model, pool, backend, last)
    if last_alone:
        runner.last_alone_from = 0
    return runner


@dataclass
class Sequence:
    """``tokens``: prompt and output; the first ``computed`` have their KV in the pool."""

    tokens: list[int]
    pages: np.ndarray
    remaining: int
    computed: int = 0
    output: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


def generate(
    runner: ModelRunner, prompts: list[list[int]], max_new_tokens: int, *, max_chunk: int, seed: int
) -> list[Sequence]:
    """Generate greedy output of every prompt.

    Each step takes a random set of sequences: decode steps, and prompt chunks of random lengths up
    to ``max_chunk``, in random order. Pages are scattered over the pool.
    """
    random = np.random.default_rng(seed)
    size = runner.pool.page_size
    order = random.permutation(runner.pool.num_pages).astype(np.int32)
    sequences, used = [], 0
    for prompt in prompts:
        count = -(-(len(prompt) + max_new_tokens) // size)
        sequences.append(Sequence(list(prompt), order[used : used + count], max_new_tokens))
        used += count
    assert used <= len(order), "the pool is too small for the test"
    while active := [s for s in sequences if s.remaining]:
        chosen = [s for s in active if random.random() < 0.8] or active
        random.shuffle(chosen)
        step(runner, chosen, max_chunk, random)
    return sequences


def step(
    runner: ModelRunner, chosen: list[Sequence], max_chunk: int, random: np.random.Generator
) -> None:
    items = []
    for sequence in chosen:
        left = len(sequence.tokens) - sequence.computed
        length = min(left, int(random.integers(1, max_chunk + 1)))
        new = sequence.tokens[sequence.computed : sequence.computed + length]
        items.append(
            ForwardItem(
                np.array(new, np.int32), sequence.computed, sequence.pages, int(length == left)
            )
        )
    rows = iter(runner.forward(items))
    for sequence, item in zip(chosen, items, strict=True):
        sequence.computed += len(item.token_ids)
        if item.num_logits:
            logits = next(rows)
            sequence.logits.append(logits)
            sequence.output.append(int(logits.argmax()))
            sequence.tokens.append(sequence.output[-1])
            sequence.remaining -= 1
