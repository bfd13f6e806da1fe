"""Small sums directly through the memory of the other ranks' GPUs (:mod:`all_reduce_triton`)."""

from __future__ import annotations

import importlib.util
import logging
import time
from typing import TYPE_CHECKING

import torch

from pd.core.errors import SetupError, TransferError
from pd.kernels.cuda_ipc import HANDLE_BYTES, CudaIpc

if TYPE_CHECKING:
    from pd.models.tensor_parallel import TensorParallel

logger = logging.getLogger(__name__)

# Up to this size, divided by the number of ranks, one hop is faster than NCCL's ring
# (benchmarks/all_reduce.py).
_MAX_BYTES = 2 << 20
_STEP_BYTES = 64 << 10  # whole blocks of the kernel, whatever the dtype
_OFFSET_BYTES = 8
# The timeout is long, because another rank may have to compile the kernel first.
_CHECK_SECONDS = 60.0


def choose_max_bytes(ranks: int) -> int:
    """Return the largest size to sum here. It shrinks with more ranks, because each sends its
    numbers to every other rank."""
    return _MAX_BYTES // ranks // _STEP_BYTES * _STEP_BYTES


class PeerMemory:
    """The mailboxes of all ranks, mapped into this process.

    Args:
        tp: the ranks, for exchanging handles.
        device: this rank's GPU.

    Raises:
        SetupError: the memory of some rank cannot be exported.
        TransferError: a mailbox cannot be mapped here. Other ranks may succeed.
    """

    def __init__(self, tp: TensorParallel, device: torch.device) -> None:
        from pd.kernels import all_reduce_triton

        self._kernel = all_reduce_triton
        self._rank, self._size = tp.rank, tp.size
        self._device = device
        self._dtype: torch.dtype | None = None
        self._ipc = CudaIpc(device.index)
        # Words of 4 bytes for numbers of 2, of 8 for numbers of 4.
        self._max_bytes = choose_max_bytes(tp.size)
        size = 4 * all_reduce_triton.count_mailbox_words(tp.size, self._max_bytes // 2)
        self._mailbox = torch.zeros(size, dtype=torch.uint8, device=device)
        blocks = -(-self._max_bytes // 2 // all_reduce_triton.BLOCK)
        self._epochs = torch.zeros(blocks, dtype=torch.int32, device=device)
        self._stop = torch.zeros(1, dtype=torch.int32, device=device)
        self._aside = torch.cuda.Stream(device)
        self._mapped: list[int] = []
        try:
            handle, offset = self._ipc.export_memory(self._mailbox.data_ptr())
            mine = handle + offset.to_bytes(_OFFSET_BYTES, "little")
        except SetupError as error:
            logger.debug("this rank has no mailbox: %s", error)
            mine = bytes(HANDLE_BYTES + _OFFSET_BYTES)  # the other ranks wait for a message
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
        handles = [bytes(row) for row in tp.all_gather(sent[None]).view(tp.size, -1).tolist()]
        if not all(any(handle) for handle in handles):
            raise SetupError("a rank's memory cannot be exported; expandable segments must be off")
        self._addresses = torch.tensor(
            self._map_mailboxes(handles), dtype=torch.int64, device=device
        )

    def _map_mailboxes(self, handles: list[bytes]) -> list[int]:
        addresses = []
        for rank, handle in enumerate(handles):
            if rank == self._rank:
                addresses.append(self._mailbox.data_ptr())
                continue
            base = self._ipc.map_memory(handle[:HANDLE_BYTES])
            self._mapped.append(base)
            addresses.append(base + int.from_bytes(handle[HANDLE_BYTES:], "little"))
        return addresses

    def check_sums(self) -> bool:
        """Whether sums complete and are right. On some hosts GPUs can map each other's memory, but
        their writes never arrive. All ranks call this at the same time and synchronize before the
        next sum."""
        numbers = torch.arange(5000, device=self._device) % 10
        mine = ((self._rank + 1) * numbers).to(torch.bfloat16)
        sums = [self.all_reduce(mine) for _ in range(3)]
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        deadline = time.monotonic() + _CHECK_SECONDS
        while not done.query():
            if time.monotonic() > deadline:
                self.stop()
                return False
            time.sleep(0.001)
        # All words have arrived. We clear them, because the next words may have another size.
        self._mailbox.zero_()
        expected = self._size * (self._size + 1) // 2 * numbers
        return all(torch.equal(total, expected.to(torch.bfloat16)) for total in sums)

    def can_sum(self, x: torch.Tensor) -> bool:
        """Whether :meth:`all_reduce` can sum ``x``. The answer is the same on all ranks."""
        if self._dtype is None and x.dtype in (torch.float32, torch.bfloat16, torch.float16):
            self._dtype = x.dtype  # words of another size would look like flags
        return x.dtype == self._dtype and 0 < x.nbytes <= self._max_bytes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks in new memory."""
        out = torch.empty_like(x)
        capacity = self._max_bytes // x.element_size()
        self._kernel.all_reduce(
            x, out, self._addresses, self._epochs, self._stop, capacity, self._rank
        )
        return out

    def stop(self) -> None:
        """Stop waiting for other ranks. Sums under way are wrong."""
        with torch.cuda.stream(self._aside):
            self._stop.fill_(1)

    def close(self) -> None:
        """Unmap the other ranks' memory. No sum may be launched or under way."""
        for address in self._mapped:
            self._ipc.unmap_memory(address)
        self._mapped.clear()


def connect_peers(tp: TensorParallel, device: torch.device) -> PeerMemory | None:
    """Map the ranks' memory into each other. Returns None if that fails for any of them."""
    if importlib.util.find_spec("triton") is None:
        return None
    peers: PeerMemory | None = None
    try:
        peers = PeerMemory(tp, device)
    except (SetupError, TransferError) as error:
        logger.warning("the ranks' memory cannot be shared: %s", error)
    if _holds_on_all(tp, peers is not None, device):
        assert peers is not None
        if _holds_on_all(tp, peers.check_sums(), device):
            return peers
    if tp.rank == 0:
        logger.warning("sums over the ranks go through NCCL alone, which is slower")
    if peers is not None:
        peers.close()
    return None


def _holds_on_all(tp: TensorParallel, here: bool, device: torch.device) -> bool:
    """Whether something is true on all ranks."""
    flag = torch.tensor([[here]], dtype=torch.uint8, device=device)
    return bool(tp.all_gather(flag).all())
