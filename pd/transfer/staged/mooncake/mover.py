"""KV over Mooncake's transfer engine: over tcp, or over rdma where the library finds a device.

Buffers, channel and guarantees are those of :mod:`pd.transfer.staged.manager`. Here they hold
because of these facts:

- Over tcp, the library reports a write as complete when D's library acknowledged that all bytes are
  in the buffer (since version 0.3.13; we refuse older ones and ``MC_TCP_PROTO=1``). Over rdma it
  reports the device's completion.
- Over tcp a failed write may still land, even if P is dead, because bytes given to P's kernel
  continue as long as the connection lives (10 MB arrived 15 s after an error, when a cut link came
  back). P cannot take them back. So its report of a failure, its channel's end and even its death
  prove less here than elsewhere, and D makes them true. Each link has its own engine on D. When the
  link is over, D unregisters the buffers, so that no further write begins, and hangs up. The
  library writes only bytes that it reads from a connection of that engine, so nothing can land once
  the last of them is closed. Over rdma unregistering already ends all writes. We never reuse
  buffers whose connections cannot be closed.
- Nothing is written anew after a failure, because the library reconnects only for writes not
  reported as failed.
- Nothing reads P's buffers after the report of a write, failed or complete. A write without
  progress for ``MC_TCP_PROGRESS_TIMEOUT_SEC`` (30 s by default) fails, so a stopped or unreachable
  peer holds P's buffers no longer. We give its link up after 5 s; a busy machine cannot mislead us
  about that.

Ports: each engine listens on two ports of 15000 to 17000 on all addresses, whatever ``--host`` is,
and the library authenticates nobody (``tests/security/test_mooncake_listener.py``). A packet filter
lets nobody in to P's engines. To D's engines it admits only the source address of the link's
authenticated channel, while the link is up. Every process at that address can read and write the
buffers of that link, but not the pool. Data is not encrypted. IPv4 only.

Staging is always in host memory, pinned if the pool is in CUDA memory.

We could not test rdma for want of a device. Both ends must have chosen the same protocol, or we
refuse the link. ``MC_FORCE_TCP=1`` makes a node with a device use tcp.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Annotated

import msgspec

from pd.core.errors import SetupError
from pd.transfer.staged.manager import StagedManager
from pd.transfer.staged.mooncake.library import (
    ENGINES,
    MooncakeEngine,
    is_supported,
    library_version,
    load_library,
)
from pd.transfer.staged.mover import Mover, MoverError, Path, Target, Written

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pd.transfer.kv_buffer import KVBuffer
    from pd.util.starvation import Patience

logger = logging.getLogger(__name__)

# Gathered bytes are still in the cache when the library sends them. For pools on a GPU, buffers of
# 4 MiB are no better.
DEFAULT_BUFFERS, DEFAULT_BUFFER_BYTES = 8, 2 << 20
_HANG_UP_SECONDS = 2.0
_POLL_SECONDS = 200e-6
_STALL_SECONDS = 5.0
# Buffers in which bytes may land until the process ends.
_LOST: list[object] = []


class MooncakeManager(StagedManager):
    """Staged manager over Mooncake, with the arguments of :class:`StagedManager`.

    Raises:
        SetupError: the library is missing, cannot listen, or the address is not IPv4.
    """

    def __init__(
        self,
        pool: KVBuffer,
        instance_id: str,
        host: str = "127.0.0.1",
        *,
        advertise_host: str = "",
        cluster_key: bytes | None = None,
        buffers: int = DEFAULT_BUFFERS,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(
            pool,
            instance_id,
            host,
            mover=MooncakeMover(advertise_host or host),
            buffers=buffers,
            buffer_bytes=buffer_bytes,
            advertise_host=advertise_host,
            cluster_key=cluster_key,
            patience=patience,
        )


class _MooncakeBuffers(msgspec.Struct, forbid_unknown_fields=True):
    """Place of D's buffers. On the wire the last field is called ``slots``.

    Attributes:
        engine: ``host:port`` by which the library finds D's engine.
        buffers: address of the first one.
    """

    engine: Annotated[str, msgspec.Meta(max_length=300)]
    protocol: Annotated[str, msgspec.Meta(max_length=16)]
    version: Annotated[str, msgspec.Meta(max_length=64)]
    buffers: Annotated[int, msgspec.Meta(gt=0, le=(1 << 63) - 1)] = msgspec.field(name="slots")


_buffers_decoder = msgspec.msgpack.Decoder(_MooncakeBuffers)


class MooncakeMover(Mover):
    """Mooncake as a mover.

    Args:
        host: name or IPv4 address by which peers reach this node.

    Raises:
        SetupError: the library is missing, or the address is not IPv4.
    """

    name = "mooncake"

    def __init__(self, host: str) -> None:
        if ":" in host:
            raise SetupError(f"mooncake works over IPv4, not at {host}; use another backend")
        load_library()
        logger.warning(
            "mooncake listens on two unauthenticated ports between 15000 and 17000 on all "
            "addresses for each link: every process on the host of a connected prefill node can "
            "read and write that link's staging buffers, but not the pool; nobody else gets in "
            "(docs/transfer-backends.md)"
        )
        self._host = host

    def make_target(self, buffers: torch.Tensor, peer: str, origin: str) -> Target:
        return _Target(self._take_engine(), self._host, buffers, origin)

    def make_path(
        self, buffers: torch.Tensor, description: bytes, peer: str, wake: Callable[[], None]
    ) -> Path:
        try:
            there = _buffers_decoder.decode(description)
        except msgspec.MsgspecError as error:
            raise MoverError(
                f"bad description of mooncake buffers: {error}", lasting=True
            ) from error
        if not re.fullmatch(r"[A-Za-z0-9._-]+:[0-9]{1,5}", there.engine):
            raise MoverError(f"bad name of a mooncake engine: {there.engine!r}", lasting=True)
        if not is_supported(there.version):
            raise MoverError(f"mooncake {there.version} there is too old; upgrade it", lasting=True)
        engine = self._take_engine(there.engine)
        try:
            if engine.protocol != there.protocol:
                raise MoverError(
                    f"mooncake uses {engine.protocol} here and {there.protocol} there; set "
                    f"MC_FORCE_TCP=1 on both nodes",
                    lasting=True,
                )
            return _Path(engine, self._host, buffers, there)
        except BaseException:
            ENGINES.give_back(self._host, engine)
            raise

    def _take_engine(self, target: str = "") -> MooncakeEngine:
        try:
            return ENGINES.take_engine(self._host, target)
        except SetupError as error:
            raise MoverError(str(error)) from error


class _Target(Target):
    """D's buffers, registered with an engine that only P's address can reach."""

    def __init__(
        self, engine: MooncakeEngine, host: str, buffers: torch.Tensor, origin: str
    ) -> None:
        self._engine, self._host, self._buffers = engine, host, buffers
        try:
            engine.admit_only((origin.removeprefix("::ffff:"),))
            engine.register_memory(buffers.data_ptr(), buffers.numel())
        except (SetupError, ValueError) as error:
            ENGINES.give_back(host, engine)
            raise MoverError(f"{origin} cannot be let in: {error}") from error

    @property
    def description(self) -> bytes:
        engine = self._engine
        return msgspec.msgpack.encode(
            _MooncakeBuffers(
                engine.name, engine.protocol, library_version(), self._buffers.data_ptr()
            )
        )

    def close(self) -> None:
        self._engine.unregister_memory(self._buffers.data_ptr())
        if self._engine.hang_up(_HANG_UP_SECONDS):
            ENGINES.give_back(self._host, self._engine)
        else:
            logger.error(
                "mooncake does not close its connections: %d bytes of staging memory are lost",
                self._buffers.numel(),
            )
            _LOST.extend((self._engine, self._buffers))


class _Path(Path):
    """P's buffers and the writes under way."""

    poll_seconds = _POLL_SECONDS
    stall_seconds = _STALL_SECONDS

    def __init__(
        self, engine: MooncakeEngine, host: str, buffers: torch.Tensor, there: _MooncakeBuffers
    ) -> None:
        self._engine, self._host, self._buffers, self._there = engine, host, buffers, there
        self._flying: dict[int, int] = {}
        try:
            engine.register_memory(buffers.data_ptr(), buffers.numel())
        except SetupError as error:
            raise MoverError(str(error)) from error
        # The first write may have to wait for the peer, but writes of the link thread must not.
        self.begin_write(0, 0, 1)
        if not engine.wait_for_write(self._flying.pop(0), pause=1e-3):
            engine.unregister_memory(buffers.data_ptr())
            raise MoverError(
                f"mooncake at {there.engine} does not answer; do its ports (15000 to 17000) pass "
                f"the firewall?"
            )

    def begin_write(self, source: int, target: int, num_bytes: int) -> None:
        size = self._buffers.shape[1]
        here, there = self._buffers.data_ptr() + source * size, self._there.buffers + target * size
        self._flying[target] = self._engine.submit_write(self._there.engine, here, there, num_bytes)

    def poll(self) -> list[Written]:
        over = []
        for target, batch in list(self._flying.items()):
            arrived = self._engine.poll_write(batch)
            if arrived is not None:
                del self._flying[target]
                error = "" if arrived else f"mooncake failed to write to {self._there.engine}"
                over.append(Written(target, error))
        return over

    def close(self) -> None:
        self._engine.unregister_memory(self._buffers.data_ptr())
        ENGINES.give_back(self._host, self._engine)
