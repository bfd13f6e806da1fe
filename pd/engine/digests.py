"""Digests of KV (``--kv-digest``), computed by a thread of their own."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from pd.core.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from pd.engine.kv_pool import KVPool

    IntArray = npt.NDArray[np.int32]


class Digests:
    """One thread that hashes pages of the pool, in the order asked for.

    It takes no lock of the node, and on a GPU it works on a stream of its own, so neither messages
    nor steps wait for it. The caller keeps the pages until :meth:`over`.

    Args:
        done: called, by any thread, when an answer is there.
    """

    def __init__(self, pool: KVPool, done: Callable[[], None]) -> None:
        self._pool, self._done = pool, done
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pd-digest")
        self._stream: torch.cuda.Stream | None = None

    def start(self, pages: IntArray, cached: Sequence[int], stop: int) -> Future[bytes]:
        """Hash tokens of a sequence with this page table; see :meth:`KVPool.digest` for the
        arguments. Their KV is in the pool, or queued on the current stream."""
        device = self._pool.device
        written = None
        if device.type == "cuda":
            written = torch.cuda.current_stream(device).record_event()
        digest = self._thread.submit(self._compute, pages.copy(), cached, stop, written)
        digest.add_done_callback(lambda _: self._done())
        return digest

    @staticmethod
    def over(digest: Future[bytes] | None) -> bool:
        """Whether nothing is read for it (any more); what has not begun never will."""
        return digest is None or digest.cancel() or digest.done()

    @staticmethod
    def result(digest: Future[bytes]) -> bytes:
        """The answer, which is there. Raises TransferError if it could not be computed."""
        error = digest.exception(timeout=0)
        if error is not None:
            raise TransferError(f"the digest of the KV could not be computed: {error}") from error
        return digest.result()

    def close(self) -> None:
        """Finish the present one and start no other."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _compute(
        self, pages: IntArray, cached: Sequence[int], stop: int, written: torch.cuda.Event | None
    ) -> bytes:
        if written is None:
            return self._pool.digest(pages, cached, stop)
        device = self._pool.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._stream.wait_event(written)
            return self._pool.digest(pages, cached, stop)
