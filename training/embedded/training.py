"""The training loop of the embedded model and of the draft model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from embedded.feed import Plan
from embedded.model import Kernels, Qwen3, rms_norm
from embedded.optimizer import Optimizer
from embedded.turns import RESULT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from embedded.feed import Batch, Feed

# All lengths divide the tokens of a step, so that everything but attention has one shape.
TOKENS = 138_240
CHUNK = 16_384
LENGTHS = (288, 576, 1152, 2304, 4608)
_WARMUP, _DECAY = 0.01, 0.45
_LOG_EVERY = 100


class Phase(NamedTuple):
    """Up to ``until`` (a share of all steps), lengths are drawn with these shares."""

    until: float
    shares: tuple[float, ...]


# Recall emerges on short contexts, where many questions share few lines, and then stretches.
CURRICULUM = (
    Phase(0.20, (0.7, 0.3, 0.0, 0.0, 0.0)),
    Phase(0.45, (0.4, 0.2, 0.4, 0.0, 0.0)),
    Phase(0.70, (0.35, 0.05, 0.2, 0.4, 0.0)),
    Phase(1.00, (0.30, 0.05, 0.1, 0.2, 0.35)),
)
# Share of rows with lines to be recalled, by length.
_RECALL = {288: 0.45, 576: 0.7, 1152: 0.95, 2304: 1.0, 4608: 1.0}


@dataclass(frozen=True)
class Recipe:
    """Settings that decide a training run, except the generators of its data.

    Attributes:
        tokens: per step; a multiple of every length in use.
    """

    steps: int
    seed: int
    matrix_rate: float = 0.02
    other_rate: float = 0.004
    tokens: int = TOKENS
    curriculum: tuple[Phase, ...] = CURRICULUM

    def plans(self) -> list[Plan]:
        rng = np.random.default_rng((self.seed, 1))
        plans = []
        for step in range(self.steps):
            phase = next(p for p in self.curriculum if step < p.until * self.steps)
            length = int(rng.choice(LENGTHS, p=phase.shares))
            rows = max(1, self.tokens // length)
            plans.append(Plan(self.seed, step, rows, length, _RECALL[length]))
        return plans

    def rate(self, step: int) -> float:
        """Return the learning rate at ``step`` as a share of its peak: up, level, down to nearly
        0."""
        done = (step + 1) / self.steps
        return min(1.0, done / _WARMUP, (1 - done) / _DECAY + 0.01)


class Progress(NamedTuple):
    """``correct``: share of the tokens to be recalled or computed that were predicted.

    ``waited``: seconds since the start in which there was no batch yet.
    """

    step: int
    seconds: float
    waited: float
    length: int
    loss: float
    correct: float


def train(
    model: Qwen3,
    recipe: Recipe,
    feed: Feed,
    *,
    compiled: bool,
    log: Callable[[Progress], None],
) -> None:
    """Train ``model`` in place, on its device: in bfloat16 on a GPU, float32 on a CPU."""
    device = model.norm.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernels = Kernels.compiled() if compiled else Kernels()
    score = torch.compile(chunk_score, dynamic=False) if compiled else chunk_score
    optimizer = Optimizer(model, recipe.matrix_rate, recipe.other_rate)
    began = time.monotonic()
    plans = recipe.plans()
    batches = Stopwatch(feed(plans))
    for step, (plan, batch) in enumerate(zip(plans, batches, strict=True)):
        loss, correct = _score(model, to_device(batch, device), dtype, kernels, score)
        loss.backward()
        optimizer.step(recipe.rate(step), 0.85 + 0.10 * min(1.0, step / 300))
        if step % _LOG_EVERY == 0 or step == recipe.steps - 1:
            result = loss.item(), correct.item()
            seconds = time.monotonic() - began
            log(Progress(step, seconds, batches.seconds, plan.length, *result))


class Stopwatch:
    """Batches, and how long it took to get them."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        began = time.monotonic()
        try:
            return next(self._batches)
        finally:
            self.seconds += time.monotonic() - began


class DeviceBatch(NamedTuple):
    """A batch on the model's device; see :class:`embedded.feed.Batch`."""

    tokens: torch.Tensor
    places: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


def to_device(batch: Batch, device: torch.device) -> DeviceBatch:
    def move(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if device.type == "cuda":
            tensor = tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(dtype)

    return DeviceBatch(
        move(batch.tokens, torch.int64),
        move(batch.places, torch.int64),
        move(batch.targets, torch.int64),
        move(batch.weights, torch.float32),
    )


def _score(
    model: Qwen3,
    batch: DeviceBatch,
    dtype: torch.dtype,
    kernels: Kernels,
    score: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted mean loss, and the share of right results."""
    hidden = model.hidden(batch.tokens, dtype, kernels)
    chosen = hidden.index_select(0, batch.places)
    loss = right = torch.zeros((), device=hidden.device)
    for rows, targets, weights in zip(
        chosen.split(CHUNK), batch.targets.split(CHUNK), batch.weights.split(CHUNK), strict=True
    ):
        some_loss, some_right = score(rows, model.norm, model.embed_tokens, targets, weights)
        loss, right = loss + some_loss, right + some_right
    results = (batch.weights == RESULT).sum()
    return loss / batch.weights.sum(), right / results


def chunk_score(
    hidden: torch.Tensor,
    norm: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed weighted loss, and the number of right predictions."""
    normed = rms_norm(hidden, norm)
    logits = functional.linear(normed, head.to(hidden.dtype)).float()
    losses = functional.cross_entropy(logits, targets, reduction="none")
    right = (logits.argmax(dim=-1) == targets) & (weights == RESULT)
    return (losses * weights).sum(), right.sum()
