"""Short chunks as CUDA graphs: short prompts, and the few new tokens of prompts that are cached.

Such a step takes a few milliseconds on a GPU, less than the host needs to launch its kernels one by
one.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.engine.cuda_graphs import GraphRecorder
    from pd.engine.model_runner import ForwardItem
    from pd.kernels.attention import AttentionBackend, ChunkAttention
    from pd.models.causal_lm import CausalLM

# Tokens of the chunks that are captured. Longer ones gain little: the GPU is busy for almost as
# long as the host takes to launch them, and behind long prefixes attention is slower in a graph.
SIZES = (16, 32, 64, 128, 192, 256)


@dataclass(frozen=True)
class _CapturedChunk:
    """One captured size. ``inputs`` is int64 ``[2 * tokens + 1]``: token ids, positions, and the
    row whose logits are wanted. ``logits`` ``[1, vocab_size]`` holds the result of the last
    replay."""

    attention: ChunkAttention
    inputs: torch.Tensor
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class ChunkGraphs:
    """Runs steps of one short chunk of one sequence.

    Args:
        recorder: shared by all graphs of the process.
        max_context: tokens of a sequence.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        recorder: GraphRecorder,
        *,
        max_context: int,
    ) -> None:
        self._model = model
        self._graphs: dict[int, _CapturedChunk] = {}
        device = model.embedding.device
        memory = torch.zeros(2 * SIZES[-1] + 1, dtype=torch.int64, device=device)
        for tokens in reversed(SIZES):
            attention = backend.chunk_graph(tokens, max_context)
            if attention is None:
                return
            inputs = memory[: 2 * tokens + 1]
            compute = functools.partial(self._compute, tokens, inputs, attention)
            self._graphs[tokens] = _CapturedChunk(attention, inputs, *recorder.record(compute))

    def _compute(
        self, tokens: int, inputs: torch.Tensor, attention: ChunkAttention
    ) -> torch.Tensor:
        ids, positions, row = inputs.split((tokens, tokens, 1))
        return self._model.logits(self._model(ids, positions, attention, rows=row))

    @property
    def sizes(self) -> list[int]:
        """Tokens of the chunks that are captured."""
        return sorted(self._graphs)

    def fits(self, items: Sequence[ForwardItem]) -> bool:
        """Whether this is one short chunk of which at most the last token's logits are wanted."""
        if not self._graphs or len(items) != 1:
            return False
        return len(items[0].token_ids) <= SIZES[-1] and items[0].num_logits <= 1

    def run(self, item: ForwardItem) -> torch.Tensor:
        """See :meth:`pd.engine.model_runner.ModelRunner.forward`; the chunk's token ids are known.
        The logits are overwritten by the next run."""
        count = len(item.token_ids)
        tokens = SIZES[bisect_left(SIZES, count)]
        graph = self._graphs[tokens]
        host = torch.zeros(2 * tokens + 1, dtype=torch.int64, pin_memory=True)
        inputs = host.numpy()
        inputs[:count] = item.token_ids
        inputs[tokens : tokens + count] = np.arange(item.start, item.start + count)
        inputs[-1] = count - 1
        graph.inputs.copy_(host, non_blocking=True)
        graph.attention.plan(item.start, count, item.pages)
        graph.graph.replay()
        return graph.logits[: item.num_logits]
