"""Mooncake's transfer engine, loaded, watched at its ports and never destroyed.

The library's behaviour, and what this module does about it:

- It listens on all addresses, and every connection may read and write registered memory
  (``tests/security/test_mooncake_listener.py``). Its sockets get a packet filter before anything is
  registered: only admitted addresses get through.
- Bytes that a dead writer left in a connection land later. Its connections are shut down when a
  link ends (``tests/transfer/test_transfer_mooncake_library.py``). It offers no call for either, so
  this module finds its sockets among the process's descriptors.
- One peer that does not answer the first request for its description stops the whole engine. So
  P has an engine for each peer.
- It remembers that description for good by ``host:port``, and keeps connections that have ended
  until they are used. An engine meets each ``host:port`` only once.
- Ending an engine takes up to a second with Python's global lock held. Engines are kept for the
  next link instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import threading
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any

from pd.core.errors import SetupError
from pd.core.starvation import CEILING_SECONDS, Patience

if TYPE_CHECKING:
    from collections.abc import Iterator

# The first that acknowledges a tcp write when it is in the receiver's memory.
_OLDEST = (0, 3, 13)
_PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13")
_INSTALL = (
    "pip install mooncake-transfer-engine-non-cuda (on GPU machines "
    "mooncake-transfer-engine-cuda13) and Debian's libibverbs1 and librdmacm1"
)
# Environment of the library. Variables that the operator set keep their values.
DEFAULTS = {
    "MC_LOG_LEVEL": "ERROR",
    # Seconds without progress after which a write fails. The library does not know that a peer gets
    # no CPU; the link, which does, ends before that.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": f"{CEILING_SECONDS:g}",
    "MC_TCP_SLICE_SIZE": "1048576",
}

_ATTACH_FILTER = 26
_OPEN_PORTS = "PD_MOONCAKE_OPEN_PORTS"
_MAX_ADMITTED = 200
# D takes turns among so many engines, so that P, which meets each only once, needs few.
_TURNS = 6
_MAX_IDLE = 64
# An engine keeps four dead connections to each that it has met.
_MAX_MET = 32
# Values that the batch interface returns for an error.
_NO_BATCH = (0, -1, (1 << 64) - 1)


def load_library() -> type[Any]:
    """``TransferEngine`` of the library. Fast, and imports no torch.

    Raises:
        SetupError: what is missing, too old or set wrongly, and what to do.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if os.environ.get("MC_TCP_PROTO") == "1":
        raise SetupError("MC_TCP_PROTO=1 makes mooncake report writes that have not arrived; unset")
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise SetupError(f"mooncake cannot be loaded ({error}): {_INSTALL}") from error
    found = library_version()
    if _numbers(found) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise SetupError(f"mooncake {found or '(unknown version)'} is older than {oldest}; upgrade")
    # The package has no annotations.
    return TransferEngine  # type: ignore[no-any-return]


def library_version() -> str:
    """Version of the installed package; empty if there is none."""
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    # NOTE: this reads what every installed package contains, which takes a third of a second.
    others = metadata.packages_distributions().get("mooncake", ())
    return metadata.version(others[0]) if others else ""


def is_supported(version: str) -> bool:
    """Whether a peer's library reports a write only when it has arrived."""
    return _numbers(version) >= _OLDEST


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


class MooncakeEngine:
    """One engine of the library.

    Attributes:
        name: ``host:port`` by which peers find it.
        protocol: what the library chose: ``rdma`` if it found a device (and ``MC_FORCE_TCP`` is not
            set), else ``tcp``.

    Raises:
        SetupError: it cannot listen, or its sockets cannot get a filter.
    """

    def __init__(self, host: str) -> None:
        self._library = load_library()()
        # Otherwise Python would end each engine when the process exits, which takes a second.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._library))
        before = {number for number, _ in _wildcard_listeners()}
        if self._library.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise SetupError(f"mooncake cannot listen on {host}")
        listeners = [(n, port) for n, port in _wildcard_listeners() if n not in before]
        self._listeners = [number for number, _ in listeners]
        self._ports = {port for _, port in listeners}
        port = self._library.get_rpc_port()
        if port not in self._ports:
            raise SetupError(f"mooncake's socket on port {port} was not found among this process's")
        self.name = f"{host}:{port}"
        # Over rdma the library has only one port, for descriptions.
        self.protocol = "tcp" if len(self._ports) > 1 else "rdma"
        # Names of engines to which this one has written.
        self.met: set[str] = set()
        self.admit(())

    def admit(self, addresses: tuple[str, ...]) -> None:
        """Let only these IPv4 addresses connect; connections from others are cut."""
        code = _only_from(addresses)
        for number in self._listeners:
            with _borrowed(number) as sock:
                _attach(sock, code)
        for sock in self._accepted():
            with contextlib.suppress(OSError):
                if sock.getpeername()[0].removeprefix("::ffff:") not in addresses:
                    sock.shutdown(socket.SHUT_RDWR)

    def register(self, address: int, num_bytes: int) -> None:
        """Let admitted peers write to this memory. Raises SetupError."""
        if status := self._library.register_memory(address, num_bytes):
            raise SetupError(f"mooncake cannot register {num_bytes} bytes: {status}")

    def unregister(self, address: int) -> None:
        """Refuse new writes to this memory. Over tcp one that has begun goes on
        (:meth:`hang_up`)."""
        self._library.unregister_memory(address)

    def hang_up(self, seconds: float) -> bool:
        """Admit nobody and wait until the library has closed every connection to this engine, for
        at most ``seconds`` besides the time in which this process got no CPU.

        True if so: nothing is written any more to memory that was unregistered before. The library
        looks at the address of a write once, before its bytes; so a write that goes on belongs to a
        connection that was here when ``unregister`` returned, and ends with it."""
        self.admit(())
        since, patience = time.monotonic(), Patience()
        while any(True for _ in self._accepted()):
            if patience.is_over(since, seconds):
                return False
            time.sleep(0.002)
        return True

    def destroy(self) -> None:
        """End the engine, at the cost that the module's docstring gives."""
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._library))
        del self._library

    def _accepted(self) -> Iterator[socket.socket]:
        """Duplicates of the connections to this engine, each open until the next is asked for."""
        for _, sock, port in _sockets():
            if port in self._ports and not _listens(sock):
                yield sock

    def submit(self, target: str, source: int, destination: int, num_bytes: int) -> int:
        """Start a write to the engine named ``target``; returns its number, 0 if it failed.

        The first for a target asks it for its description and waits for the answer (5 s if nobody
        answers, 60 s if the process is stopped), and so do all other calls of this engine
        meanwhile. Later ones do not wait.
        """
        batch: int = self._library.transfer_submit_write(target, source, destination, num_bytes)
        return 0 if batch in _NO_BATCH else batch

    def poll(self, batch: int) -> bool | None:
        """True if the write arrived; False if it failed, when bytes in the kernel's buffers may
        still arrive; None if neither is known yet. Not to be called again after an answer."""
        if not batch:
            return False
        status: int = self._library.transfer_check_status(batch)
        return None if status == 0 else status > 0

    def result(self, batch: int, pause: float) -> bool:
        """Call :meth:`poll` every ``pause`` seconds until it answers."""
        while (arrived := self.poll(batch)) is None:
            time.sleep(pause)
        return arrived


