"""Transports that UCX may use, and the ports they open.

UCX's TCP transport listens on every device by default and requires no key. A connection with its
magic number may write to any address of the process (``tests/security/test_ucx_listener.py`` does).
Between processes of one host UCX needs no port: it copies from process to process (``cma``), and
the kernel allows this only to processes of the same user. UCX takes these transports only with its
error handling off (NIXL's ``ucx_error_handling_mode``). Staged links do not need it, because a
write is one call of the kernel. The call fails when the peer is dead, and the end of the link's
channel tells us so.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
import threading
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from pd.core.addresses import is_loopback
from pd.core.errors import SetupError
from pd.transfer.host_id import host_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Transports without ports, by UCX's names for them.
_LOCAL = {
    *("self", "sm", "shm", "mm", "posix", "sysv", "cma", "xpmem", "knem"),
    *("cuda", "cuda_copy", "cuda_ipc", "gdr_copy"),
}
# NIXL divides settings at commas, so we cannot give it a list of names. Without tcp, and with no
# RDMA device's name to match, only local transports are left.
_LOCAL_SETTINGS = "TLS=^tcp,NET_DEVICES=lo"
NETWORK = "network"
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_SIOCGIFCONF = 0x8912
# struct ifreq: a name, then an address with the IPv4 number at byte 20.
_INTERFACE = struct.Struct("16s4x4s16x")
_MAX_INTERFACES = 256
_environment_lock = threading.Lock()


class Transports(NamedTuple):
    """Transports that UCX may use for the links of one manager.

    Attributes:
        reach: published to peers. Nodes with different values cannot use nixl with each other.
        settings: of UCX, in the form of NIXL's ``engine_config``.
        environment: settings that ``engine_config`` cannot express. They hold only while we make an
            agent (:meth:`use_environment`), because processes started by this one inherit its
            environment.
        obstacle: why UCX opens ports; empty if it opens none, and so reaches this host only.
        devices: devices with its ports.
    """

    reach: str
    settings: str
    environment: Mapping[str, str] = MappingProxyType({})
    obstacle: str = ""
    devices: str = ""

    @property
    def is_local(self) -> bool:
        """Whether UCX opens no port."""
        return not self.obstacle

    @contextmanager
    def use_environment(self) -> Iterator[None]:
        """Have UCX read these settings from the environment. One thread at a time gets in."""
        with _environment_lock:
            before = {name: os.environ.get(name) for name in self.environment}
            os.environ.update(self.environment)
            try:
                yield
            finally:
                for name, value in before.items():
                    if value is None:
                        del os.environ[name]
                    else:
                        os.environ[name] = value


def choose_transports(address: str, *, local_only: bool) -> Transports:
    """Choose transports for a node's address and the operator's ``UCX_TLS``.

    Args:
        address: address published to peers. If it is a loopback address, all peers are on this
            host.
        local_only: the node reaches peers on other hosts by other backends.

    Raises:
        SetupError: UCX would open its ports on every device, because none has the address.
    """
    obstacle = _find_port_obstacle(address, local_only=local_only)
    if not obstacle:
        # Processes of one user may copy to each other's memory.
        return Transports(f"{host_id()}:{os.geteuid()}", _LOCAL_SETTINGS)
    chosen = os.environ.get("UCX_NET_DEVICES")
    device = find_device(address)
    if chosen:
        return Transports(NETWORK, "", obstacle=obstacle, devices=chosen)
    if not device:
        raise SetupError(
            f"{obstacle}, and no network device has the address {address}, so UCX would open its "
            "unauthenticated ports on every device: set UCX_NET_DEVICES to the devices it may use "
            "(for example eth0), or --advertise-host to an address of one"
        )
    devices = ",".join([device, *_rdma_devices()])
    if "," in devices:
        # See above: there is no other way to give NIXL a list.
        return Transports(NETWORK, "", {"UCX_NET_DEVICES": devices}, obstacle, devices)
    return Transports(NETWORK, f"NET_DEVICES={devices}", obstacle=obstacle, devices=devices)


def _find_port_obstacle(address: str, *, local_only: bool) -> str:
    """Return why UCX cannot do without ports; empty if it can."""
    chosen = os.environ.get("UCX_TLS")
    if chosen is not None and not {name.strip() for name in chosen.split(",")} <= _LOCAL:
        return f"UCX_TLS={chosen} lets UCX open ports"
    if not (local_only or is_loopback(address)):
        return f"peers are to reach this node at {address}"
    if "UCX_NET_DEVICES" in os.environ and _rdma_devices():
        return f"UCX_NET_DEVICES={os.environ['UCX_NET_DEVICES']} chooses network devices"
    if not can_copy_between_processes():
        return "this kernel or container forbids process_vm_writev between processes"
    return ""


def can_copy_between_processes() -> bool:
    """Whether process_vm_writev works between processes of one user.

    Like UCX, we try it on this process itself, because seccomp filters and kernels without it
    refuse even that. Yama may forbid it between processes. UCX lifts a scope of 1 for this process,
    as any process may for itself, but it cannot lift a higher one.
    """
    if _PTRACE_SCOPE.exists() and int(_PTRACE_SCOPE.read_text()) > 1:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    source, target = ctypes.c_uint64(1), ctypes.c_uint64(0)
    size = ctypes.sizeof(source)
    here = (ctypes.c_size_t * 2)(ctypes.addressof(source), size)
    there = (ctypes.c_size_t * 2)(ctypes.addressof(target), size)
    try:
        write = libc.process_vm_writev
    except AttributeError:
        return False
    write.restype = ctypes.c_ssize_t
    one = ctypes.c_ulong(1)
    return bool(write(os.getpid(), here, one, there, one, ctypes.c_ulong(0)) == size)


def _rdma_devices() -> list[str]:
    """List InfiniBand and RoCE ports by UCX's names."""
    ports = Path("/sys/class/infiniband").glob("*/ports/*")
    return sorted(f"{port.parent.parent.name}:{port.name}" for port in ports)


def find_device(address: str) -> str:
    """Return the network device with an address or host name; empty if none has it."""
    if is_loopback(address):
        return "lo"
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    wanted = {str(entry[4][0]) for entry in found}
    return next((device for device, own in _list_addresses() if own in wanted), "")


def _list_addresses() -> list[tuple[str, str]]:
    """List devices and their IPv4 and IPv6 addresses."""
    buffer = array.array("B", bytes(_MAX_INTERFACES * _INTERFACE.size))
    request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        used, _ = struct.unpack("iP", fcntl.ioctl(probe, _SIOCGIFCONF, request))
    own = []
    for name, number in _INTERFACE.iter_unpack(buffer.tobytes()[:used]):
        # A second address of a device may be named "eth0:1".
        device = name.rstrip(b"\0").decode().partition(":")[0]
        own.append((device, socket.inet_ntoa(number)))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, *_, device = line.split()
        own.append((device, str(ipaddress.IPv6Address(int(digits, 16)))))
    return own
