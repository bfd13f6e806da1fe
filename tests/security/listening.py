"""Sockets by which a process can be reached, as its kernel says."""

from __future__ import annotations

import os
import re
import socket
import struct
from pathlib import Path

# Columns of /proc/net/unix.
_DATAGRAM = "0002"
_CHOSEN_BY_THE_KERNEL = re.compile("@[0-9a-f]{5}")


def listening(pid: int | str = "self") -> set[tuple[str, int]]:
    """Addresses and ports of a process's listening TCP sockets, IPv4 and IPv6."""
    inodes, ports = _sockets(pid), set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for fields in _rows(pid, table):
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                # Each word of the address is a number in the machine's byte order.
                words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
                packed = b"".join(struct.pack("=I", word) for word in words)
                ports.add((socket.inet_ntop(family, packed), int(port, 16)))
    return ports


def other_sockets(pid: int | str = "self") -> set[str]:
    """A process's UDP sockets, and its Unix sockets with an abstract name, which no file's mode
    guards.

    Left out are datagram sockets with a name that the kernel chose: each of UCX's interfaces to
    shared memory has one, by which peers wake it, and reads no more of a datagram than that it came
    (``uct_mm_iface_create_signal_fd``).
    """
    inodes = _sockets(pid)
    found = {
        f"{table} {fields[1]}"
        for table in ("udp", "udp6")
        for fields in _rows(pid, table)
        if fields[9] in inodes
    }
    for fields in _rows(pid, "unix"):
        if fields[6] not in inodes or len(fields) < 8 or not fields[7].startswith("@"):
            continue
        if fields[4] == _DATAGRAM and _CHOSEN_BY_THE_KERNEL.fullmatch(fields[7]):
            continue
        found.add(f"unix {fields[7]}")
    return found


def _sockets(pid: int | str) -> set[str]:
    """Inodes of a process's sockets."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
        except OSError:  # closed meanwhile
            continue
        if found:
            inodes.add(found[1])
    return inodes


def _rows(pid: int | str, table: str) -> list[list[str]]:
    """A table of the process's network namespace; empty if the kernel lacks the protocol."""
    file = Path(f"/proc/{pid}/net/{table}")
    lines = file.read_text().splitlines()[1:] if file.exists() else []
    return [line.split() for line in lines]
