"""KV over NIXL (UCX), through staging slots.

:mod:`pd.transfer.staged.manager` says what that guarantees.

What this library adds to it:

- Each link has an agent of its own on both sides, so a slot's registration and remote key are known
  to one peer, and a link that hangs cannot hold up another. The key travels over the authenticated
  channel.
- A write is over when UCX has flushed it: its bytes are in D's slot. A write to a killed peer ends
  with an error within 50 ms; one whose path is down ends when the path returns or UCX gives up.
- D's end is destroyed before its slots are freed, and over ``UCX_TLS=tcp`` only D's own calls write
  into slots, so bytes that a dead P left in a socket land nowhere.
- UCX authenticates and encrypts nothing, and whoever reaches a port of its writes any memory of the
  process. Between processes of one host it opens none; otherwise the network has to be trusted, and
  UCX is kept to the advertised device (:mod:`pd.transfer.staged.nixl_transports`).

Completion: D is told of a filled slot over the channel, not by NIXL's notification of a write.
NIXL has no call that waits for a notification, so D would have to poll while rooms are open, or
both ends to run NIXL's progress thread; either takes D 9 % to 107 % of a core with nothing to do,
and the thread a quarter of the rate (``nixl_completion``). Without that thread a notification
leaves P only when P polls the write's state, that is, when it could send the note itself. The
channel's note wakes D from a blocked ``select``.

Progress: both agents run without NIXL's thread. P polls while writes are in flight. D need not do
anything over shared memory; when a write is not over at once, as over ``tcp``, P says so and D
drives its agent until P says that nothing waits any more.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from pd.core.errors import SetupError
from pd.transfer.staged.manager import StagedManager
from pd.transfer.staged.mover import Mover, MoverError, Target, Written
from pd.transfer.staged.mover import Path as MoverPath
from pd.transfer.staged.nixl_transports import Transports, choose_transports

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from pd.core.starvation import Patience
    from pd.transfer.base import KVBuffer

logger = logging.getLogger(__name__)

# The best of 2 to 8 slots of 1 to 8 MiB (`pd-bench transfer`, two cores, host memory): smaller
# ones cost more Python, larger or more of them do not stay in the cache. With a GPU at one end
# only: not measured.
HOST_SLOTS, HOST_SLOT_BYTES = 4, 4 << 20
# Between two H200s a slot costs P 0.3 ms of Python, whatever its size; the link needs 0.45 ms for
# 128 MiB. In GB/s: 6 slots of 64 MiB 164, 4 of 128 215, 6 of 128 236, 3 of 256 260; but a
# small block takes a whole slot too, and three would be few.
CUDA_SLOTS, CUDA_SLOT_BYTES = 6, 128 << 20

# A write is rounded up to one of these parts of a slot, each of which is prepared once.
_SIZES_PER_DOUBLING = 8
_DOUBLINGS = 4
_DOWN = "the peer is gone"


class _Description(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    """D's slots: the agent's metadata, the first slot's address, and in which memory it is."""

    metadata: bytes
    address: int
    memory: str
    device: int


_description_decoder = msgspec.msgpack.Decoder(_Description)


def _api() -> Any:
    """NIXL's Python module. What it and UCX would write when a peer dies, our own log says."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    if not _has_rdma():
        # Of no use here, and dangerous: its module loads Debian's libibverbs beside the wheel's
        # own, and their two libnl-route crash the process when it ends.
        os.environ.setdefault("UCX_MODULES", "^ib")
    raises = logging.raiseExceptions
    try:
        from nixl import _api
    except ImportError as error:
        raise SetupError(
            f"transfer backend nixl needs the package nixl (pip install nixl): {error}"
        ) from error
    # It takes standard output for its log, which belongs to the ready line, and hides errors of
    # everybody's logging.
    theirs = logging.getLogger("nixl")
    theirs.handlers.clear()
    theirs.propagate = True
    logging.raiseExceptions = raises
    return _api


def _has_rdma() -> bool:
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def _can_share_device_memory() -> bool:
    """Whether UCX may open a peer's CUDA memory: its transport is allowed, and torch allocates
    memory that has a handle. Otherwise slots in host memory are faster than UCX's detour."""
    transports = os.environ.get("UCX_TLS", "all")
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    settings = "".join(os.environ.get(name, "") for name in names).lower()
    allowed = any(name in transports for name in ("all", "cuda", "^"))
    return allowed and "expandable_segments:true" not in settings.replace(" ", "")


def check_library() -> None:
    """Raise SetupError if NIXL cannot be used."""
    _api()