class EnginePool:
    """Engines of this process that no link uses, kept for the next one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[str, MooncakeEngine]] = []

    def take(self, host: str, target: str = "") -> MooncakeEngine:
        """An engine that admits nobody, registers nothing and has not met ``target``, if one is
        given. Raises SetupError."""
        with self._lock:
            fit = [x for x in self._idle if x[0] == host and target not in x[1].met]
            if fit and (target or len(fit) >= _TURNS):
                self._idle.remove(fit[0])
                engine = fit[0][1]
            else:
                # With the lock held: sockets of two that start at once could not be told apart.
                engine = MooncakeEngine(host)
        if target:
            engine.met.add(target)
        return engine

    def give_back(self, host: str, engine: MooncakeEngine) -> None:
        """Keep an engine that registers nothing and has no write under way."""
        engine.admit(())
        worn = engine
        with self._lock:
            if len(engine.met) < _MAX_MET:
                self._idle.append((host, engine))
                if len(self._idle) <= _MAX_IDLE:
                    return
                worn = self._idle.pop(0)[1]
        # Rare, so it may hold up the process for a second.
        worn.destroy()


ENGINES = EnginePool()


# ---- sockets of the library


def _only_from(addresses: tuple[str, ...]) -> list[tuple[int, int, int, int]]:
    """A packet filter (classic BPF) that lets IPv4 packets from ``addresses`` pass."""
    if len(addresses) > _MAX_ADMITTED:
        raise SetupError(f"mooncake cannot admit more than {_MAX_ADMITTED} hosts")
    network_header = (1 << 32) - 0x100000
    code = [
        (0x30, 0, 0, network_header),  # load the byte with the version of IP
        (0x54, 0, 0, 0xF0),
        (0x15, 1, 0, 0x40),  # 4: go on, else drop
        (0x06, 0, 0, 0),
        (0x20, 0, 0, network_header + 12),  # load the source address
    ]
    for index, address in enumerate(addresses):
        code.append((0x15, len(addresses) - index, 0, int(ipaddress.IPv4Address(address))))
    code += [(0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF)]
    return code


def _attach(sock: socket.socket, code: list[tuple[int, int, int, int]]) -> None:
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in code))
    try:
        sock.setsockopt(
            socket.SOL_SOCKET,
            _ATTACH_FILTER,
            struct.pack("@HP", len(code), ctypes.addressof(program)),
        )
    except OSError as error:
        if os.environ.get(_OPEN_PORTS) == "1":
            return
        raise SetupError(
            f"mooncake listens on all addresses and this kernel refuses to filter who connects "
            f"({error.strerror}); use another transfer backend, or set {_OPEN_PORTS}=1 where "
            f"nobody else can reach this machine"
        ) from error


def _wildcard_listeners() -> list[tuple[int, int]]:
    """File descriptors and ports of this process's sockets that listen on all addresses."""
    return [
        (number, port)
        for number, sock, port in _sockets()
        if _listens(sock) and sock.getsockname()[0] in ("::", "0.0.0.0")
    ]


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> Iterator[tuple[int, socket.socket, int]]:
    """Yield descriptor, duplicate and port of each TCP socket of this process. The duplicate
    is open until the next step.

    Other threads open and close descriptors meanwhile, so the duplicate is looked at.
    """
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with _borrowed(int(entry)) as sock:
                inet = sock.family in (socket.AF_INET, socket.AF_INET6)
                if inet and sock.type == socket.SOCK_STREAM:
                    yield int(entry), sock, sock.getsockname()[1]


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """A duplicate of a socket that stays open."""
    sock = socket.socket(fileno=os.dup(number))
    try:
        yield sock
    finally:
        sock.close()
