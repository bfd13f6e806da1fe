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

from pd.engine.model_runner import hide_tokens, reread_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.engine.cuda_graphs import GraphRecorder
    from pd.engine.model_runner import ForwardItem, ModelRunner
    from pd.kernels.attention import ChunkAttention

# Tokens of the chunks that are captured. Longer ones gain little: the GPU is busy for almost as
# long as the host takes to launch them, and behind long prefixes attention is slower in a graph.
SIZES = (16, 32, 64, 128, 192, 256)


@dataclass(frozen=True)
class _CapturedChunk:
    """One captured size. ``inputs`` is int64 ``[2 * tokens + 1]``: token ids, positions, and the
    row whose logits are wanted; with an EAGLE head ``[3 * tokens + 1]``, and first where the state
    of the token before each token lies. ``logits`` ``[1, vocab_size]`` holds the result of the last
    replay."""

    attention: ChunkAttention
    inputs: torch.Tensor
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class ChunkGraphs:
    """Runs steps of one short chunk of one sequence.

    Args:
        runner: not used by others meanwhile.
        recorder: shared by all graphs of the process.
        max_context: tokens of a sequence.
    """

    def __init__(self, runner: ModelRunner, recorder: GraphRecorder, *, max_context: int) -> None:
        self._model, self._eagle = runner.model, runner.eagle
        self._fields = 2 if runner.eagle is None else 3
        self._graphs: dict[int, _CapturedChunk] = {}
        self._device = device = runner.model.embedding.device
        memory = torch.zeros(self._fields * SIZES[-1] + 1, dtype=torch.int64, device=device)
        if runner.eagle is not None:
            self._fused = runner.eagle.carried.new_zeros(SIZES[-1], runner.eagle.carried.shape[1])
        for tokens in reversed(SIZES):
            attention = runner.attention.chunk_graph(tokens, max_context)
            if attention is None:
                return
            inputs = memory[: self._fields * tokens + 1]
            compute = functools.partial(self._compute, tokens, inputs, attention)
            self._graphs[tokens] = _CapturedChunk(attention, inputs, *recorder.record(compute))

    def _compute(
        self, tokens: int, inputs: torch.Tensor, attention: ChunkAttention
    ) -> torch.Tensor:
        *before, ids, positions, row = inputs.split((*[tokens] * self._fields, 1))
        features = self._model.new_features(tokens)
        hidden = self._model(ids, positions, attention, rows=row, features=features)
        if self._eagle is not None and features is not None:
            self._eagle.write(ids, positions, attention.slots, features, before[0])
            self._fused[:tokens].copy_(self._eagle.fused)
        return self._model.logits(hidden)

    @property
    def sizes(self) -> list[int]:
        """Tokens of the chunks that are captured."""
        return sorted(self._graphs)

    def fits(self, items: Sequence[ForwardItem]) -> bool:
        """Whether this is one short chunk of which at most the last token's logits are wanted."""
        if not self._graphs or len(items) != 1 or items[0].branches:
            return False
        return len(items[0].token_ids) <= SIZES[-1] and items[0].num_logits <= 1

    def run(self, item: ForwardItem) -> torch.Tensor:
        """See :meth:`pd.engine.model_runner.ModelRunner.forward`; the chunk's token ids are known.
        The logits are overwritten by the next run."""
        count = len(item.token_ids)
        tokens = SIZES[bisect_left(SIZES, count)]
        graph = self._graphs[tokens]
        host = torch.zeros(self._fields * tokens + 1, dtype=torch.int64, pin_memory=True)
        inputs = host.numpy()
        *before, ids, positions = inputs[:-1].reshape(self._fields, tokens)
        ids[:count] = item.token_ids
        positions[:count] = np.arange(item.start, item.start + count)
        inputs[-1] = count - 1
        if self._eagle is not None:
            before[0][:count] = self._eagle.places_before([item])
        graph.inputs.copy_(host, non_blocking=True)
        graph.attention.plan(item.start, count, item.pages)
        reread = reread_rows([item], self._device)
        if reread is not None:
            hide_tokens(graph.attention, reread)
        graph.graph.replay()
        if self._eagle is not None:
            self._eagle.fused = self._fused[:tokens]
        return graph.logits[: item.num_logits]
