"""Compare ways in which a decode node can learn that a write of NIXL has arrived.

    python benchmarks/nixl_completion.py --output benchmarks/results/nixl_completion.json

There are two processes with host memory, and UCX drives both ends over shared memory:

- ``note``: P waits until its write is over and sends a byte over a socket, on which D sleeps. This
  is the nixl backend's way. Only for the first write D must call UCX, which connects then.
- ``notification, polled``: P attaches NIXL's notification to the write, and D asks for
  notifications at most 5,000 times a second.
- ``notification, thread``: the same, with NIXL's progress thread at both ends.

`idle_core` is the share of a core that D's process takes while nothing arrives. `told_us` is the
median time from the start of a write of 64 KiB until D knows about it. `gb_s` is the rate of writes
of 4 MiB, each known to D before the next begins.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import select
import shlex
import socket
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from pd.bench.report import write_report

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

WAYS = ("note", "notification, polled", "notification, thread")
SMALL, LARGE = 64 << 10, 4 << 20
POLL_SECONDS, IDLE_SECONDS, LIMIT_SECONDS = 200e-6, 2.0, 30.0


class Agent:
    """A NIXL agent with LARGE bytes registered."""

    def __init__(self, name: str, way: str) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(enable_prog_thread=way.endswith("thread"), backends=["UCX"])
        self.nixl = nixl_agent(name, config)
        self.memory = torch.zeros(LARGE, dtype=torch.uint8)
        self.address = self.memory.data_ptr()
        self._registered = self.nixl.register_memory([(self.address, LARGE, 0, "")], "DRAM")

    def close(self) -> None:
        """Deregister; must be called before the memory is freed."""
        self.nixl.deregister_memory(self._registered)
        del self.nixl


def target(way: str, pipe: Connection, notes: socket.socket) -> None:
    """Run the decode side: report its cost while idle, then when it noticed each write."""
    agent = Agent("D", way)
    pipe.send((agent.nixl.get_agent_metadata(), agent.address))

    connected = False

    def wait(until: float) -> bool:
        """Wait for a notification in the way that is measured; returns whether one came."""
        nonlocal connected
        if way == "note":
            while not connected and time.perf_counter() < until:
                agent.nixl.get_new_notifs()
                connected = bool(select.select([notes], [], [], POLL_SECONDS)[0])
            notes.settimeout(max(1e-3, until - time.perf_counter()))
            try:
                return bool(notes.recv(1))
            except TimeoutError:
                return False
        while not agent.nixl.get_new_notifs():
            if time.perf_counter() > until:
                return False
            time.sleep(POLL_SECONDS)
        return True

    while (count := pipe.recv()) is not None:
        if count == 0:
            begun, cpu = time.perf_counter(), time.process_time()
            wait(begun + IDLE_SECONDS)
            pipe.send((time.process_time() - cpu) / (time.perf_counter() - begun))
        for _ in range(count):
            if not wait(time.perf_counter() + LIMIT_SECONDS):
                raise RuntimeError("a write did not arrive")
            pipe.send(time.perf_counter())
    agent.close()


def measure(way: str, count: int, pipe: Connection, notes: socket.socket) -> dict[str, Any]:
    metadata, address = pipe.recv()
    agent = Agent("P", way)
    peer = agent.nixl.add_remote_agent(metadata)
    peer = peer.decode() if isinstance(peer, bytes) else peer
    message = b"" if way == "note" else b"arrived"

    def write(size: int) -> float:
        """Write once; returns the seconds until the decode side notices."""
        places = ([(agent.address, size, 0)], [(address, size, 0)])
        ours, theirs = (agent.nixl.get_xfer_descs(place, "DRAM") for place in places)
        handle = agent.nixl.initialize_xfer("WRITE", ours, theirs, peer, message)
        begun = time.perf_counter()
        state = agent.nixl.transfer(handle)
        while state == "PROC" and time.perf_counter() < begun + LIMIT_SECONDS:
            state = agent.nixl.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"a write ended as {state}")
        if way == "note":
            notes.send(b"\0")
        known: float = pipe.recv()
        agent.nixl.release_xfer_handle(handle)
        return known - begun

    def writes(size: int) -> float:
        """Return the median of ``count`` writes, after one that connects."""
        pipe.send(count + 1)
        return median([write(size) for _ in range(count + 1)][1:])

    told, took = writes(SMALL), writes(LARGE)
    pipe.send(0)
    idle: float = pipe.recv()
    agent.nixl.remove_remote_agent(peer)
    agent.close()
    row = {"way": way, "idle_core": idle, "told_us": 1e6 * told, "gb_s": LARGE / took / 1e9}
    print(f"{way:22}{idle:>10.1%}{1e6 * told:>10.0f}{LARGE / took / 1e9:>8.1f}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="writes of each size")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("UCX_MODULES", "^ib")
    context, rows = multiprocessing.get_context("spawn"), []
    print(f"{'way':22}{'idle core':>10}{'told us':>10}{'GB/s':>8}")
    for way in WAYS:
        near, far = context.Pipe()
        ours, theirs = socket.socketpair()
        process = context.Process(target=target, args=(way, far, theirs), daemon=True)
        process.start()
        far.close()  # so that its end is noticed
        theirs.close()
        try:
            rows.append(measure(way, args.count, near, ours))
            near.send(None)
            process.join(10.0)
        finally:
            process.kill()
            ours.close()
    command = shlex.join(["python", "benchmarks/nixl_completion.py", *sys.argv[1:]])
    write_report(args.output, command, rows, measured=["benchmarks/nixl_completion.py"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
