"""The limit on open files, mostly sockets.

ZMQ aborts the process when it gets no descriptor. So we check at the start that the limit suffices
for the process and its peers, and give strangers only a part of the rest.
"""

from __future__ import annotations

import contextlib
import os
import resource

from pd.core.errors import SetupError

# Descriptors of any process except its connections: files, libraries, ZMQ's own, and short-lived
# ones. We have never seen a process with more.
OWN_FILES = 64
# Connections of one peer (messages, heartbeats, HTTP, data), with ZMQ's descriptors for them.
FILES_PER_PEER = 10
# A process must be able to serve this many strangers, or we do not start it.
LEAST_CONNECTIONS = 32
# Descriptors that CUDA opens for each device.
CUDA_FILES = 128
# Peers for which a node keeps room, whatever strangers do, and fewest connections of strangers to a
# port.
NODE_PEERS = 8
_FEWEST = 4


def raise_file_limit() -> None:
    """Raise the limit on open files as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # a container may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def file_limit() -> int:
    """Return how many files the process may have open: a huge number if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 62 if soft == resource.RLIM_INFINITY else soft


def count_files() -> int:
    """Count the open files. Returns the usual number at the start if we cannot count them."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/dev/fd"))
    return 16


def count_spare_files(subject: str, peers: int, more: int = 0) -> int:
    """Count the descriptors left over by the process itself and its peers.

    Args:
        subject: kind of process, for the error.
        peers: number of processes to which it connects.
        more: number of descriptors for other purposes.

    Raises:
        SetupError: too few remain to serve anybody.
    """
    needed = count_files() + OWN_FILES + peers * FILES_PER_PEER + more
    spare = file_limit() - needed
    if spare < LEAST_CONNECTIONS:
        least = needed + LEAST_CONNECTIONS
        enough = max(4096, 1 << least.bit_length())
        raise SetupError(
            f"open files: {file_limit()} (limit of 'ulimit -n'); {subject} needs at least {least}: "
            f"raise the limit, with 'ulimit -n {enough}' as root or LimitNOFILE={enough} in systemd"
        )
    return spare


def limit_strangers(limit: int, parts: int) -> int:
    """Return how many connections of strangers one port of a node may hold.

    Args:
        limit: upper bound of the result.
        parts: number of equal parts of the spare descriptors; the port gets one.
    """
    spare = file_limit() - OWN_FILES - NODE_PEERS * FILES_PER_PEER
    return min(limit, max(_FEWEST, spare // parts))
