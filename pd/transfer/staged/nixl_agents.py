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

# We round a write up to one of these parts of a buffer, and prepare each part once.
_SIZES_PER_DOUBLING = 8
_DOUBLINGS = 4
_DOWN = "the peer is gone"


class _NixlBuffers(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    """D's buffers: the agent's metadata, the first buffer's address, and the kind of memory."""

    metadata: bytes
    address: int
    memory: str
    device: int


_buffers_decoder = msgspec.msgpack.Decoder(_NixlBuffers)


def _import_nixl() -> Any:
    """Import NIXL's Python module. We turn its log and UCX's off, because our own reports a peer's
    death."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    devices = Path("/sys/class/infiniband")
    if not (devices.is_dir() and any(devices.iterdir())):
        # UCX's module for InfiniBand is useless here, and dangerous. It loads Debian's libibverbs
        # next to the wheel's own, and their two libnl-route crash the process at its end.
        os.environ.setdefault("UCX_MODULES", "^ib")
    raises = logging.raiseExceptions
    try:
        from nixl import _api
    except ImportError as error:
        raise SetupError(
            f"transfer backend nixl needs the package nixl (pip install nixl): {error}"
        ) from error
    # The module logs to standard output, where only the ready line belongs, and it hides errors of
    # all loggers.
    theirs = logging.getLogger("nixl")
    theirs.handlers.clear()
    theirs.propagate = True
    logging.raiseExceptions = raises
    return _api


def check_library() -> None:
    """Raise SetupError if NIXL cannot be used."""
    _import_nixl()


def write_sizes(buffer_bytes: int) -> list[int]:
    """Return sizes of writes in ascending order. The last is the whole buffer."""
    sizes = {buffer_bytes}
    for doubling in range(_DOUBLINGS):
        half = buffer_bytes >> (doubling + 1)
        sizes.update(half + half * n // _SIZES_PER_DOUBLING for n in range(_SIZES_PER_DOUBLING))
    return sorted(size for size in sizes if size)


def new_agent(name: str, transports: Transports) -> Any:
    """Make an agent of NIXL with these transports and no thread. Raises NIXL's errors."""
    api = _import_nixl()
    # NOTE: two agents of one name would mistake each other for themselves.
    unique = f"{name}/{secrets.token_hex(4)}"
    agent = api.nixl_agent(unique, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    settings = {
        # UCX's transports without ports do not support its error handling.
        "ucx_error_handling_mode": "none" if transports.is_local else "peer",
        "engine_config": transports.settings,
    }
    with transports.use_environment():
        agent.create_backend("UCX", settings)
    return agent


class _Agent:
    """One NIXL agent and one piece of registered memory."""

    def __init__(self, name: str, buffers: torch.Tensor, transports: Transports) -> None:
        self.memory = "VRAM" if buffers.is_cuda else "DRAM"
        self.device = buffers.device.index or 0 if buffers.is_cuda else 0
        self.count, self.buffer_bytes = buffers.shape
        self._bound = threading.local()
        self.bind_device()
        try:
            self.nixl = new_agent(name, transports)
            region = (buffers.data_ptr(), buffers.numel(), self.device, "")
            self._registration = self.nixl.register_memory([region], self.memory)
        except Exception as error:
            raise MoverError(f"NIXL cannot register buffers: {describe_error(error)}") from error

    def bind_device(self) -> None:
        """Set the calling thread's CUDA context, because UCX's CUDA transports use it."""
        if self.memory == "VRAM" and not hasattr(self._bound, "yes"):
            torch.cuda.set_device(self.device)
            self._bound.yes = True

    def make_descriptors(
        self, address: int, device: int, sizes: list[int]
    ) -> npt.NDArray[np.uint64]:
        """Make descriptors of the first bytes of each buffer, for each size."""
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
            # This has no consequence, because nobody uses the agent any more.
            logger.exception("NIXL cannot unregister buffers")
        self.nixl = None


def describe_error(error: Exception) -> str:
    return str(error) or type(error).__name__


class NixlTarget(Target):
    """D's agent."""

    def __init__(self, name: str, buffers: torch.Tensor, transports: Transports) -> None:
        self._agent = _Agent(name, buffers, transports)
        try:
            metadata = self._agent.nixl.get_agent_metadata()
        except Exception as error:
            raise MoverError(f"NIXL cannot describe buffers: {describe_error(error)}") from error
        agent = self._agent
        self._description = msgspec.msgpack.encode(
            _NixlBuffers(metadata, buffers.data_ptr(), agent.memory, agent.device)
        )

    @property
    def description(self) -> bytes:
        return self._description

    def make_progress(self) -> None:
        self._agent.bind_device()
        try:
            # This drives UCX until it has nothing more to do. Nobody sends notifications.
            self._agent.nixl.get_new_notifs()
        except Exception as error:
            raise MoverError(describe_error(error)) from error

    def close(self) -> None:
        self._agent.close()


class NixlPath(MoverPath):
    """P's agent, and writes between buffers, each prepared when it is first needed."""

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
            own = agent.make_descriptors(buffers.data_ptr(), agent.device, self._sizes)
            far = agent.make_descriptors(there.address, there.device, self._sizes)
            self._own = agent.nixl.prep_xfer_dlist("", own, agent.memory)
            self._far = agent.nixl.prep_xfer_dlist(peer, far, agent.memory)
        except Exception as error:
            raise MoverError(f"NIXL cannot reach the buffers: {describe_error(error)}") from error
        self._handles: dict[tuple[int, int], Any] = {}
        self._flying: dict[int, Any] = {}
        self._over: list[Written] = []

    def begin_write(self, source: int, target: int, num_bytes: int) -> None:
        self._agent.bind_device()
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
            # The write did not begin.
            logger.debug("NIXL did not begin a write", exc_info=True)
            self._over.append(Written(target, describe_error(error)))
            return
        self._note_state(target, handle, state)

    def poll(self) -> list[Written]:
        self._agent.bind_device()
        for target, handle in list(self._flying.items()):
            try:
                state = self._agent.nixl.check_xfer_state(handle)
            except Exception as error:
                logger.debug("NIXL failed a write", exc_info=True)
                del self._flying[target]
                self._over.append(Written(target, describe_error(error)))
                continue
            self._note_state(target, handle, state)
        over, self._over = self._over, []
        return over

    def _note_state(self, target: int, handle: Any, state: str) -> None:
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
            # This has no consequence, as in ``_Agent.close``.
            logger.exception("NIXL cannot release a link")
        self._handles.clear()
        self._agent.close()