def write_sizes(slot_bytes: int) -> list[int]:
    """Sizes of writes in ascending order, the last of which is the whole slot."""
    sizes = {slot_bytes}
    for doubling in range(_DOUBLINGS):
        half = slot_bytes >> (doubling + 1)
        sizes.update(half + half * n // _SIZES_PER_DOUBLING for n in range(_SIZES_PER_DOUBLING))
    return sorted(size for size in sizes if size)


def new_agent(name: str, transports: Transports) -> Any:
    """An agent of NIXL with these transports and no thread. Raises what NIXL raises."""
    api = _api()
    # NOTE: two agents of one name would take each other for the same.
    unique = f"{name}/{secrets.token_hex(4)}"
    agent = api.nixl_agent(unique, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    settings = {
        # UCX's transports that open no port do not go with its error handling.
        "ucx_error_handling_mode": "none" if transports.local else "peer",
        "engine_config": transports.settings,
    }
    agent.create_backend("UCX", settings)
    return agent


class _Agent:
    """One NIXL agent and one piece of registered memory."""

    def __init__(self, name: str, slots: torch.Tensor, transports: Transports) -> None:
        self.memory = "VRAM" if slots.is_cuda else "DRAM"
        self.device = slots.device.index or 0 if slots.is_cuda else 0
        self.count, self.slot_bytes = slots.shape
        self._bound = threading.local()
        self.bind()
        try:
            self.nixl = new_agent(name, transports)
            region = (slots.data_ptr(), slots.numel(), self.device, "")
            self._registration = self.nixl.register_memory([region], self.memory)
        except Exception as error:
            raise MoverError(f"NIXL cannot register slots: {_text(error)}") from error

    def bind(self) -> None:
        """UCX's CUDA transports use the calling thread's context."""
        if self.memory == "VRAM" and not hasattr(self._bound, "yes"):
            torch.cuda.set_device(self.device)
            self._bound.yes = True

    def table(self, address: int, device: int, sizes: list[int]) -> npt.NDArray[np.uint64]:
        """Descriptors of the first bytes of each slot, for each size."""
        starts = address + np.arange(self.count, dtype=np.uint64) * np.uint64(self.slot_bytes)
        table = np.empty((self.count, len(sizes), 3), dtype=np.uint64)
        table[..., 0] = starts[:, None]
        table[..., 1] = np.array(sizes, dtype=np.uint64)
        table[..., 2] = device
        return table.reshape(-1, 3)

    def close(self) -> None:
        try:
            self.nixl.deregister_memory(self._registration)
        except Exception:
            # Of no consequence for anybody else: the agent, which nobody uses any more, is let go.
            logger.exception("NIXL cannot unregister slots")
        self.nixl = None


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


class NixlTarget(Target):
    """D's agent."""

    def __init__(self, name: str, slots: torch.Tensor, transports: Transports) -> None:
        self._agent = _Agent(name, slots, transports)
        try:
            metadata = self._agent.nixl.get_agent_metadata()
        except Exception as error:
            raise MoverError(f"NIXL cannot describe slots: {_text(error)}") from error
        agent = self._agent
        self._description = msgspec.msgpack.encode(
            _Description(metadata, slots.data_ptr(), agent.memory, agent.device)
        )

    @property
    def description(self) -> bytes:
        return self._description

    def progress(self) -> None:
        self._agent.bind()
        try:
            # Drives UCX until it has nothing more to do; nobody sends notifications.
            self._agent.nixl.get_new_notifs()
        except Exception as error:
            raise MoverError(_text(error)) from error

    def close(self) -> None:
        self._agent.close()


class NixlPath(MoverPath):
    """P's agent, and prepared writes between slots, each made when it is first needed."""

    poll_seconds = 100e-6
    needs_peer = True

    def __init__(
        self, name: str, slots: torch.Tensor, description: bytes, transports: Transports
    ) -> None:
        try:
            there = _description_decoder.decode(description)
        except msgspec.DecodeError as error:
            raise MoverError(f"bad description of slots: {error}", lasting=True) from error
        agent = self._agent = _Agent(name, slots, transports)
        if there.memory != agent.memory:
            raise MoverError(
                f"own slots are {agent.memory}, the peer's {there.memory}", lasting=True
            )
        self._sizes = write_sizes(agent.slot_bytes)
        try:
            peer = self._peer = agent.nixl.add_remote_agent(there.metadata)
            own = agent.table(slots.data_ptr(), agent.device, self._sizes)
            far = agent.table(there.address, there.device, self._sizes)
            self._own = agent.nixl.prep_xfer_dlist("", own, agent.memory)
            self._far = agent.nixl.prep_xfer_dlist(peer, far, agent.memory)
        except Exception as error:
            raise MoverError(f"NIXL cannot reach the slots: {_text(error)}") from error
        self._handles: dict[tuple[int, int], Any] = {}
        self._flying: dict[int, Any] = {}
        self._over: list[Written] = []

    def write(self, source: int, target: int, num_bytes: int) -> None:
        self._agent.bind()
        size = bisect_left(self._sizes, num_bytes)
        own, far = (slot * len(self._sizes) + size for slot in (source, target))
        try:
            handle = self._handles.get((own, far))
            if handle is None:
                handle = self._handles[own, far] = self._agent.nixl.make_prepped_xfer(
                    "WRITE", self._own, [own], self._far, [far], b""
                )
            state = self._agent.nixl.transfer(handle)
        except Exception as error:
            # Not begun.
            logger.debug("NIXL did not begin a write", exc_info=True)
            self._over.append(Written(target, _text(error)))
            return
        self._settle(target, handle, state)

    def poll(self) -> list[Written]:
        self._agent.bind()
        for target, handle in list(self._flying.items()):
            try:
                state = self._agent.nixl.check_xfer_state(handle)
            except Exception as error:
                logger.debug("NIXL gave a write up", exc_info=True)
                del self._flying[target]
                self._over.append(Written(target, _text(error)))
                continue
            self._settle(target, handle, state)
        over, self._over = self._over, []
        return over

    def _settle(self, target: int, handle: Any, state: str) -> None:
        if state == "PROC":
            self._flying[target] = handle
            return
        self._flying.pop(target, None)
        self._over.append(Written(target, "" if state == "DONE" else _DOWN))

    def close(self) -> None:
        assert not self._flying, "writes are in flight"
        nixl = self._agent.nixl
        try:
            for handle in self._handles.values():
                nixl.release_xfer_handle(handle)
            nixl.release_dlist_handle(self._own)
            nixl.release_dlist_handle(self._far)
            nixl.remove_remote_agent(self._peer)
        except Exception:
            # As above.
            logger.exception("NIXL cannot release a link")
        self._handles.clear()
        self._agent.close()


class NixlMover(Mover):
    """NIXL as a mover.

    Args:
        instance_id: names this node's agents.
        address: what peers are told of this node.
        local_only: refuse to start where UCX would open a port.

    Raises:
        SetupError: the library is missing, or UCX cannot do without a port and has to.
    """

    name = "nixl"

    def __init__(self, instance_id: str, address: str, *, local_only: bool = False) -> None:
        check_library()
        self.transports = choose_transports(address, local_only=local_only)
        if not self.transports.local:
            _warn_of_ports(self.transports, local_only=local_only)
        self.device_slots = _can_share_device_memory()
        self._instance = instance_id
        # UCX reads its environment and probes devices for the first agent; one at a time.
        self._starting = threading.Lock()
        self._prepared = False

    def prepare(self) -> None:
        """Have UCX load its modules and probe devices, which takes it 0.4 s for the first agent of
        a process; each later one takes 10 to 30 ms."""
        with self._starting:
            if self._prepared:
                return
            try:
                new_agent(self._instance, self.transports)
            except Exception as error:
                raise MoverError(f"NIXL cannot start UCX: {_text(error)}") from error
            self._prepared = True

    def target(self, slots: torch.Tensor, peer: str, origin: str) -> Target:
        with self._starting:
            return NixlTarget(self._instance, slots, self.transports)

    def path(
        self, slots: torch.Tensor, description: bytes, peer: str, wake: Callable[[], None]
    ) -> MoverPath:
        with self._starting:
            return NixlPath(self._instance, slots, description, self.transports)


def _warn_of_ports(transports: Transports, *, local_only: bool) -> None:
    """Raises SetupError if ports may not be opened."""
    if local_only:
        raise SetupError(
            f"{transports.obstacle}, and UCX's ports ask nobody for a key; --trust-network says "
            f"that none but this deployment's hosts reach them"
        )
    logger.warning(
        "%s: UCX opens ports that ask nobody for the cluster key, on %s, %s. Whoever reaches them "
        "can write to any memory of this process: let only this deployment's nodes reach them "
        "(docs/transfer-backends.md)",
        transports.obstacle,
        f"device {transports.devices}" if transports.devices else "every device",
        f"ports {os.environ.get('UCX_TCP_PORT_RANGE', 'that the kernel picks')}",
    )


class NixlManager(StagedManager):
    """See the module's docstring and :class:`pd.transfer.staged.manager.StagedManager`.

    Args:
        local_only: as for :class:`NixlMover`.

    Raises:
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
        slots: int | None = None,
        slot_bytes: int | None = None,
        patience: Patience | None = None,
    ) -> None:
        mover = NixlMover(instance_id, advertise_host or host, local_only=local_only)
        on_device = mover.device_slots and pool.buffer.device.type == "cuda"
        shape = (CUDA_SLOTS, CUDA_SLOT_BYTES) if on_device else (HOST_SLOTS, HOST_SLOT_BYTES)
        self._reach = mover.transports.reach
        super().__init__(
            pool,
            instance_id,
            host,
            mover=mover,
            slots=slots or shape[0],
            slot_bytes=slot_bytes or shape[1],
            advertise_host=advertise_host,
            cluster_key=cluster_key,
            patience=patience,
        )

    def address(self) -> dict[str, str]:
        return {**super().address(), "reach": self._reach}
