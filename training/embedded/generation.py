"""Greedy generation for many prompts at once, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from embedded.model import Causal, Kernels, Qwen3, rotations

if TYPE_CHECKING:
    from collections.abc import Iterator


@torch.inference_mode()
def generate(
    model: Qwen3,
    prompts: list[list[int]],
    stop: int,
    *,
    dtype: torch.dtype,
    limit: int = 96,
    batch_tokens: int = 400_000,
) -> list[list[int]]:
    """The greedy answer to every prompt, up to and including the token ``stop``.

    Args:
        dtype: of the computation.
        limit: of tokens in an answer.
        batch_tokens: prompts are taken together while their tokens do not exceed it.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    for group in _groups([len(p) for p in prompts], batch_tokens):
        found = _generate([prompts[i] for i in group], model, stop, dtype, limit)
        for index, answer in zip(group, found, strict=True):
            answers[index] = answer
    return answers


def _groups(lengths: list[int], batch_tokens: int) -> Iterator[list[int]]:
    """Group the indices of prompts of similar length."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    group: list[int] = []
    for index in order:
        if group and (len(group) + 1) * lengths[index] > batch_tokens:
            yield group
            group = []
        group.append(index)
    yield group


def _generate(
    prompts: list[list[int]], model: Qwen3, stop: int, dtype: torch.dtype, limit: int
) -> list[list[int]]:
    device = model.norm.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True)
    ids = ids.to(device)
    # Padding comes after the prompts, where causal attention does not see it.
    batch, width = ids.shape
    causal = Causal(batch, keep=True)
    cos, sin = (
        t.repeat(batch, 1)
        for t in rotations(torch.arange(width, device=device), model.shape.head_dim)
    )
    x = functional.embedding(ids.flatten(), model.embed_tokens).to(dtype)
    hidden = model.blocks(x, cos, sin, causal, Kernels()).view(batch, width, -1)
    last = hidden[torch.arange(batch, device=device), lengths - 1]
    tokens = model.logits(last).argmax(dim=-1)
    # Room for the answers behind the prompts.
    cache = [tuple(functional.pad(t, (0, 0, 0, limit)) for t in pair) for pair in causal.cache]
    found = [tokens]
    done = tokens == stop
    for position in range(limit - 1):
        if done.all():
            break
        step = _Step(cache, lengths + position)
        cos, sin = rotations(step.positions, model.shape.head_dim)
        x = functional.embedding(tokens, model.embed_tokens).to(dtype)
        tokens = model.logits(model.blocks(x, cos, sin, step, Kernels())).argmax(dim=-1)
        found.append(tokens)
        done |= tokens == stop
    return [_until(row, stop) for row in torch.stack(found, dim=1).tolist()]


def _until(tokens: list[int], stop: int) -> list[int]:
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


@dataclass
class _Step:
    """Attention of one new token per row over its row of the cache."""

    cache: list[tuple[torch.Tensor, ...]]
    positions: torch.Tensor

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        keys, values = self.cache[layer]
        row = torch.arange(len(q), device=q.device)
        keys[row, :, self.positions] = k
        values[row, :, self.positions] = v
        seen = torch.arange(keys.shape[2], device=q.device) <= self.positions[:, None]
        out = functional.scaled_dot_product_attention(
            q[:, :, None], keys, values, attn_mask=seen[:, None, None], enable_gqa=True
        )
        return out[:, :, 0]
