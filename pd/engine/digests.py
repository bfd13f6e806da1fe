"""Digests of KV (``--kv-digest``), computed by their own thread."""

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
    """One thread that hashes pages of the pool in the order of the calls.

    It takes no lock of the node, and on a GPU it uses its own stream. So neither messages nor steps
    wait for it. The caller keeps the pages until :meth:`try_release` succeeds.

    Args:
        on_done: called from any thread when a digest is ready.
    """

    def __init__(self, pool: KVPool, on_done: Callable[[], None]) -> None:
        self._pool, self._on_done = pool, on_done
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pd-digest")
        self._stream: torch.cuda.Stream | None = None

    def start_digest(self, pages: IntArray, cached: Sequence[int], stop: int) -> Future[bytes]:
        """Hash tokens of the sequence with this page table; see :meth:`KVPool.compute_digest` for
        the arguments. Their KV is in the pool, or queued on the current stream."""
        device = self._pool.device
        written = None
        if device.type == "cuda":
            written = torch.cuda.current_stream(device).record_event()
        digest = self._thread.submit(self._compute_digest, pages.copy(), cached, stop, written)
        digest.add_done_callback(lambda _: self._on_done())
        return digest

    @staticmethod
    def try_release(digest: Future[bytes] | None) -> bool:
        """Cancel a digest that has not started. Returns whether the thread no longer reads its
        pages."""
        return digest is None or digest.cancel() or digest.done()

    @staticmethod
    def get_result(digest: Future[bytes]) -> bytes:
        """Return a finished digest. Raises TransferError if it failed."""
        error = digest.exception(timeout=0)
        if error is not None:
            raise TransferError(f"the digest of the KV could not be computed: {error}") from error
        return digest.result()

    def close(self) -> None:
        """Finish the current digest and start no other."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _compute_digest(
        self, pages: IntArray, cached: Sequence[int], stop: int, written: torch.cuda.Event | None
    ) -> bytes:
        if written is None:
            return self._pool.compute_digest(pages, cached, stop)
        device = self._pool.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._stream.wait_event(written)
            return self._pool.compute_digest(pages, cached, stop)
