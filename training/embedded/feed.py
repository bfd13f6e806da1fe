"""Training batches made ahead of their use by processes of their own."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from embedded.batches import BatchMaker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from embedded.ragged import Ints

_AHEAD = 4
_maker: BatchMaker | None = None


class Plan(NamedTuple):
    """One batch to be made; ``recall`` is the share of rows with lines to be recalled."""

    seed: int
    step: int
    rows: int
    length: int
    recall: float


class Batch(NamedTuple):
    """Tokens of all rows, and what is to be predicted.

    Attributes:
        tokens: int16 ``[rows, length]``.
        places: int64 ``[m]``, where in the flattened tokens a prediction is made; ``m`` is a
            multiple of the chunk.
        targets: int16 ``[m]``, the tokens that follow.
        weights: uint8 ``[m]``, 0 for filling.
    """

    tokens: Ints
    places: Ints
    targets: Ints
    weights: Ints


class Feed:
    """Yields the batches of the plans in order."""

    def __init__(self, tokenizer: Tokenizer, chunk: int, workers: int | None = None) -> None:
        """Start the processes.

        Args:
            chunk: fill predictions up to a multiple of it, so that shapes repeat.
        """
        self._chunk = chunk
        self._workers = workers or max(1, (os.cpu_count() or 2) - 2)
        # Not forked: a fork of a process with threads may hang.
        self._pool = ProcessPoolExecutor(
            self._workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_prepare,
            initargs=(tokenizer.to_str(),),
        )

    def __call__(self, plans: list[Plan]) -> Iterator[Batch]:
        waiting: deque[Future[Batch]] = deque()
        for plan in plans:
            waiting.append(self._pool.submit(_make, plan, self._chunk))
            if len(waiting) > _AHEAD * self._workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _prepare(tokenizer: str) -> None:
    global _maker
    _maker = BatchMaker(Tokenizer.from_str(tokenizer))


def _make(plan: Plan, chunk: int) -> Batch:
    assert _maker is not None, "the pool's initializer made it"
    tokens, weights = _maker.make(*plan)
    return to_batch(tokens, weights, chunk)


def to_batch(tokens: Ints, weights: Ints, chunk: int) -> Batch:
    """Find the predictions: a token is predicted at the place before it, never across rows."""
    weights = weights.copy()
    weights[:, 0] = 0
    found = np.flatnonzero(weights)
    filling = np.zeros(-len(found) % chunk, np.int64)
    targets = np.concatenate((tokens.ravel()[found], filling.astype(tokens.dtype)))
    chosen = np.concatenate((weights.ravel()[found], filling.astype(weights.dtype)))
    return Batch(tokens, np.concatenate((found - 1, filling)), targets, chosen)
