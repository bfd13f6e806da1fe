"""One end of a link over NIXL: an agent of the library and its registered staging buffers."""

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
from pd.transfer.staged.mover import MoverError, Target, Written
from pd.transfer.staged.mover import Path as MoverPath

if TYPE_CHECKING:
    import numpy.typing as npt

    from pd.transfer.staged.nixl_transports import Transports

logger = logging.getLogger(__name__)

# A write is rounded up to one of these parts of a buffer, each of which is prepared once.
_SIZES_PER_DOUBLING = 8
_DOUBLINGS = 4
_DOWN = "the peer is gone"


class _NixlBuffers(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    """D's buffers: the agent's metadata, the first buffer's address, and in which memory it is."""

    metadata: bytes
    address: int
    memory: str
    device: int


_buffers_decoder = msgspec.msgpack.Decoder(_NixlBuffers)


def _api() -> Any:
    """NIXL's Python module. Its log and UCX's are off: our own reports a peer's death."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    if not _has_rdma():
        # UCX's module for InfiniBand is useless here, and dangerous: it loads Debian's libibverbs
        # beside the wheel's own, and their two libnl-route crash the process when it ends.
        os.environ.setdefault("UCX_MODULES", "^ib")
    raises = logging.raiseExceptions
    try:
        from nixl import _api
    except ImportError as error:
        raise SetupError(
            f"transfer backend nixl needs the package nixl (pip install nixl): {error}"
        ) from error
    # The module logs to standard output, which belongs to the ready line, and hides errors of all
    # loggers.
    theirs = logging.getLogger("nixl")
    theirs.handlers.clear()
    theirs.propagate = True
    logging.raiseExceptions = raises
    return _api


def _has_rdma() -> bool:
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def check_library() -> None:
    """Raise SetupError if NIXL cannot be used."""
    _api()


def write_sizes(buffer_bytes: int) -> list[int]:
    """Sizes of writes in ascending order, the last of which is the whole buffer."""
    sizes = {buffer_bytes}
    for doubling in range(_DOUBLINGS):
        half = buffer_bytes >> (doubling + 1)
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
    with transports.apply():
        agent.create_backend("UCX", settings)
    return agent


class _Agent:
    """One NIXL agent and one piece of registered memory."""

    def __init__(self, name: str, buffers: torch.Tensor, transports: Transports) -> None:
        self.memory = "VRAM" if buffers.is_cuda else "DRAM"
        self.device = buffers.device.index or 0 if buffers.is_cuda else 0
        self.count, self.buffer_bytes = buffers.shape
        self._bound = threading.local()
        self.bind()
        try:
            self.nixl = new_agent(name, transports)
            region = (buffers.data_ptr(), buffers.numel(), self.device, "")
            self._registration = self.nixl.register_memory([region], self.memory)
        except Exception as error:
            raise MoverError(f"NIXL cannot register buffers: {error_text(error)}") from error

    def bind(self) -> None:
        """UCX's CUDA transports use the calling thread's context."""
        if self.memory == "VRAM" and not hasattr(self._bound, "yes"):
            torch.cuda.set_device(self.device)
            self._bound.yes = True

    def table(self, address: int, device: int, sizes: list[int]) -> npt.NDArray[np.uint64]:
        """Descriptors of the first bytes of each buffer, for each size."""
        starts = address + np.arange(self.count, dtype=np.uint64) * np.uint64(self.buffer_bytes)
        table = np.empty((self.count, len(sizes), 3), dtype=np.uint64)
        table[..., 0] = starts[:, None]
        table[..., 1] = np.array(sizes, dtype=np.uint64)
        table[..., 2] = device
        return table.reshape(-1, 3)

    def close(self) -> None:
        try:
            self.nixl.deregister_memory(self._registration)
        except Exception:
            # It has no consequence: nobody uses the agent any more.
            logger.exception("NIXL cannot unregister buffers")
        self.nixl = None


def error_text(error: Exception) -> str:
    return str(error) or type(error).__name__


class NixlTarget(Target):
    """D's agent."""

    def __init__(self, name: str, buffers: torch.Tensor, transports: Transports) -> None:
        self._agent = _Agent(name, buffers, transports)
        try:
            metadata = self._agent.nixl.get_agent_metadata()
        except Exception as error:
            raise MoverError(f"NIXL cannot describe buffers: {error_text(error)}") from error
        agent = self._agent
        self._description = msgspec.msgpack.encode(
            _NixlBuffers(metadata, buffers.data_ptr(), agent.memory, agent.device)
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
            raise MoverError(error_text(error)) from error

    def close(self) -> None:
        self._agent.close()


class NixlPath(MoverPath):
    """P's agent, and prepared writes between buffers, each made when it is first needed."""

    poll_seconds = 100e-6
    needs_peer = True

    def __init__(
        self, name: str, buffers: torch.Tensor, description: bytes, transports: Transports
    ) -> None:
        try:
            there = _buffers_decoder.decode(description)
        except msgspec.DecodeError as error:
            raise MoverError(f"bad description of buffers: {error}", lasting=True) from error
        agent = self._agent = _Agent(name, buffers, transports)
        if there.memory != agent.memory:
            raise MoverError(
                f"own buffers are {agent.memory}, the peer's {there.memory}", lasting=True
            )
        self._sizes = write_sizes(agent.buffer_bytes)
        try:
            peer = self._peer = agent.nixl.add_remote_agent(there.metadata)
            own = agent.table(buffers.data_ptr(), agent.device, self._sizes)
            far = agent.table(there.address, there.device, self._sizes)
            self._own = agent.nixl.prep_xfer_dlist("", own, agent.memory)
            self._far = agent.nixl.prep_xfer_dlist(peer, far, agent.memory)
        except Exception as error:
            raise MoverError(f"NIXL cannot reach the buffers: {error_text(error)}") from error
        self._handles: dict[tuple[int, int], Any] = {}
        self._flying: dict[int, Any] = {}
        self._over: list[Written] = []

    def write(self, source: int, target: int, num_bytes: int) -> None:
        self._agent.bind()
        size = bisect_left(self._sizes, num_bytes)
        own, far = (buffer * len(self._sizes) + size for buffer in (source, target))
        try:
            handle = self._handles.get((own, far))
            if handle is None:
                handle = self._handles[own, far] = self._agent.nixl.make_prepped_xfer(
                    "WRITE", self._own, [own], self._far, [far], b""
                )
            state = self._agent.nixl.transfer(handle)
        except Exception as error:
            # The write was not begun.
            logger.debug("NIXL did not begin a write", exc_info=True)
            self._over.append(Written(target, error_text(error)))
            return
        self._settle(target, handle, state)

    def poll(self) -> list[Written]:
        self._agent.bind()
        for target, handle in list(self._flying.items()):
            try:
                state = self._agent.nixl.check_xfer_state(handle)
            except Exception as error:
                logger.debug("NIXL failed a write", exc_info=True)
                del self._flying[target]
                self._over.append(Written(target, error_text(error)))
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
            # It has no consequence, as in ``_Agent.close``.
            logger.exception("NIXL cannot release a link")
        self._handles.clear()
        self._agent.close()
