"""Mooncake's transfer engine: we load it, guard its ports, and never destroy it while it is of use.

The library's behaviour, and our answer to it:

- It listens on all addresses, and every connection may read and write registered memory
  (``tests/security/test_mooncake_listener.py``). We give its sockets a packet filter before
  registering anything, so only admitted addresses get through.
- Bytes that a dead writer left in a connection land later. So we shut its connections down when a
  link ends (``tests/transfer/test_transfer_mooncake_library.py``). It offers no call for either, so
  we look for its sockets among the process's descriptors.
- One peer that does not answer the first request for its description stops the whole engine. So P
  has an engine for each peer.
- It remembers that description by ``host:port`` for good, and keeps dead connections until it uses
  them. So an engine meets each ``host:port`` only once.
- Ending an engine takes up to a second and holds Python's global lock. So we keep engines for the
  next link.
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
from pd.util.starvation import CEILING_SECONDS, Patience

if TYPE_CHECKING:
    from collections.abc import Iterator

# The first version that acknowledges a tcp write only when it is in the receiver's memory.
_OLDEST = (0, 3, 13)
_PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13")
_INSTALL = (
    "pip install mooncake-transfer-engine-non-cuda (on GPU machines "
    "mooncake-transfer-engine-cuda13) and Debian's libibverbs1 and librdmacm1"
)
# Environment of the library. Variables set by the operator keep their values.
DEFAULTS = {
    "MC_LOG_LEVEL": "ERROR",
    # Seconds without progress before a write fails. The library does not notice that a peer gets no
    # CPU time. The link does, so it ends before that.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": f"{CEILING_SECONDS:g}",
    "MC_TCP_SLICE_SIZE": "1048576",
}

_ATTACH_FILTER = 26
_OPEN_PORTS = "PD_MOONCAKE_OPEN_PORTS"
_MAX_ADMITTED = 200
# D takes turns among so many engines. P meets each only once, so it needs few.
_TURNS = 6
_MAX_IDLE = 64
# An engine keeps four dead connections to each engine it has met.
_MAX_MET = 32
# Error values of the batch interface.
_NO_BATCH = (0, -1, (1 << 64) - 1)


def load_library() -> type[Any]:
    """Return ``TransferEngine`` of the library. Fast, and imports no torch.

    Raises:
        SetupError: the library is missing, too old or badly configured. The message says what to
            do.
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
    if _parse_version(found) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise SetupError(f"mooncake {found or '(unknown version)'} is older than {oldest}; upgrade")
    # The package has no annotations.
    return TransferEngine  # type: ignore[no-any-return]


def library_version() -> str:
    """Return the version of the installed package; empty if there is none."""
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    # NOTE: this reads the contents of every installed package, which takes a third of a second.
    others = metadata.packages_distributions().get("mooncake", ())
    return metadata.version(others[0]) if others else ""


def is_supported(version: str) -> bool:
    """Whether a peer's library reports a write only when it has arrived."""
    return _parse_version(version) >= _OLDEST


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


