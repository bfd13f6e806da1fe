"""Deployments of real processes, and a client that reads their streams."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from forked_commands import ForkedCommand
from waiting import wait_until as wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

START_TIMEOUT = 60.0
# A program for :class:`Process`: what pd-launch runs, as users start it.
LAUNCH = ("-m", "pd.cli")
# What a client may have to wait for an error after a process died (issue: 5 s), and some noise.
ERROR_WITHIN = 5.0


def python_path(root: Path) -> str:
    """Return a PYTHONPATH with which processes in other directories find ``pd``, before its current
    value."""
    return os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])


def free_port() -> int:
    """Return a free port that the kernel assigns to nobody by itself, because it must still be free
    when a killed process restarts. (Mooncake takes ports from 15000 to 17000.) No other test
    process gets it within the hour."""
    taken = Path(tempfile.gettempdir()) / "pd-test-ports"
    taken.mkdir(exist_ok=True)
    while True:
        port = random.SystemRandom().randrange(17001, 32768)
        mark = taken / str(port)
        with contextlib.suppress(FileNotFoundError):
            if mark.stat().st_mtime < time.time() - 3600:
                mark.unlink()
        with socket.socket() as sock, contextlib.suppress(OSError):
            mark.touch(exist_ok=False)
            sock.bind(("127.0.0.1", port))
            return port


class Process:
    """One ``pd-launch`` process on fixed ports, so that it can be restarted in its place.

    Args:
        prefix: words before the interpreter (``ip netns exec NAME``, which becomes the process and
            so keeps its pid).
        env: added to the environment.
        program: file to run instead of pd-launch, which does more.

    Attributes:
        forks: in tests on hosts without a GPU, processes are forked from one that has imported
            everything (``forked_commands.py``). Exceptions are processes whose program is
            :data:`LAUNCH`, and processes that find modules in other places.
    """

    forks = False
    child: subprocess.Popen[str] | ForkedCommand

    def __init__(
        self,
        *command: str,
        log: Path,
        prefix: Sequence[str] = (),
        env: dict[str, str] | None = None,
        program: Sequence[str] = (),
    ) -> None:
        self.command = command
        self.log = log
        self._prefix, self._env = list(prefix), env or {}
        self._program = program
        self.start()

    def start(self) -> None:
        """Start without waiting; see :meth:`ready`."""
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | self._env
        self._log = self.log.open("a")
        self._ready: dict[str, Any] | None = None
        *before, namespace = self._prefix or [None]
        can_fork = self._program != LAUNCH and before in ([], ["ip", "netns", "exec"])
        can_fork &= "PYTHONPATH" not in self._env
        if self.forks and can_fork:
            file, log = next(iter(self._program), None), self._log.fileno()
            self.child = ForkedCommand(file, self.command, env=env, namespace=namespace, log=log)
            return
        self.child = subprocess.Popen(
            [*self._prefix, sys.executable, *(self._program or LAUNCH), *self.command],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=env,
        )

    def ready(self) -> dict[str, Any]:
        """Wait for the ready line."""
        if self._ready is None:
            assert self.child.stdout is not None
            line = self.child.stdout.readline()
            assert line, f"{self.command} ended; see {self.log}:\n{self.log.read_text()[-2000:]}"
            self._ready = json.loads(line)
        return self._ready

    @property
    def url(self) -> str:
        return str(self.ready()["url"])

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process is gone."""
        self.child.send_signal(signal.SIGKILL)
        self.child.wait(10)

    def restart(self) -> None:
        """Start again on the same ports."""
        self.start()
        self.ready()

    def stop(self) -> None:
        if self.child.poll() is None:
            self.child.terminate()
            try:
                self.child.wait(10)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()
        self._log.close()

    def server_info(self) -> Any:
        return httpx.get(f"{self.url}/server_info", timeout=10).json()

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


def kill_all(processes: Sequence[Process]) -> None:
    """Send SIGKILL to all at once, and wait until they are gone."""
    for process in processes:
        process.child.send_signal(signal.SIGKILL)
    for process in processes:
        process.child.wait(10)


