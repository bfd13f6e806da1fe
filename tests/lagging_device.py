"""A device that computes as late as a GPU may: when the host waits for a result, not before."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pd.engine.sampler import PreparedDraws
    from pd.launch import NodeServer


class _Later:
    """A value that is computed when it is asked for, after everything queued before it."""

    def __init__(self, queue: deque[_Later], compute: Callable[[], Any]) -> None:
        self._queue, self._compute = queue, compute
        self._value: Any = None
        queue.append(self)

    @property
    def is_over(self) -> bool:
        return self not in self._queue

    def get(self) -> Any:
        while self in self._queue:
            first = self._queue.popleft()
            first._value = first._compute()
        return self._value


class _LaterLogits:
    def __init__(self, later: _Later, rows: list[int], device: torch.device) -> None:
        self._later, self._rows, self.device = later, rows, device

    def __len__(self) -> int:
        return len(self._rows)

    def index_select(self, dim: int, index: torch.Tensor) -> _LaterLogits:
        assert dim == 0
        return _LaterLogits(self._later, [self._rows[i] for i in index.tolist()], self.device)

    def get(self) -> torch.Tensor:
        return self._later.get()[self._rows]


class _LaterSamples:
    def __init__(self, later: _Later) -> None:
        self._later = later

    @property
    def tokens(self) -> _LaterSamples:
        return self

    @property
    def is_ready(self) -> bool:
        return self._later.is_over

    def read_tokens(self) -> Any:
        return self._later.get().read_tokens()

    def get(self) -> torch.Tensor:
        return self._later.get().tokens


class LaggingDevice:
    """Makes a node's steps late.

    Arguments are read at launch, as by a GPU's kernels, but the pool is read and written late.

    Attributes:
        launched: number of steps so far.
        ahead: number of steps launched before the previous one was computed.
    """

    def __init__(self, server: NodeServer) -> None:
        engine = server.node.engine
        self._queue: deque[_Later] = deque()
        self._forward, self._sample = engine.runner.forward, engine.sampler.launch_draws
        self._device = engine.pool.device
        self.launched = self.ahead = 0
        engine.runner.forward = self._forward_later
        engine.sampler.launch_draws = self._sample_later

    def _forward_later(
        self, items: Any, on_layers_done: Any, previous: Any = None, outcome: Any = None
    ) -> Any:
        assert outcome is None, "no drafts"
        self.launched += 1
        self.ahead += bool(self._queue)
        items = [replace(item, pages=item.pages.copy()) for item in items]

        def compute() -> Any:
            tokens = None if previous is None else previous.get()
            return self._forward(items, on_layers_done, tokens)

        rows = list(range(sum(item.num_logits for item in items)))
        return _LaterLogits(_Later(self._queue, compute), rows, self._device)

    def _sample_later(self, logits: _LaterLogits, draw: PreparedDraws, masks: Any = None) -> Any:
        states = [each._replace(state=copy.copy(each.state)) for each in draw.draws]
        draw = replace(draw, draws=states)

        def compute() -> Any:
            return self._sample(logits.get(), _with_tokens(draw), masks)

        return _LaterSamples(_Later(self._queue, compute))


def _with_tokens(draw: PreparedDraws) -> PreparedDraws:
    """Return the draw with the tokens of the previous step, which is computed by now."""
    penalized = draw.penalized
    if penalized is None or penalized.previous is None:
        return draw
    previous: Any = penalized.previous
    return replace(draw, penalized=replace(penalized, previous=previous.get()))
