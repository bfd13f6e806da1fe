"""EAGLE heads: one decoder layer that guesses the embedded model's next hidden states.

:class:`Eagle1` follows Li et al. (EAGLE, 2024), and :class:`Eagle3` follows Li et al. (EAGLE-3,
2025). Both are trained on their own guesses, as in EAGLE-3.

Slot ``t`` of a head joins the embedding of token ``t`` with the fused hidden state of token
``t - 1``, which is made of what the head reads of the embedded model there, and is zeros for the
first token. Its output stands for the hidden state of token ``t``: through an output matrix it
predicts token ``t + 1``. The next draft puts that output where the fused hidden state of token
``t`` belongs, and so on.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from embedded.model import (
    EAGLE,
    EAGLE3,
    Kernels,
    Qwen3,
    Shape,
    matrices,
    rms_norm,
    rotations,
    split_rows,
)
from embedded.optimizer import Optimizer
from embedded.training import DeviceBatch, Phase, Progress, Recipe, Stopwatch, to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from embedded.feed import Feed

# Drafts in a row that training unrolls, at first and at the end. Nothing normalizes the heads'
# residual streams, which grow from draft to draft.
DEPTH, DEEP = 3, 6
# The masks of unrolled drafts are as large as the square of the length.
CURRICULUM = (
    Phase(0.40, (0.6, 0.4, 0.0, 0.0, 0.0)),
    Phase(1.00, (0.4, 0.2, 0.4, 0.0, 0.0)),
)
# The last part takes small steps. It has longer rows, too, as the heads' queries and keys have no
# norms with which they would look as sharply into a longer context.
_DEEP_CURRICULUM = (Phase(1.00, (0.5, 0.1, 0.2, 0.2, 0.0)),)
_DEEP_RATE, _DEEP_OTHER_RATE = 0.004, 0.0008
# Layers of the embedded model before which EAGLE-3 reads the residual stream.
AUX_LAYERS = (1, 3, 5)
# Share of the loss of a draft relative to the draft before it.
_DISCOUNT = 0.8
# Weight of the distance between EAGLE-1's output and the hidden state that it stands for.
_REGRESSION = 0.5
# Batches in which tokens are counted.
_COUNTED_BATCHES = 64


class EagleHead(nn.Module):
    """The layer that both heads have. Embedding and, for EAGLE-1, output matrix are the model's.

    Args:
        width: of attention's input.
        parts: number of vectors that ``fc`` joins.

    Attributes:
        scales: by how much each part is multiplied before ``fc``, ``[parts]``. Training sets them
            so that all parts are about equally large; a file has them multiplied into ``fc``.
        tokens: int64 ``[shape.vocab]``, the id of each row of the output matrix in the model's
            vocabulary; None if both are equal.
    """

    tokens: torch.Tensor | None

    def __init__(self, shape: Shape, width: int, parts: int) -> None:
        super().__init__()
        self.shape = shape
        h, d = shape.hidden, shape.head_dim
        self.fc = matrices(1, h, parts * h)
        self.q_proj = matrices(1, shape.heads * d, width)
        self.k_proj = matrices(1, shape.kv_heads * d, width)
        self.v_proj = matrices(1, shape.kv_heads * d, width)
        self.o_proj = matrices(1, h, shape.heads * d, scale=0.3)
        self.gate_proj = matrices(1, shape.mlp, h)
        self.up_proj = matrices(1, shape.mlp, h)
        self.down_proj = matrices(1, h, shape.mlp, scale=0.3)
        self.post_attention_layernorm = nn.Parameter(torch.ones(h))
        self.register_buffer("scales", torch.ones(parts))
        self.register_buffer("tokens", None)

    @abstractmethod
    def read(self, model: Qwen3, streams: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Select what the head uses of the model's residual ``streams`` (see
        :meth:`embedded.model.Qwen3.hidden`), each ``[tokens, hidden]``."""

    @abstractmethod
    def fuse(self, features: list[torch.Tensor]) -> torch.Tensor:
        """Fuse the result of :meth:`read` into one hidden state."""

    @abstractmethod
    def enter(
        self, embedded: torch.Tensor, fused: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention's input and the residual stream."""

    @abstractmethod
    def predict(self, model: Qwen3, output: torch.Tensor) -> torch.Tensor:
        """Compute float32 logits ``[rows, shape.vocab]`` of rows of a draft's output."""

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Apply ``fc`` to the scaled, concatenated parts."""
        scaled = [
            part * scale.to(part.dtype) for part, scale in zip(parts, self.scales, strict=True)
        ]
        joined = torch.cat(scaled, dim=-1)
        return functional.linear(joined, self.fc[0].to(joined.dtype))

    def drafts(
        self,
        embedded: torch.Tensor,
        features: list[torch.Tensor],
        depth: int,
        kernels: Kernels,
        start: int = 0,
    ) -> list[torch.Tensor]:
        """Outputs of ``depth`` drafts in a row from every slot.

        Args:
            embedded: embeddings of the tokens, ``[batch, length, hidden]``.
            features: from :meth:`read`, of the same tokens, same shape.
            start: slots before this one are not wanted; what is returned for them is undefined.

        Returns:
            For each depth ``d`` from 0, ``[batch, length, hidden]``: at slot ``t`` what stands for
            the hidden state of token ``t`` if the model's own are known before ``t - d``.
        """
        batch, length, _ = embedded.shape
        positions = torch.arange(length, device=embedded.device)
        cos, sin = (t.repeat(batch, 1) for t in rotations(positions, self.shape.head_dim))
        # A draft works at a slot with what the one before it says about the slot before that.
        begin = max(0, start - depth)
        attend = _Unrolled(batch, positions, begin)
        known = self.fuse(features)
        outputs: list[torch.Tensor] = []
        for draft in range(depth):
            first = begin if draft else 0
            before = outputs[-1] if outputs else known
            fused = torch.cat((torch.zeros_like(known[:, :1]), before[:, :-1]), dim=1)
            x, residual = self.enter(embedded[:, first:], fused[:, first:])
            angles = (t.view(batch, length, -1)[:, first:].flatten(0, 1) for t in (cos, sin))
            qkv = kernels.project(
                x.flatten(0, 1), *angles, self.q_proj[0], self.k_proj[0], self.v_proj[0]
            )
            out = kernels.after(
                residual.flatten(0, 1),
                attend(*qkv).flatten(0, 1).flatten(1),
                self.o_proj[0],
                self.post_attention_layernorm,
                self.gate_proj[0],
                self.up_proj[0],
                self.down_proj[0],
            )
            out = out.view(batch, length - first, -1)
            outputs.append(torch.cat((before[:, :first], out), dim=1) if first else out)
        return outputs


class Eagle1(EagleHead):
    """Reads the last hidden state after the model's norm; ``fc`` joins it with the embedding. The
    output goes to the model's output matrix as it is."""

    def __init__(self, shape: Shape = EAGLE) -> None:
        super().__init__(shape, shape.hidden, 2)

    def read(self, model: Qwen3, streams: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [rms_norm(streams[-1], model.norm)]

    def fuse(self, features: list[torch.Tensor]) -> torch.Tensor:
        (hidden,) = features
        return hidden

    def enter(
        self, embedded: torch.Tensor, fused: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.join((embedded, fused))
        return x, x

    def predict(self, model: Qwen3, output: torch.Tensor) -> torch.Tensor:
        return functional.linear(output, model.embed_tokens.to(output.dtype)).float()


class Eagle3(EagleHead):
    """Reads the residual stream before several layers, which ``fc`` fuses; attention reads that and
    the embedding side by side, each normalized."""

    def __init__(self, shape: Shape = EAGLE3, layers: tuple[int, ...] = AUX_LAYERS) -> None:
        super().__init__(shape, 2 * shape.hidden, len(layers))
        self.layers = layers
        h = shape.hidden
        self.input_layernorm = nn.Parameter(torch.ones(h))
        self.hidden_norm = nn.Parameter(torch.ones(h))
        self.norm = nn.Parameter(torch.ones(h))
        self.lm_head = nn.Parameter(torch.zeros(shape.vocab, h))

    def start_from(self, model: Qwen3, tokens: torch.Tensor) -> None:
        """Begin with the model's norm and its rows of the output matrix for ``tokens``, int64
        ``[shape.vocab]``."""
        self.tokens = tokens
        with torch.no_grad():
            self.lm_head.copy_(model.embed_tokens[tokens])
            self.norm.copy_(model.norm)

    def read(self, model: Qwen3, streams: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [streams[layer] for layer in self.layers]

    def fuse(self, features: list[torch.Tensor]) -> torch.Tensor:
        return self.join(features)

    def enter(
        self, embedded: torch.Tensor, fused: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = rms_norm(embedded, self.input_layernorm), rms_norm(fused, self.hidden_norm)
        return torch.cat(normed, dim=-1), fused

    def predict(self, model: Qwen3, output: torch.Tensor) -> torch.Tensor:
        matrix = self.lm_head.to(output.dtype)
        return functional.linear(rms_norm(output, self.norm), matrix).float()


def deep_recipe(steps: int, seed: int, tokens: int) -> Recipe:
    """Return the settings of the last part of training, with :data:`DEEP` drafts in a row."""
    return Recipe(steps, seed, _DEEP_RATE, _DEEP_OTHER_RATE, tokens, _DEEP_CURRICULUM)


class _Unrolled:
    """Attention of draft ``d``: to the slots before the last ``d`` as they are with the model's own
    hidden states, then to one slot of every earlier draft, then to itself. Drafts but the first
    have only the slots from ``begin`` on."""

    def __init__(self, batch: int, positions: torch.Tensor, begin: int) -> None:
        self._batch, self._begin = batch, begin
        self._distance = positions[:, None] - positions
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (split_rows(x, self._batch) for x in (q, k, v))
        self._keys.append(k)
        self._values.append(v)
        depth = len(self._keys) - 1
        # The mask takes part in no derivative, and kernels with masks know no grouped queries.
        distance = self._distance[self._begin if depth else 0 :]
        seen = [distance >= depth]
        seen += [distance[:, self._begin :] == depth - draft for draft in range(1, depth + 1)]
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
    """Inputs of a head, and what it is to predict.

    Attributes:
        embedded, features: as of :meth:`EagleHead.drafts`.
        rows: int64, slots ``t`` in the flattened batch whose predictions count.
        hidden: the model's last hidden states of tokens ``t``, after its norm.
        logits: the model's guess of token ``t + 1``.
    """

    embedded: torch.Tensor
    features: list[torch.Tensor]
    rows: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor


def frequent_tokens(feed: Feed, recipe: Recipe, count: int, vocab: int) -> torch.Tensor:
    """Return ids, ascending, of the ``count`` most frequent targets in the first batches of a
    training run; int64."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for batch in feed(recipe.plans()[:_COUNTED_BATCHES]):
        targets = torch.from_numpy(batch.targets[batch.weights > 0]).long()
        counts += torch.bincount(targets, minlength=vocab)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def train(
    head: EagleHead,
    model: Qwen3,
    recipe: Recipe,
    feed: Feed,
    *,
    compiled: bool,
    log: Callable[[Progress], None],
    depth: int = DEPTH,
) -> None:
    """Train the head to draft the answers of ``model``, which is not changed.

    Args:
        depth: drafts in a row. Training that goes on with a head, and not with :data:`DEPTH`, keeps
            its scales.
    """
    device = model.norm.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernels = Kernels.compiled() if compiled else Kernels()
    model.requires_grad_(False)
    optimizer = Optimizer(head, recipe.matrix_rate, recipe.other_rate)
    began = time.monotonic()
    plans = recipe.plans()
    batches = Stopwatch(feed(plans))
    for step, (plan, batch) in enumerate(zip(plans, batches, strict=True)):
        sample = _sample(head, model, to_device(batch, device), dtype, kernels, depth)
        if step == 0 and depth == DEPTH:
            _set_scales(head, sample)
        outputs = head.drafts(sample.embedded, sample.features, depth, kernels)
        loss = torch.zeros((), device=device)
        correct = []
        for draft, output in enumerate(outputs):
            some, right = _loss(head, model, output, sample)
            loss = loss + some * _DISCOUNT**draft
            correct.append(right)
        loss.backward()
        optimizer.step(recipe.rate(step))
        if step % 100 == 0 or step == recipe.steps - 1:
            result = loss.item(), correct[-1].item()
            seconds = time.monotonic() - began
            log(Progress(step, seconds, batches.seconds, plan.length, *result))


@torch.no_grad()
def _sample(
    head: EagleHead,
    model: Qwen3,
    batch: DeviceBatch,
    dtype: torch.dtype,
    kernels: Kernels,
    depth: int,
) -> _Sample:
    rows, length = batch.tokens.shape
    streams: list[torch.Tensor] = []
    model.hidden(batch.tokens, dtype, kernels, streams)
    places = batch.places[(batch.weights > 0) & (batch.places % length > depth)]
    last = streams[-1].index_select(0, places)
    embedded = functional.embedding(batch.tokens, model.embed_tokens).to(dtype)
    features = [feature.view(rows, length, -1) for feature in head.read(model, streams)]
    return _Sample(embedded, features, places, rms_norm(last, model.norm), model.logits(last))


@torch.no_grad()
def _set_scales(head: EagleHead, sample: _Sample) -> None:
    """Scale the parts that ``fc`` joins so that all have a root mean square of 1."""
    parts = sample.features if isinstance(head, Eagle3) else [sample.embedded, *sample.features]
    sizes = [part.float().square().mean().sqrt() for part in parts]
    head.scales.copy_(1 / torch.stack(sizes))


def _loss(
    head: EagleHead, model: Qwen3, output: torch.Tensor, sample: _Sample
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of one draft, and how often its best token is the model's.

    The loss is the cross-entropy with the model's own distribution, over the head's tokens and
    where the model's best token is one of them; for EAGLE-1, also the distance to the hidden state
    that the output stands for (smooth L1, as its authors' loss).
    """
    chosen = output.flatten(0, 1).index_select(0, sample.rows)
    logits = head.predict(model, chosen)
    best = sample.logits.argmax(dim=-1)
    if head.tokens is None:
        loss = functional.cross_entropy(logits, sample.logits.softmax(dim=-1))
        loss = loss + _REGRESSION * functional.smooth_l1_loss(chosen.float(), sample.hidden.float())
        return loss, (logits.argmax(-1) == best).float().mean()
    theirs = sample.logits.index_select(1, head.tokens).softmax(dim=-1)
    losses = functional.cross_entropy(logits, theirs, reduction="none")
    known = torch.isin(best, head.tokens).float()
    right = head.tokens[logits.argmax(-1)] == best
    return (losses * known).sum() / known.sum(), right.float().mean()