class Deployment:
    """Processes of one model and their proxy, all on loopback.

    Args:
        program: file to run instead of pd-launch (see :class:`Process`).
        prefill_program, decode_program: the same for nodes of one role.
        devices: assigned in turn to the nodes of each role, so that two prefill and two decode
        nodes
            on two GPUs make pairs within a GPU and between both.
    """

    def __init__(
        self,
        model: Path,
        logs: Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        devices: Sequence[str] = ("auto",),
        node_flags: Sequence[str] = (),
        prefill_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = (),
        proxy_flags: Sequence[str] = (),
        program: Sequence[str] = (),
        prefill_program: Sequence[str] = (),
        decode_program: Sequence[str] = (),
        env: dict[str, str] | None = None,
        prefill_env: dict[str, str] | None = None,
        decode_env: dict[str, str] | None = None,
    ) -> None:
        common = ["--model", str(model), "--kv-cache-tokens", "16384", "--cpu-threads", "1"]
        # What a node chooses by itself depends on what is installed here.
        common += ["--transfer-backend", "tcp", "--generation-config", "none"]
        common += ["--elastic", os.environ.get("PD_TEST_ELASTIC", "off")]
        common += node_flags
        self._logs, self._env, self._program = logs, env, program
        logs.mkdir(parents=True, exist_ok=True)
        self.prefill, self.decode = [], []
        for index in range(prefill):
            device = ["--device", devices[index % len(devices)]]
            command = ["prefill", "--port", str(free_port()), *device, *common, *prefill_flags]
            settings: dict[str, Any] = {"more_env": prefill_env, "program": prefill_program}
            self.prefill.append(self._process(f"prefill{index}", *command, **settings))
        for index in range(decode):
            device = ["--device", devices[index % len(devices)]]
            command = ["decode", "--port", str(free_port()), *device, *common, *decode_flags]
            settings = {"more_env": decode_env, "program": decode_program}
            self.decode.append(self._process(f"decode{index}", *command, **settings))
        self._workers = [f for p in self.prefill for f in ("--prefill", p.url)]
        self._workers += [f for d in self.decode for f in ("--decode", d.url)]
        port = ["--port", str(free_port())]
        self.proxy = self._process("proxy", "proxy", *port, *self._workers, *proxy_flags)
        self.wait_ready()

    def _process(
        self, name: str, *command: str, more_env: dict[str, str] | None = None, **settings: Any
    ) -> Process:
        env = (self._env or {}) | (more_env or {})
        settings["program"] = settings.get("program") or self._program
        return Process(*command, log=self._logs / f"{name}.log", env=env, **settings)

    def another_proxy(self) -> Process:
        """Start a second proxy for the same nodes."""
        return self._process("proxy2", "proxy", "--port", "0", *self._workers)

    @property
    def nodes(self) -> list[Process]:
        return [*self.prefill, *self.decode]

    def wait_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until the proxy can serve with every node."""
        wait_ready(self.proxy, self.nodes, timeout)

    def wait_idle(self, timeout: float = 15.0) -> None:
        """Wait until queues are empty and ``free + cached = total`` on every node."""
        for node in self.nodes:
            wait_until(lambda n=node: is_idle(n.server_info()), timeout, node.server_info)

    def stop(self) -> None:
        everything = [self.proxy, *self.nodes]
        for process in everything:
            process.child.terminate()
        for process in everything:
            process.stop()

    def stream(self, prompt: list[int], tokens: int, **extra: Any) -> Stream:
        """Start a streamed /generate."""
        return Stream(self.proxy.url, prompt, tokens, **extra)


def wait_ready(proxy: Process, nodes: Sequence[Process], timeout: float = START_TIMEOUT) -> None:
    """Wait until the proxy can serve with these nodes as they are now. It may not yet have noticed
    that one was killed and came back."""
    instances = {node.ready()["instance_id"] for node in nodes}

    def all_up() -> bool:
        workers = httpx.get(f"{proxy.url}/workers", timeout=5).json()["workers"]
        return {w["instance_id"] for w in workers if w["ready"]} == instances

    wait_until(all_up, timeout, lambda: httpx.get(f"{proxy.url}/workers").text)


def is_idle(info: Any) -> bool:
    """Return whether nothing runs, and no page or staging slot waits."""
    pages = info["pages"]
    quiet = not any(info["queues"].values()) and not info["staging"]["quarantined"]
    return quiet and pages["free"] + pages["cached"] == pages["total"]


class Stream:
    """A streamed request, read by a thread of its own."""

    def __init__(self, url: str, prompt: list[int], tokens: int, **extra: Any) -> None:
        self.url, self.prompt, self.tokens = url, prompt, tokens
        self.output: list[int] = []
        self.sizes: list[int] = []  # tokens of each event
        self.error: dict[str, Any] | None = None
        self.status: int | None = None
        self.finish: str | None = None
        self.done = False
        self.ended_at: float | None = None
        self._extra = extra
        self._hang_up = threading.Event()
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Stream({self.status}, {len(self.output)} tokens, {self.error}, done={self.done})"

    @property
    def body(self) -> dict[str, Any]:
        params = {"max_new_tokens": self.tokens, "temperature": 0, "ignore_eos": True}
        return {
            "input_ids": self.prompt,
            "sampling_params": params,
            "stream": True,
            "incremental": True,
            **self._extra,
        }

    def _read(self) -> None:
        try:
            with (
                httpx.Client(timeout=120) as client,
                client.stream("POST", f"{self.url}/generate", json=self.body) as response,
            ):
                self.status = response.status_code
                if self.status != 200:
                    self.error = json.loads(response.read())["error"]
                    return
                self._events(response.iter_lines())
        except httpx.HTTPError as error:
            if not self._hang_up.is_set():
                self.error = {"message": f"connection: {error!r}", "code": "connection"}
        finally:
            self.ended_at = time.monotonic()
            self._first.set()

    def _events(self, lines: Iterator[str]) -> None:
        for line in lines:
            if self._hang_up.is_set():
                return
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                self.done = True
                return
            event = json.loads(data)
            if "error" in event:
                self.error = event["error"]
                return
            self.output += event["output_ids"]
            self.sizes.append(len(event["output_ids"]))
            reason = event["meta_info"]["finish_reason"]
            self.finish = reason["type"] if reason else self.finish
            if self.output:
                self._first.set()

    def hang_up(self) -> None:
        """Close the connection at the next event."""
        self._hang_up.set()

    def wait_first(self, timeout: float = 30.0) -> None:
        assert self._first.wait(timeout), "no token"

    def join(self, timeout: float = 120.0) -> Stream:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the stream did not end"
        return self

    def succeeded_as(self, expected: list[int]) -> bool:
        """Return whether the stream ended well with exactly these tokens."""
        return self.done and self.finish == "length" and self.output == expected

    def succeeded(self) -> bool:
        return self.done and self.error is None and len(self.output) == self.tokens


@contextlib.contextmanager
def deployment(model: Path, logs: Path, **settings: Any) -> Iterator[Deployment]:
    """Run a deployment and stop it in any case; show its logs if the body fails."""
    running = Deployment(model, logs, **settings)
    try:
        yield running
    except BaseException:
        for log in sorted(logs.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-3000:]}", file=sys.stderr)
        raise
    finally:
        running.stop()
