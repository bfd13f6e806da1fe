"""The Ray actor of one pd process: starts it, follows it, restarts it, and drains it.

The control service calls :meth:`Supervisor.renew_lease` twice a second. Otherwise the process ends,
because its watcher (:mod:`pd.cluster.watcher`) hears nothing from us.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import ssl
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from pd.cluster.orders import MAX_PART_BYTES, MAX_PROCESSES, Process, ProcessState
from pd.cluster.watcher import BEAT, WatchOrder
from pd.core.addresses import format_host
from pd.core.brief import shorten_text
from pd.core.errors import SetupError
from pd.net.bounded_http import fetch
from pd.util.children import module_command
from pd.util.secret_files import write_secret_file

if TYPE_CHECKING:
    from collections.abc import Sequence

LEASE_SECONDS = 90.0
_BACKOFF_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
# After so long a process is healthy: the pauses and the count of failures start over.
_HEALTHY_SECONDS, _MAX_FAILURES = 120.0, 10
_MAX_READY_BYTES, _MAX_OUTPUT_PARTS, _TEXT_CHARACTERS = 65536, 64, 300
_OUTPUT_SECONDS, _CHECK_SECONDS, _EXIT_SECONDS, _PAGE_BOUNDS = 1.0, 1.0, 2.0, (2 << 20, 5.0)
_ANY_CERTIFICATE = ssl._create_unverified_context()
_ORDERS = msgspec.json.Decoder(Process)
_USED_NODE = re.compile(r'^pd_proxy_worker_up\{[^}]*\burl="([^"]{1,300})"[^}]*\} 1\.0$', re.M)


class Supervisor:
    """Supervises one process. Methods may be called from several threads.

    Args:
        deployment: names the run directory on this host.
        order: a :class:`pd.cluster.orders.Process` as JSON.
        cluster_key: empty on loopback.
        address: of this Ray node.
    """

    def __init__(self, deployment: str, order: bytes, cluster_key: str, address: str) -> None:
        self._order = order_ = _ORDERS.decode(order)
        self._address, self._port, self._has_key = address, order_.port, bool(cluster_key)
        self._directory = make_state_directory(deployment)
        if cluster_key:
            write_secret_file(self._directory / "cluster.key", cluster_key.encode())
        self._state = ProcessState(order_.name, order_.layout, order_.role, address=address)
        self._nodes: Sequence[str] = []
        self._lease_end = time.monotonic() + LEASE_SECONDS
        self._is_leaving = threading.Event()
        # Descriptor of the watcher's orders; -1 without a process.
        self._control, self._control_lock = -1, threading.Lock()
        self._input: IO[bytes] | None = None
        self._output: queue.Queue[bytes] = queue.Queue(_MAX_OUTPUT_PARTS)
        threading.Thread(target=self._supervise_process, daemon=True).start()
        if order_.role == "proxy":
            write_secret_file(self._locate_file("nodes"), b"")
            threading.Thread(target=self._check_proxy, daemon=True).start()

    # ---- called by the control service

    def renew_lease(self, nodes: Sequence[str], grace: float | None = None) -> bytes:
        """Extend the lease and return the state.

        Args:
            nodes: URLs for a proxy.
            grace: seconds in which the process has to drain and end, or None.
        """
        self._lease_end = time.monotonic() + LEASE_SECONDS
        if nodes != self._nodes:
            content = "".join(f"{url}\n" for url in nodes)
            write_secret_file(self._locate_file("nodes"), content.encode())
            self._nodes = nodes
        with self._control_lock, contextlib.suppress(BrokenPipeError):
            if grace is not None:
                self._is_leaving.set()
            if self._control >= 0:
                self._state.state = self._state.state if grace is None else "draining"
                os.write(self._control, BEAT if grace is None else f"{grace}\n".encode())
        return msgspec.json.encode(self._state)

    def read_source(self, source: str, offset: int) -> tuple[bytes, bool]:
        """Read what :class:`pd.cluster.orders.Read` asks for, and say whether that was all."""
        if source == "output":
            with contextlib.suppress(queue.Empty):
                return self._output.get(timeout=_OUTPUT_SECONDS), False
            return b"", self._state.state in ("ended", "failed") and self._output.empty()
        if source != "log":
            return self._fetch_page(source)[1], True
        data = b""
        with contextlib.suppress(FileNotFoundError), self._locate_file("log").open("rb") as log:
            log.seek(offset if offset >= 0 else max(0, log.seek(0, os.SEEK_END) + offset))
            data = log.read(MAX_PART_BYTES)
        return data, not data

    def write_input(self, data: bytes) -> None:
        """Write to the standard input of a load process; nothing closes it."""
        assert self._input is not None
        if not data:
            self._input.close()
        else:
            self._input.write(data)
            self._input.flush()

    def remove_files(self) -> None:
        """Remove the files of the ended process, and those of the host if it was the last one. Then
        end this actor, because Ray's head may not be there to do it."""
        for suffix in ("log", "lock", "nodes"):
            self._locate_file(suffix).unlink(missing_ok=True)
        if not list(self._directory.glob("*.lock")):
            (self._directory / "cluster.key").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another process may be about to start
                self._directory.rmdir()
        threading.Timer(_EXIT_SECONDS, os._exit, [0]).start()

    # ---- the process

    def _supervise_process(self) -> None:
        self._keep_running()
        while (left := self._lease_end - time.monotonic()) > 0:
            time.sleep(left)
        # We live, but hear nothing. So the control service or Ray's head hangs, and nobody ends us.
        threading.Timer(_EXIT_SECONDS, os._exit, [1]).start()
        import ray  # not on the operator's machine, where other parts of this module are used

        ray.kill(ray.get_actor("control"))

    def _keep_running(self) -> None:
        failures, is_load = 0, self._order.role == "load"
        while True:
            began = time.monotonic()
            try:
                status = self._run_once()
                kind = "killed by signal" if status > 128 else "ended with status"
                detail = f"{kind} {status % 128 if status > 128 else status}"
            except OSError as error:
                detail = f"cannot be started: {error}"
            failures = 1 if time.monotonic() - began > _HEALTHY_SECONDS else failures + 1
            pause = _BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS)) - 1]
            if not self._is_leaving.is_set():
                if is_load or failures >= _MAX_FAILURES:
                    return self._set_state("failed", detail)
                self._set_state("waiting", f"{detail}; starts again in {pause:g} s")
            # Without beats, nobody may know of the new process.
            if self._is_leaving.wait(pause) or time.monotonic() > self._lease_end:
                return self._set_state("ended", detail)
            self._state.restarts += 1
            self._set_state("starting")

    def _set_state(self, state: Any, detail: str = "") -> None:
        self._state.state, self._state.detail = state, detail
        self._state.url, self._state.pid, self._state.uses = "", 0, []

    def _run_once(self) -> int:
        """Run the process to its end, and return its exit status."""
        orders, control = os.pipe()
        watch_order: WatchOrder = {
            "command": self._make_command(),
            "environment": make_environment(self._order),
            "directory": self._order.directory,
            "lock": str(self._locate_file("lock")),
            "grace": self._order.grace,
            "lease": LEASE_SECONDS,
        }
        with open(self._locate_file("log"), "ab", opener=lambda p, f: os.open(p, f, 0o600)) as log:
            watcher = subprocess.Popen(
                module_command("pd.cluster.watcher", orders),
                stdin=subprocess.PIPE if self._order.role == "load" else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[orders],
                start_new_session=True,
            )
        os.close(orders)
        assert watcher.stdout is not None
        self._input = watcher.stdin
        self._state.state = "starting"
        with self._control_lock:
            os.write(control, json.dumps(watch_order).encode() + b"\n")
            self._control = control
        self._read_output(watcher.stdout.fileno())
        status = watcher.wait()
        with self._control_lock:
            self._control = -1
            os.close(control)
        watcher.stdout.close()
        return status

    def _read_output(self, output: int) -> None:
        """Read to the end: a ready line, or the results of load, as fast as somebody takes them."""
        first = b""
        while data := os.read(output, 65536):
            if self._order.role == "load":
                self._state.state = "ready"
                self._output.put(data)
            elif self._state.state == "starting" and len(first) < _MAX_READY_BYTES:
                first += data
                for line in first.splitlines():
                    self._read_ready(line)

    def _read_ready(self, line: bytes) -> None:
        try:
            url = urlsplit(str(json.loads(line)["url"]))
            port = url.port
            pid = int(json.loads(self._locate_file("lock").read_bytes())[0])
        except (OSError, ValueError, LookupError, TypeError):
            return
        if port is not None and url.scheme in ("http", "https"):
            # It keeps its port when it restarts, so its URL stays valid.
            self._port, self._state.pid = port, pid
            listen = self._order.listen
            host = self._address if listen in ("", "0.0.0.0", "::") else listen
            self._state.url = f"{url.scheme}://{format_host(host)}:{port}"
            self._state.state = "ready"

    def _make_command(self) -> list[str]:
        order = self._order
        if order.role == "load":
            return module_command(*order.arguments)
        command = module_command("pd.cli", order.role, *order.arguments)
        command += [f"--host={order.listen or self._address}", f"--port={self._port}"]
        if order.role == "prefill":
            command.append(f"--bootstrap-port={order.bootstrap_port}")
        if order.role == "proxy":
            command.append(f"--discover=file:{self._locate_file('nodes')}")
        if self._has_key:
            command.append(f"--cluster-key-file={self._directory / 'cluster.key'}")
        return command

    def _locate_file(self, suffix: str) -> Path:
        return self._directory / f"{self._order.name}.{suffix}"

    def _fetch_page(self, path: str) -> tuple[int, bytes]:
        """Fetch a page of our own process, whatever names its certificate has. We send no secret.

        Raises OSError or ValueError.
        """
        return fetch(self._state.url + path, *_PAGE_BOUNDS, context=_ANY_CERTIFICATE)

    def _check_proxy(self) -> None:
        """Note once a second the nodes in use by the proxy, and why it does not serve."""
        while True:
            time.sleep(_CHECK_SECONDS)
            if self._state.state != "ready":
                continue
            problem = ""
            try:
                used = _USED_NODE.findall(self._fetch_page("/metrics")[1].decode())
                self._state.uses = used[:MAX_PROCESSES]
                status, body = self._fetch_page("/readiness")
                problem = "" if status == 200 else body.decode(errors="replace")
            except (OSError, ValueError) as error:
                problem = f"does not answer: {error}"
            if self._state.state == "ready":
                self._state.detail = shorten_text(problem, _TEXT_CHARACTERS)


def make_environment(order: Process) -> dict[str, str]:
    """Make a process's environment from the raylet's (the operator's) and the file's.

    We do not start from ours, because Ray changes it: workers without CPUs compute on one thread.
    """
    lines = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    variables = dict(os.fsdecode(line).split("=", 1) for line in lines if b"=" in line)
    environment = {k: v for k, v in variables.items() if not k.startswith("RAY_")}
    if order.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return environment | order.environment


def make_state_directory(name: str = "") -> Path:
    """Make the directory of a deployment, or the one of all deployments (XDG Base Directory).

    Raises SetupError.
    """
    try:
        home = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
        path = Path(home, "pd", "clusters", name)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise SetupError(f"no directory for state: {error}; set XDG_STATE_HOME") from None
    return path
