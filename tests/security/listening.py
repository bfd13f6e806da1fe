"""TCP ports on which a process listens, as its kernel says."""

from __future__ import annotations

import os
import re
import socket
import struct
from pathlib import Path


def listening(pid: int | str = "self") -> set[tuple[str, int]]:
    """Addresses and ports of a process's listening sockets, IPv4 and IPv6."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
        except OSError:  # closed meanwhile
            continue
        if found:
            inodes.add(found[1])
    ports = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                # Each word of the address is a number in the machine's byte order.
                words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
                packed = b"".join(struct.pack("=I", word) for word in words)
                ports.add((socket.inet_ntop(family, packed), int(port, 16)))
    return ports
