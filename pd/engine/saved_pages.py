"""Copies of KV pages in host memory. Each rank keeps its part."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pd.engine.kv_pool import KVPool
    from pd.engine.tensor_parallel.leader import Leader

    IntArray = npt.NDArray[np.int32]


class SavedPages:
    """A copy of ``pages`` (int32 ``[n]`` or ``[tables, n]``), kept as long as this object
    lives."""

    def __init__(self, pool: KVPool, pages: IntArray, leader: Leader | None) -> None:
        self._pool, self._leader = pool, leader
        if leader is not None:
            self._key = leader.save_pages(pages)
            weakref.finalize(self, leader.forget_pages, self._key).atexit = False
        self._host = pool.gather_pages(pages)

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's copy."""
        return sum(host.nbytes for host in self._host)

    def restore_pages(self, pages: IntArray) -> None:
        """Write the last pages of the copy into ``pages``, see :meth:`KVPool.scatter_pages`."""
        if self._leader is not None:
            self._leader.restore_pages(self._key, pages)
        self._pool.scatter_pages(pages, self._host)
