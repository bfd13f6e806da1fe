"""Two hosts on one machine: network namespaces that a switch joins, and a cable from here to each.

Only the machine's owner may make them, so tests that need them call :func:`require` first.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lacking import skip_or_fail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Set aside for tests of networks (RFC 2544): nobody's addresses. Every network takes sixteen.
_BASE = IPv4Address("198.18.0.0")
_BLOCKS = (1 << 17) // 16
_PREFIX = "pdtest"
_COUNTER = itertools.count()
_NAMESPACES = Path("/run/netns")
# TCP waits no longer before it sends again, in the network namespace of the thread that opens the
# file. Linux has it since 6.15.
_LONGEST_PAUSE = Path("/proc/sys/net/ipv4/tcp_rto_max_ms")
_CLONE_NEWNET = 0x40000000
# States of TCP connections, as /proc/net/tcp has them, in which nothing has been sent yet.
_SYN_SENT, _LISTEN = "02", "0A"
_LIBC = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


def why_not() -> str | None:
    """Return why namespaces cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"network namespaces need {tool} (Debian: iproute2)"
    probe = f"{_PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    _run("ip", "netns", "delete", probe)
    return None


def require() -> None:
    """Skip the test if namespaces cannot be made here. In CI that is a failure."""
    why = why_not()
    if why is not None:
        skip_or_fail(why)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Host:
    """One side: a namespace with an address that its peer and this machine reach on separate ways.

    Attributes:
        address: address to listen on and to advertise.
        prefix: put it before a command to run it there; the command keeps the pid.
    """

    def __init__(self, namespace: str, address: IPv4Address) -> None:
        self.namespace = namespace
        self.address = str(address)
        self.prefix = ("ip", "netns", "exec", namespace)

    def ip(self, *command: str) -> None:
        """Run ``ip`` in the namespace."""
        _run("ip", "-n", self.namespace, *command)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on a thread in the namespace.

        Sockets opened by the function belong to this host, and so do sockets of all threads that it
        starts. Other threads of the process may use them.
        """
        with ThreadPoolExecutor(1, initializer=self._enter) as thread:
            return thread.submit(function).result()

    def _enter(self) -> None:
        with (_NAMESPACES / self.namespace).open() as file:
            if _LIBC.setns(file.fileno(), _CLONE_NEWNET):
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error), self.namespace)

    def unacknowledged_bytes(self) -> int:
        """Count unacknowledged bytes of this host's TCP connections, including ends of closed
        ones."""
        table = self.call(Path("/proc/thread-self/net/tcp").read_text)
        rows = (line.split() for line in table.splitlines()[1:])
        begun = (row for row in rows if row[3] not in (_SYN_SENT, _LISTEN))
        return sum(int(row[4].split(":")[0], 16) for row in begun)


class Network:
    """Hosts ``a`` and ``b``.

    A cut happens in the switch: both ends keep their carrier, their addresses and their routes, and
    hear nothing of it. This machine still reaches both, unless a cut says otherwise.
    """

    def __init__(self) -> None:
        number = next(_COUNTER)
        name = f"{_PREFIX}-{os.getpid()}-{number}"
        self._block = (os.getpid() * 7 + number) % _BLOCKS
        self._base = _BASE + 16 * self._block
        self.a = Host(f"{name}-a", self._base + 1)
        # As on another machine: no memory is shared with processes of ``b``.
        self.a.prefix = ("unshare", "--ipc", *self.a.prefix)
        self.b = Host(f"{name}-b", self._base + 2)
        self._switch = Host(f"{name}-switch", self._base)
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        for host in (self.a, self.b, self._switch):
            _run("ip", "netns", "add", host.namespace)
            host.ip("link", "set", "lo", "up")
        self._switch.ip("link", "add", "bridge", "type", "bridge")
        self._switch.ip("link", "set", "bridge", "up")
        self._join(self.a, "port-a", first=8)
        self._join(self.b, "port-b", first=12)

    def _join(self, host: Host, port: str, *, first: int) -> None:
        """Plug a host into the switch and connect this machine to it."""
        cable = ("type", "veth", "peer", "name", port, "netns", self._switch.namespace)
        host.ip("link", "add", "lan", *cable)
        host.ip("address", "add", f"{host.address}/29", "dev", "lan")
        host.ip("link", "set", "lan", "up")
        self._switch.ip("link", "set", port, "master", "bridge")
        self._switch.ip("link", "set", port, "up")
        here, there = self._base + first + 1, self._base + first + 2
        name = self._cable(port[-1])
        _run("ip", "link", "add", name, "type", "veth", "peer", "mgmt", "netns", host.namespace)
        host.ip("address", "add", f"{there}/30", "dev", "mgmt")
        host.ip("link", "set", "mgmt", "up")
        _run("ip", "address", "add", f"{here}/30", "dev", name)
        _run("ip", "link", "set", name, "up")
        _run("ip", "route", "add", f"{host.address}/32", "via", str(there), "dev", name)

    def slow(self, megabits: int) -> None:
        """Limit the rate from ``a`` to ``b``."""
        rate = ("rate", f"{megabits}mbit", "burst", "64kb", "latency", "200ms")
        _run("tc", "-n", self.a.namespace, "qdisc", "add", "dev", "lan", "root", "tbf", *rate)

    def fast(self) -> None:
        """Remove the limit."""
        _run("tc", "-n", self.a.namespace, "qdisc", "delete", "dev", "lan", "root")

    def cut(self, *, whole: bool = False) -> None:
        """Drop everything between ``a`` and ``b``, either way.

        Args:
            whole: also between ``a`` and this machine.
        """
        self._switch.ip("link", "set", "port-b", "nomaster")
        if whole:
            for end in self._ends():
                _run("tc", *end, "root", "blackhole")

    def restore(self) -> None:
        """Let everything pass again."""
        self._switch.ip("link", "set", "port-b", "master", "bridge")
        for command in self._ends("delete"):
            # There is none after a cut that was not whole.
            subprocess.run(["tc", *command, "root"], capture_output=True)

    def _ends(self, do: str = "add") -> list[list[str]]:
        """Return commands for both ends of the cable between ``a`` and this machine."""
        there = ["-n", self.a.namespace, "qdisc", do, "dev", "mgmt"]
        return [there, ["qdisc", do, "dev", self._cable("a")]]

    def bytes_sent(self) -> int:
        """Count bytes that left ``a`` for ``b`` so far."""
        counter = "/sys/class/net/lan/statistics/tx_bytes"
        command = [*self.a.prefix, "cat", counter]
        return int(subprocess.run(command, capture_output=True, check=True).stdout)

    def close(self) -> None:
        """Delete the namespaces and, with the cables, this machine's routes."""
        for host in (self.a, self.b, self._switch):
            # Whatever was made: the building may have stopped in the middle.
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True)
        # A deleted namespace keeps its cables until its last process is gone.
        for letter in "ab":
            subprocess.run(["ip", "link", "delete", self._cable(letter)], capture_output=True)

    def _cable(self, letter: str) -> str:
        return f"pdt{self._block:04x}{letter}"


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Make two hosts, and remove them afterwards in any case."""
    _remove_leftovers()
    running = Network()
    try:
        yield running
    finally:
        running.close()


class Lan:
    """Up to five hosts on one switch.

    Args:
        joined: this machine is on the switch, too. Otherwise it does not reach the hosts.
    """

    def __init__(self, count: int, *, joined: bool = False) -> None:
        number = next(_COUNTER)
        name = f"{_PREFIX}-{os.getpid()}-{number}"
        self._block = (os.getpid() * 7 + number) % _BLOCKS
        base = _BASE + 16 * self._block
        self._switch = Host(f"{name}-switch", base)
        self._own_address = base + 6
        self.hosts = [Host(f"{name}-{index}", base + 1 + index) for index in range(count)]
        self._ports = {host: f"port{index}" for index, host in enumerate(self.hosts)}
        try:
            self._build(joined)
        except BaseException:
            self.close()
            raise

    def _build(self, joined: bool) -> None:
        for host in (self._switch, *self.hosts):
            _run("ip", "netns", "add", host.namespace)
            host.ip("link", "set", "lo", "up")
        self._switch.ip("link", "add", "bridge", "type", "bridge")
        self._switch.ip("link", "set", "bridge", "up")
        for host, port in self._ports.items():
            host.ip("link", "add", "lan", *self._peer(port))
            host.ip("address", "add", f"{host.address}/29", "dev", "lan")
            host.ip("link", "set", "lan", "up")
            self._plug(port)
        if joined:
            _run("ip", "link", "add", self._cable, *self._peer("uplink"))
            _run("ip", "address", "add", f"{self._own_address}/29", "dev", self._cable)
            _run("ip", "link", "set", self._cable, "up")
            self._plug("uplink")

    def _peer(self, port: str) -> tuple[str, ...]:
        return ("type", "veth", "peer", "name", port, "netns", self._switch.namespace)

    def _plug(self, port: str) -> None:
        self._switch.ip("link", "set", port, "master", "bridge")
        self._switch.ip("link", "set", port, "up")

    @property
    def _cable(self) -> str:
        return f"pdt{self._block:04x}l"

    @contextlib.contextmanager
    def without(self, host: Host) -> Iterator[None]:
        """Drop everything between a host and all others for a while. Neither end notices at
        once."""
        port = self._ports[host]
        self._switch.ip("link", "set", port, "nomaster")
        try:
            yield
        finally:
            self._switch.ip("link", "set", port, "master", "bridge")

    def resend_often(self) -> None:
        """Make hosts resend unacknowledged bytes every second, if the kernel can. Otherwise pauses
        double, and data sent during a cut arrives late after it."""
        for host in self.hosts:
            if _LONGEST_PAUSE.exists():
                host.call(lambda: _LONGEST_PAUSE.write_text("1000"))

    def close(self) -> None:
        """Delete the namespaces and the cable."""
        for host in (self._switch, *self.hosts):
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True)
        subprocess.run(["ip", "link", "delete", self._cable], capture_output=True)


@contextlib.contextmanager
def lan(count: int, *, joined: bool = False) -> Iterator[Lan]:
    """Make a :class:`Lan`, and remove it afterwards in any case."""
    _remove_leftovers()
    running = Lan(count, joined=joined)
    try:
        yield running
    finally:
        running.close()


def _remove_leftovers() -> None:
    """Delete namespaces of test runs that were killed."""
    for entry in _NAMESPACES.glob(f"{_PREFIX}-*"):
        pid = entry.name.split("-")[1]
        if not Path("/proc", pid).exists():
            subprocess.run(["ip", "netns", "delete", entry.name], capture_output=True)
