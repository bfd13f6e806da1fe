"""KV over NIXL (UCX), through staging buffers.

:mod:`pd.transfer.staged.manager` gives the guarantees. This library adds to them:

- Each link has its own agent on both sides. So only one peer knows a buffer's registration and
  remote key, and a stuck link cannot hold up another. The key travels over the authenticated
  channel.
- A write is over when UCX has flushed it, so its bytes are in D's buffer. A write to a killed peer
  ends with an error within 50 ms. If its path is down, it ends when the path returns or UCX fails
  it.
- We destroy D's end before freeing its buffers. Over ``UCX_TLS=tcp`` only D's own calls write into
  buffers, so bytes left in a socket by a dead P land nowhere.
- UCX authenticates and encrypts nothing, and every connection to one of its ports can write any
  memory of the process. Between processes of one host it opens no port. Otherwise you have to trust
  the network, and we keep UCX to the advertised device (:mod:`pd.transfer.staged.nixl_transports`).

Completion: we tell D of a filled buffer over the channel, not by NIXL's notification of a write.
NIXL has no call to wait for a notification, so D would have to poll while rooms are open, or both
ends would have to run NIXL's progress thread. Either takes D 9 % to 107 % of a core without work,
and the thread costs 27 % of the rate (``nixl_completion``). Without the thread a notification
leaves P only when P polls the write's state, and at that moment P can send the note itself. The
channel's note wakes D from a blocked ``select``.

Progress: both agents run without NIXL's thread. P polls while writes are in flight. D need not do
anything over shared memory. If a write is not over at once, as over ``tcp``, P says so and D drives
its agent until P says that nothing waits any more.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from pd.core.errors import SetupError
from pd.transfer.allocator import expandable_segments
from pd.transfer.staged.manager import StagedManager
from pd.transfer.staged.mover import Mover, MoverError, Path, Target
from pd.transfer.staged.nixl_agents import (
    NixlPath,
    NixlTarget,
    check_library,
    describe_error,
    new_agent,
)
from pd.transfer.staged.nixl_transports import Transports, choose_transports
from pd.transfer.wire.greeting import require_loopback

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pd.transfer.kv_buffer import KVBuffer
    from pd.util.starvation import Patience

logger = logging.getLogger(__name__)

# The best of 2 to 8 buffers of 1 to 8 MiB (`pd-bench transfer`, two cores, host memory). Smaller
# ones cost more Python, and larger or more ones do not stay in the cache. We have not measured a
# GPU at one end only.
HOST_BUFFERS, HOST_BUFFER_BYTES = 4, 4 << 20
# Between two H200s a buffer costs P 0.3 ms of Python, whatever its size, and the link needs 0.45 ms
# for 128 MiB. Smaller or fewer buffers leave the link idle. Larger ones would be a little faster,
# but a small block takes a whole buffer too, and the same memory would hold few of them.
CUDA_BUFFERS, CUDA_BUFFER_BYTES = 6, 128 << 20


def _can_share_device_memory() -> bool:
    """Whether UCX may open a peer's CUDA memory, because its transport is allowed and torch
    allocates memory with a handle. Otherwise buffers in host memory are faster than UCX's detour.
    """
    transports = os.environ.get("UCX_TLS", "all")
    allowed = any(name in transports for name in ("all", "cuda", "^"))
    return allowed and not expandable_segments()


class NixlMover(Mover):
    """NIXL as a mover.

    Args:
        instance_id: names this node's agents.
        address: name or address by which peers reach this node.
        local_only: refuse to start where UCX would open a port.

    Raises:
        SetupError: the library is missing, UCX needs a port and may not have one, or it would open
            its ports on every device.
    """

    name = "nixl"

    def __init__(self, instance_id: str, address: str, *, local_only: bool = False) -> None:
        check_library()
        self.transports = choose_transports(address, local_only=local_only)
        if not self.transports.is_local:
            _warn_of_ports(self.transports, local_only=local_only)
        self.device_buffers = _can_share_device_memory()
        self._instance = instance_id
        # UCX reads its environment and probes devices for the first agent, so we start one at a
        # time.
        self._starting = threading.Lock()
        self._prepared = False

    def prepare(self) -> None:
        """Have UCX load its modules and probe devices. This takes 0.4 s for the first agent of a
        process, and 10 to 30 ms for a later one."""
        with self._starting:
            if self._prepared:
                return
            try:
                new_agent(self._instance, self.transports)
            except Exception as error:
                raise MoverError(f"NIXL cannot start UCX: {describe_error(error)}") from error
            self._prepared = True

    def make_target(self, buffers: torch.Tensor, peer: str, origin: str) -> Target:
        with self._starting:
            return NixlTarget(self._instance, buffers, self.transports)

    def make_path(
        self, buffers: torch.Tensor, description: bytes, peer: str, wake: Callable[[], None]
    ) -> Path:
        with self._starting:
            return NixlPath(self._instance, buffers, description, self.transports)


def _warn_of_ports(transports: Transports, *, local_only: bool) -> None:
    """Warn of UCX's ports. Raises SetupError if they may not be opened."""
    if local_only:
        raise SetupError(
            f"{transports.obstacle}, and UCX's ports are unauthenticated; set --trust-network if "
            f"only this deployment's hosts can reach them"
        )
    logger.warning(
        "%s: UCX listens on unauthenticated ports, on %s, %s. Everyone who reaches them can write "
        "to any memory of this process: let only this deployment's nodes reach them "
        "(docs/transfer-backends.md)",
        transports.obstacle,
        f"device {transports.devices}",
        f"ports {os.environ.get('UCX_TCP_PORT_RANGE', 'that the kernel picks')}",
    )


class NixlManager(StagedManager):
    """Staged manager over NIXL. It takes the arguments of
    :class:`pd.transfer.staged.manager.StagedManager`, and:

    Args:
        local_only: as for :class:`NixlMover`.

    Raises:
        UsageError: there is no cluster key, and the address is not a loopback one.
        SetupError: as for :class:`NixlMover`.
    """

    def __init__(
        self,
        pool: KVBuffer,
        instance_id: str,
        host: str = "127.0.0.1",
        *,
        advertise_host: str = "",
        cluster_key: bytes | None = None,
        local_only: bool = False,
        buffers: int | None = None,
        buffer_bytes: int | None = None,
        patience: Patience | None = None,
    ) -> None:
        if cluster_key is None:
            # Check this before the mover looks for the device of an unusable address.
            require_loopback(host, "the data address")
        mover = NixlMover(instance_id, advertise_host or host, local_only=local_only)
        on_device = mover.device_buffers and pool.memory.device.type == "cuda"
        shape = (
            (CUDA_BUFFERS, CUDA_BUFFER_BYTES) if on_device else (HOST_BUFFERS, HOST_BUFFER_BYTES)
        )
        self._reach = mover.transports.reach
        super().__init__(
            pool,
            instance_id,
            host,
            mover=mover,
            buffers=buffers or shape[0],
            buffer_bytes=buffer_bytes or shape[1],
            advertise_host=advertise_host,
            cluster_key=cluster_key,
            patience=patience,
        )

    def address(self) -> dict[str, str]:
        return {**super().address(), "reach": self._reach}
