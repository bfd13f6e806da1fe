"""One forward pass over chunks of sequences, and the sampling after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pd.core.messages import TokenLogprobs
from pd.engine.model_runner import ForwardItem, ModelRunner

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from pd.core.request import Sequence
    from pd.engine.sampler import SampledToken, Sampler, SamplingState


@dataclass(eq=False, slots=True)
class Work:
    """Tokens ``[start, stop)`` of one sequence, to be computed in one step.

    Attributes:
        samples: who draws a token from the last position; empty for a chunk that does not end
            what is known of the sequence.
        logprobs_from: prompt log probabilities are wanted of tokens from this position on.
        sampled: result, one per entry of ``samples``.
        prompt_logprobs: result, of tokens ``max(start + 1, logprobs_from) .. stop`` of the prompt.
    """

    sequence: Sequence
    start: int
    stop: int
    samples: list[SamplingState] = field(default_factory=list)
    logprobs_from: int | None = None
    sampled: list[SampledToken] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_logits(self) -> int:
        """Positions at the end of the range whose logits are needed."""
        if self.logprobs_from is not None:
            return min(self.stop - self.start, self.stop - max(self.logprobs_from - 1, 0))
        return 1 if self.samples else 0


def execute(
    runner: ModelRunner,
    sampler: Sampler,
    works: Seq[Work],
    on_layers_done: Callable[[int, int], None] | None = None,
) -> None:
    """Compute all works in one forward pass and fill in their results."""
    items = [
        ForwardItem(
            work.sequence.tokens[work.start : work.stop],
            work.start,
            work.sequence.pages,
            max(work.num_logits, 0),
        )
        for work in works
    ]
    logits = runner.forward(items, on_layers_done)
    rows: list[int] = []
    states: list[SamplingState] = []
    offset = 0
    for work, item in zip(works, items, strict=True):
        if work.logprobs_from is not None:
            work.prompt_logprobs = _prompt_logprobs(sampler, work, logits, offset, item.num_logits)
        offset += item.num_logits
        rows += [offset - 1] * len(work.samples)
        states += work.samples
    if not states:
        return
    chosen = logits if rows == list(range(len(logits))) else logits[torch.tensor(rows)]
    sampled = iter(sampler.sample(chosen, states))
    for work in works:
        work.sampled = [next(sampled) for _ in work.samples]


def _prompt_logprobs(
    sampler: Sampler, work: Work, logits: torch.Tensor, offset: int, count: int
) -> list[TokenLogprobs]:
    """Row r of ``logits[offset:]`` predicts the token after position ``stop - count + r``."""
    prompt = work.sequence.request.prompt
    first = work.stop - count + 1
    targets = prompt[first : work.stop + 1]
    found: list[TokenLogprobs] = []
    if work.logprobs_from == 0 and work.start == 0:
        found.append(TokenLogprobs(int(prompt[0]), None))
    if len(targets):
        top = work.sequence.request.params.top_logprobs
        rows = logits[offset : offset + len(targets)]
        found += sampler.prompt_logprobs(rows, targets, top)
    return found