class MooncakeEngine:
    """One engine of the library.

    Attributes:
        name: ``host:port`` by which peers find it.
        protocol: the library's choice: ``rdma`` if it found a device (and ``MC_FORCE_TCP`` is not
            set), else ``tcp``.

    Raises:
        SetupError: it cannot listen, or its sockets cannot get a filter.
    """

    def __init__(self, host: str) -> None:
        self._library = load_library()()
        # Otherwise Python would end each engine at the exit of the process, which takes a second.
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
        # Names of engines that this one has written to.
        self.met: set[str] = set()
        self.admit_only(())

    def admit_only(self, addresses: tuple[str, ...]) -> None:
        """Let only these IPv4 addresses connect, and cut connections from others."""
        code = _make_filter(addresses)
        for number in self._listeners:
            with _borrow_socket(number) as sock:
                _attach_filter(sock, code)
        for sock in self._find_connections():
            with contextlib.suppress(OSError):
                if sock.getpeername()[0].removeprefix("::ffff:") not in addresses:
                    sock.shutdown(socket.SHUT_RDWR)

    def register_memory(self, address: int, num_bytes: int) -> None:
        """Let admitted peers write to this memory. Raises SetupError."""
        if status := self._library.register_memory(address, num_bytes):
            raise SetupError(f"mooncake cannot register {num_bytes} bytes: {status}")

    def unregister_memory(self, address: int) -> None:
        """Refuse new writes to this memory. Over tcp, others continue; see :meth:`hang_up`."""
        self._library.unregister_memory(address)

    def hang_up(self, seconds: float) -> bool:
        """Admit nobody, and wait until the library has closed every connection to this engine.

        Args:
            seconds: limit of the wait, extended by the time in which this process got no CPU.

        Returns:
            True if so. Then nothing writes to memory that you unregistered before. The library
            checks the address of a write once, before its bytes. So a write under way belongs to a
            connection that existed when ``unregister_memory`` returned, and it ends with the
            connection.
        """
        self.admit_only(())
        since, patience = time.monotonic(), Patience()
        while any(True for _ in self._find_connections()):
            if patience.is_over(since, seconds):
                return False
            time.sleep(0.002)
        return True

    def destroy(self) -> None:
        """End the engine. See the module's docstring for the cost."""
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._library))
        del self._library

    def _find_connections(self) -> Iterator[socket.socket]:
        """Yield duplicates of the connections to this engine. Each is open until the next step."""
        for _, sock, port in _find_sockets():
            if port in self._ports and not _is_listening(sock):
                yield sock

    def submit_write(self, target: str, source: int, destination: int, num_bytes: int) -> int:
        """Start a write to the engine named ``target``. Return its number, or 0 if it failed.

        The first write to a target asks it for its description and waits for the answer. That takes
        5 s if nobody answers, or 60 s if the process is stopped, and all other calls of this engine
        wait meanwhile. Later writes do not wait.
        """
        batch: int = self._library.transfer_submit_write(target, source, destination, num_bytes)
        return 0 if batch in _NO_BATCH else batch

    def poll_write(self, batch: int) -> bool | None:
        """Return whether a write arrived, or None if it is still under way.

        After False, bytes in the kernel's buffers may still arrive. Do not call this again after an
        answer.
        """
        if not batch:
            return False
        status: int = self._library.transfer_check_status(batch)
        return None if status == 0 else status > 0

    def wait_for_write(self, batch: int, pause: float) -> bool:
        """Call :meth:`poll_write` every ``pause`` seconds until it answers."""
        while (arrived := self.poll_write(batch)) is None:
            time.sleep(pause)
        return arrived


class EnginePool:
    """Engines of this process without a link, kept for the next one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[str, MooncakeEngine]] = []

    def take_engine(self, host: str, target: str = "") -> MooncakeEngine:
        """Return an engine that admits nobody, registers nothing and has not met ``target``, if
        given. Raises SetupError."""
        with self._lock:
            fit = [x for x in self._idle if x[0] == host and target not in x[1].met]
            if fit and (target or len(fit) >= _TURNS):
                self._idle.remove(fit[0])
                engine = fit[0][1]
            else:
                # We keep the lock, because we could not distinguish the sockets of two engines that
                # start at once.
                engine = MooncakeEngine(host)
        if target:
            engine.met.add(target)
        return engine

    def give_back(self, host: str, engine: MooncakeEngine) -> None:
        """Keep an engine that registers nothing and has no write under way."""
        engine.admit_only(())
        worn = engine
        with self._lock:
            if len(engine.met) < _MAX_MET:
                self._idle.append((host, engine))
                if len(self._idle) <= _MAX_IDLE:
                    return
                worn = self._idle.pop(0)[1]
        # This is rare, so it may hold up the process for a second.
        worn.destroy()


ENGINES = EnginePool()


# ---- sockets of the library


def _make_filter(addresses: tuple[str, ...]) -> list[tuple[int, int, int, int]]:
    """Make a packet filter (classic BPF) that passes IPv4 packets from ``addresses``."""
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


def _attach_filter(sock: socket.socket, code: list[tuple[int, int, int, int]]) -> None:
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
    """List descriptors and ports of this process's sockets that listen on all addresses."""
    return [
        (number, port)
        for number, sock, port in _find_sockets()
        if _is_listening(sock) and sock.getsockname()[0] in ("::", "0.0.0.0")
    ]


def _is_listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _find_sockets() -> Iterator[tuple[int, socket.socket, int]]:
    """Yield descriptor, duplicate and port of each TCP socket of this process. The duplicate is
    open until the next step.

    We look at the duplicate, because other threads open and close descriptors meanwhile.
    """
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with _borrow_socket(int(entry)) as sock:
                inet = sock.family in (socket.AF_INET, socket.AF_INET6)
                if inet and sock.type == socket.SOCK_STREAM:
                    yield int(entry), sock, sock.getsockname()[1]


@contextlib.contextmanager
def _borrow_socket(number: int) -> Iterator[socket.socket]:
    """Duplicate a socket that stays open."""
    sock = socket.socket(fileno=os.dup(number))
    try:
        yield sock
    finally:
        sock.close()
