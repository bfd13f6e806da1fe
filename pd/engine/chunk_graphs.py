"""CUDA graphs for short chunks: short prompts, and the few new tokens of cached prompts.

Such a step takes a GPU a few milliseconds. The host needs longer to launch its kernels one by one,
so we capture them.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.engine.forward_item import find_reread_rows
from pd.engine.model_runner import hide_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.engine.cuda_graphs import GraphRecorder
    from pd.engine.forward_item import ForwardItem
    from pd.engine.model_runner import ModelRunner
    from pd.kernels.attention import ChunkAttention

# Captured chunk sizes in tokens. Longer chunks gain little, because the GPU is busy for almost as
# long as the host needs for the launches. After a long prefix, attention is even slower in a graph.
SIZES = (16, 32, 64, 128, 192, 256)


@dataclass(frozen=True)
class _CapturedChunk:
    """One captured size.

    Attributes:
        inputs: int64 ``[2 * tokens + 1]``: token ids, positions, and the row whose logits are
            wanted. With an EAGLE head ``[3 * tokens + 1]``: the place of the state before each
            token comes first.
        logits: ``[1, vocab_size]``, overwritten by each replay.
    """

    attention: ChunkAttention
    inputs: torch.Tensor
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class ChunkGraphs:
    """Runs steps made of one short chunk of one sequence.

    Args:
        runner: nobody else may use it during the capture.
        recorder: shared by all graphs of the process.
        max_context: longest sequence in tokens.
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
            attention = runner.attention.make_chunk_graph(tokens, max_context)
            if attention is None:
                return
            inputs = memory[: self._fields * tokens + 1]
            compute = functools.partial(self._compute_chunk, tokens, inputs, attention)
            self._graphs[tokens] = _CapturedChunk(
                attention, inputs, *recorder.capture_graph(compute)
            )

    def _compute_chunk(
        self, tokens: int, inputs: torch.Tensor, attention: ChunkAttention
    ) -> torch.Tensor:
        *before, ids, positions, row = inputs.split((*[tokens] * self._fields, 1))
        features = self._model.allocate_features(tokens)
        hidden = self._model(ids, positions, attention, rows=row, features=features)
        if self._eagle is not None and features is not None:
            self._eagle.write_kv(ids, positions, attention.slots, features, before[0])
            self._fused[:tokens].copy_(self._eagle.fused)
        return self._model.compute_logits(hidden)

    @property
    def sizes(self) -> list[int]:
        """Captured chunk sizes in tokens."""
        return sorted(self._graphs)

    def can_run(self, items: Sequence[ForwardItem]) -> bool:
        """Whether the step is one short chunk and needs no logits except those of its last
        token."""
        if not self._graphs or len(items) != 1 or items[0].has_branches:
            return False
        return len(items[0].token_ids) <= SIZES[-1] and items[0].num_logits <= 1

    def run(self, item: ForwardItem) -> torch.Tensor:
        """Do :meth:`pd.engine.model_runner.ModelRunner.forward` for a chunk whose token ids the
        host knows. The next run overwrites the logits."""
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
            before[0][:count] = self._eagle.find_places_before([item])
        graph.inputs.copy_(host, non_blocking=True)
        graph.attention.plan(item.start, count, item.pages)
        reread = find_reread_rows([item], self._device)
        if reread is not None:
            hide_tokens(graph.attention, reread)
        graph.graph.replay()
        if self._eagle is not None:
            self._eagle.fused = self._fused[:tokens]
        return graph.logits[: item.num_logits]
