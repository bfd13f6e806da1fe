"""Processes of ``pd-bench proxy``: the proxy, nodes without a model, servers to compare with."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import httpx
import msgspec

from pd.bench.proxy_load import PROSE
from pd.bench.proxy_nodes import NodeScript
from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

_START_SECONDS = 60.0


class Running:
    """A listening process and its children."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    @property
    def cpu_seconds(self) -> float:
        """Processor time of all its live threads and of its children's."""
        return cpu_seconds(self.process.pid)

    def write_message(self, message: msgspec.Struct | None) -> None:
        """Write a line of JSON to the process, or an empty line."""
        assert self.process.stdin is not None
        line = "" if message is None else msgspec.json.encode(message).decode()
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read_message(self, type: type[T]) -> T:
        """Read the next line of JSON. Raises SetupError if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SetupError(f"process {self.process.pid} of the benchmark has ended")
        return msgspec.json.decode(line, type=type)

    def read_sent_times(self) -> dict[str, list[float]]:
        """Ask a scripted node when it sent tokens since the last call; times by request."""
        self.write_message(None)
        return self.read_message(dict[str, list[float]])


def cpu_seconds(pid: int) -> float:
    """Sum the processor time of all live threads of a process and its children."""
    total = 0
    for each in [pid, *list_children(pid)]:
        for thread in Path(f"/proc/{each}/task").iterdir():
            total += int((thread / "schedstat").read_text().split()[0])
    return total * 1e-9


def list_children(pid: int) -> list[int]:
    """List the live children of a process."""
    children = []
    for entry in Path("/proc").iterdir():
        # A process may end while we look at it.
        with suppress(OSError):
            if entry.name.isdigit():
                # The program's name, in parentheses, may contain anything.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid:
                    children.append(int(entry.name))
    return children


@contextmanager
def start_process(module: str, *arguments: str, first_line: str = "") -> Iterator[Running]:
    """Start a Python process, and kill it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        if first_line:
            assert process.stdin is not None
            process.stdin.write(first_line + "\n")
            process.stdin.flush()
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SetupError(f"{module} {shlex.join(arguments)} did not start")
        yield Running(process, str(json.loads(line)["url"]))
    finally:
        process.kill()
        process.wait()


@contextmanager
def start_router(program: str, worker: Running) -> Iterator[Running]:
    """Start a router in front of a server: a program with the flags of SGLang's router. Raises
    SetupError if it does not serve."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [program, "launch", "--worker-urls", worker.url, "--host", "127.0.0.1"]
    command += ["--port", port, "--policy", "round_robin", "--log-level", "error"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
    )
    try:
        running = Running(process, f"http://127.0.0.1:{port}")
        _wait_until_ready(f"{running.url}/readiness", program)
        # It may be ready before it has found the server.
        _wait_until_ready(f"{running.url}/workers", program, worker.url)
        yield running
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(url: str, name: str, part: str = "") -> None:
    """Wait for an answer with status 200 and ``part`` in its text. Raises SetupError if it takes
    too long."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with suppress(httpx.TransportError):
            answer = httpx.get(url)
            if answer.status_code == 200 and part in answer.text:
                return
        if time.monotonic() > deadline:
            raise SetupError(f"{name} was not ready within {_START_SECONDS:g} s")
        time.sleep(0.05)


@contextmanager
def start_proxy(
    step: float, *, workers: int = 1, nodes: int = 1
) -> Iterator[tuple[Running, list[Running]]]:
    """Start a proxy and its scripted nodes, and yield them when they are ready.

    Args:
        step: seconds between two tokens of a request.
        workers: number of processes of the proxy.
    """
    from tokenizers import Tokenizer

    from pd.embedded import EMBEDDED_MODEL

    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    script = NodeScript(
        model_path=str(EMBEDDED_MODEL),
        vocab_size=tokenizer.get_vocab_size(),
        context_length=1 << 17,
        token_ids=tokenizer.encode(PROSE, add_special_tokens=False).ids,
        step_seconds=step,
    )
    with ExitStack() as stack:
        line = msgspec.json.encode(script).decode()
        running = [
            stack.enter_context(start_process("pd.bench.proxy_nodes", first_line=line))
            for _ in range(nodes)
        ]
        flags = ["proxy", "--port", "0", "--log-level", "error", "--workers", str(workers)]
        for node in running:
            flags += ["--unified", node.url]
        proxy = stack.enter_context(start_process("pd.cli", *flags))
        _wait_until_ready(f"{proxy.url}/readiness", "the proxy")
        yield proxy, running
