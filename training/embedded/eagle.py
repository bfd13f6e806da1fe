"""The EAGLE-style head: one decoder layer that guesses the embedded model's next hidden states.

After Li et al. (EAGLE, 2024) and, for training on its own guesses, Li et al. (EAGLE-3, 2025).
Slot ``t`` of the head joins the hidden state ``h[t]`` of the embedded model (before its last norm)
with the embedding of token ``t + 1``, at position ``t``. Its output stands for ``h[t + 1]``:
through the head's own norm and the embedded model's output matrix it predicts token ``t + 2``.
A second draft puts that output where ``h[t + 1]`` belongs, and so on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from embedded.model import EAGLE, Blocks, Kernels, Qwen3, Shape, rms_norm, rotations, split_rows
from embedded.optimizer import Optimizer
from embedded.training import DeviceBatch, Phase, Progress, Recipe, Stopwatch, to_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from embedded.feed import Feed

# Drafts in a row that training unrolls.
DEPTH = 3
# The masks of unrolled drafts are as large as the square of the length.
CURRICULUM = (
    Phase(0.40, (0.6, 0.4, 0.0, 0.0, 0.0)),
    Phase(1.00, (0.4, 0.2, 0.4, 0.0, 0.0)),
)


class Eagle(nn.Module):
    """Weights of the head alone; embedding and output matrix are those of the model it is for."""

    def __init__(self, shape: Shape = EAGLE) -> None:
        super().__init__()
        self.shape = shape
        h = shape.hidden
        self.fc = nn.Parameter(torch.randn(1, h, 2 * h) * (2 * h) ** -0.5)
        self.hidden_norm = nn.Parameter(torch.ones(h))
        self.embed_norm = nn.Parameter(torch.ones(h))
        self.blocks = Blocks(shape)
        self.norm = nn.Parameter(torch.ones(h))

    def drafts(
        self, embedded: torch.Tensor, hidden: torch.Tensor, depth: int, kernels: Kernels
    ) -> list[torch.Tensor]:
        """Outputs of ``depth`` drafts in a row from every slot.

        Args:
            embedded: embeddings of tokens 1 and on, ``[batch, length, hidden]``.
            hidden: the model's hidden states of tokens 0 and on, same shape.

        Returns:
            For each depth ``d`` from 0, ``[batch, length, hidden]``: at slot ``t`` what stands for
            ``h[t + 1]`` if the model's own hidden states are known up to ``t - d``.
        """
        batch, length, _ = hidden.shape
        positions = torch.arange(length, device=hidden.device)
        cos, sin = (t.repeat(batch, 1) for t in rotations(positions, self.shape.head_dim))
        attend = _Unrolled(batch, positions)
        outputs = []
        for _ in range(depth):
            joined = torch.cat(
                (rms_norm(embedded, self.embed_norm), rms_norm(hidden, self.hidden_norm)), dim=-1
            )
            x = functional.linear(joined, self.fc[0].to(joined.dtype)).flatten(0, 1)
            out = self.blocks(x, cos, sin, attend, kernels).view(batch, length, -1)
            outputs.append(out)
            # What this draft says about t + 1 is what the next one works with there.
            hidden = torch.cat((hidden[:, :1], out[:, :-1]), dim=1)
        return outputs


class _Unrolled:
    """Attention of draft ``d``: to the slots before the last ``d`` as they are with the model's own
    hidden states, then to one slot of every earlier draft, then to itself."""

    def __init__(self, batch: int, positions: torch.Tensor) -> None:
        self._batch = batch
        self._distance = positions[:, None] - positions
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        assert layer == 0, "the head has one layer"
        q, k, v = (split_rows(x, self._batch) for x in (q, k, v))
        self._keys.append(k)
        self._values.append(v)
        depth = len(self._keys) - 1
        # The mask takes part in no derivative, and kernels with masks know no grouped queries.
        seen = [self._distance >= depth]
        seen += [self._distance == depth - draft for draft in range(1, depth + 1)]
        groups = q.shape[1] // k.shape[1]
        keys, values = (
            torch.cat(parts, dim=2).repeat_interleave(groups, dim=1)
            for parts in (self._keys, self._values)
        )
        out = functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=torch.cat(seen, dim=1)
        )
        return out.transpose(1, 2)


class _Sample(NamedTuple):
    """Inputs and what is to be predicted from slot ``t``: the model's guess of token ``t + 2``."""

    embedded: torch.Tensor
    hidden: torch.Tensor
    rows: torch.Tensor
    logits: torch.Tensor


def train(
    head: Eagle,
    model: Qwen3,
    recipe: Recipe,
    feed: Feed,
    *,
    compiled: bool,
    log: Callable[[Progress], None],
) -> None:
    """Train the head to draft the answers of ``model``, which is not changed."""
    device = model.norm.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernels = Kernels.compiled() if compiled else Kernels()
    model.requires_grad_(False)
    optimizer = Optimizer(head, recipe.matrix_rate, recipe.other_rate)
    began = time.monotonic()
    plans = recipe.plans()
    batches = Stopwatch(feed(plans))
    for step, (plan, batch) in enumerate(zip(plans, batches, strict=True)):
        sample = _sample(model, to_device(batch, device), dtype, kernels)
        outputs = head.drafts(sample.embedded, sample.hidden, DEPTH, kernels)
        loss = torch.zeros((), device=device)
        correct = []
        for depth, output in enumerate(outputs):
            some, right = _loss(head, model, output, sample)
            loss = loss + some * 0.8**depth
            correct.append(right)
        loss.backward()
        optimizer.step(recipe.rate(step))
        if step % 100 == 0 or step == recipe.steps - 1:
            result = loss.item(), correct[-1].item()
            seconds = time.monotonic() - began
            log(Progress(step, seconds, batches.seconds, plan.length, *result))


@torch.no_grad()
def _sample(model: Qwen3, batch: DeviceBatch, dtype: torch.dtype, kernels: Kernels) -> _Sample:
    rows, length = batch.tokens.shape
    hidden = model.hidden(batch.tokens, dtype, kernels)
    # Place p predicts token p + 1, which slot p - 1 drafts.
    places = batch.places[(batch.weights > 0) & (batch.places % length > DEPTH)]
    logits = model.logits(hidden.index_select(0, places))
    embedded = functional.embedding(batch.tokens, model.embed_tokens).to(dtype)
    embedded = torch.cat((embedded[:, 1:], embedded[:, :1]), dim=1)
    return _Sample(embedded, hidden.view(rows, length, -1), places - 1, logits)


def _loss(
    head: Eagle, model: Qwen3, output: torch.Tensor, sample: _Sample
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy with the model's own distribution, and how often the best tokens agree."""
    logits = predict(head, model, output.flatten(0, 1).index_select(0, sample.rows))
    loss = functional.cross_entropy(logits, sample.logits.softmax(dim=-1))
    return loss, (logits.argmax(-1) == sample.logits.argmax(-1)).float().mean()


def predict(head: Eagle, model: Qwen3, output: torch.Tensor) -> torch.Tensor:
    """Logits of rows of a draft's output, ``[rows, hidden]``."""
    matrix = model.embed_tokens.to(output.dtype)
    return functional.linear(rms_norm(output, head.norm), matrix).float()
