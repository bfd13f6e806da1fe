"""Life and end of the processes that ``pd-launch`` starts."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from processes import LAUNCH, Process, Stream, deployment, free_port, wait_until

from pd import cli
from pd.commands.demo import _serve_until_interrupt
from pd.commands.processes import Children
from pd.core.errors import SetupError
from pd.embedded import EMBEDDED_MODEL
from pd.proxy.config import ProxyConfig
from pd.proxy.server import ProxyThread
from pd.util.starvation import read_run_delays, thread_run_delay

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

# What docs/operations.md says of an idle process.
END_SECONDS = 0.5


@contextmanager
def process(tmp_path: Path, *command: object, program: Sequence[str] = LAUNCH) -> Iterator[Process]:
    log = tmp_path / f"{command[0]}.log"
    running = Process(*map(str, command), log=log, program=program)
    try:
        running.ready()
        yield running
    finally:
        running.stop()


def unified(
    tmp_path: Path, *more: object, program: Sequence[str] = LAUNCH
) -> AbstractContextManager[Process]:
    flags = ["--model", EMBEDDED_MODEL, "--device", "cpu", "--cpu-threads", 1, *more]
    flags += ["--port", 0, "--kv-cache-tokens", 8192]
    return process(tmp_path, "unified", *flags, program=program)


@contextmanager
def unified_and_proxy(tmp_path: Path) -> Iterator[tuple[Process, Process]]:
    with (
        unified(tmp_path) as node,
        process(tmp_path, "proxy", "--unified", node.url, "--port", 0) as proxy,
    ):
        yield node, proxy


@pytest.fixture(scope="module")
def lasting_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A node that tests of proxies leave as they found it."""
    with unified(tmp_path_factory.mktemp("lasting"), program=()) as node:
        yield node


@contextmanager
def proxy_and_target(
    role: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Process, Process]]:
    """A proxy with a node, and whichever of both has this role and is to end."""
    if role == "unified":
        with unified_and_proxy(tmp_path) as (node, proxy):
            yield proxy, node
        return
    node = request.getfixturevalue("lasting_node")
    with process(tmp_path, "proxy", "--unified", node.url, "--port", 0) as proxy:
        yield proxy, proxy


def stream(proxy: Process, tokens: int) -> Stream:
    """A request that is being answered."""
    started = Stream(proxy.url, [1, 2, 3], tokens)
    started.wait_first()
    assert started.error is None
    return started


def refuses_new_requests(process: Process) -> bool:
    path = "/readiness" if process.command[0] == "proxy" else "/health"
    return httpx.get(process.url + path).status_code == 503


def ended(process: Process) -> int:
    """The exit status; checks that the ready line was all it printed."""
    output, _ = process.child.communicate(timeout=60)
    assert output == ""
    assert "Traceback" not in process.log.read_text()
    return process.child.returncode


def seconds_to_end(process: Process) -> float:
    """From SIGTERM to the end of an idle process, which must be a clean one.

    Times do not count in which a thread of the process was ready to run and got no CPU, or this
    thread did when it was to notice the end.
    """
    pid, own = process.child.pid, threading.get_native_id()
    began, first = time.monotonic(), run_delays_of(pid)
    last = dict(first)
    process.child.terminate()
    own_before = thread_run_delay(own)
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        own_before = thread_run_delay(own)
        last |= run_delays_of(pid)
        time.sleep(0.005)
    took, late = time.monotonic() - began, thread_run_delay(own) - own_before
    last |= run_delays_of(pid)
    assert ended(process) == 0
    starved = sum(delay - first.get(thread, 0.0) for thread, delay in last.items())
    print(f"{process.command[0]}: {took:.2f} s, of which {starved + late:.2f} s without a CPU")
    return took - starved - late


def run_delays_of(pid: int) -> dict[int, float]:
    """Run delay of every thread of a process."""
    return read_run_delays(f"/proc/{pid}/task") or {}


@contextmanager
def few_files() -> Iterator[None]:
    """Processes begin with a low limit on open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1000, hard - 1), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_ready_line_says_who_serves_where(tmp_path: Path) -> None:
    with few_files(), unified_and_proxy(tmp_path) as (node, proxy):
        for running, role in ((node, "unified"), (proxy, "proxy")):
            ready = running.ready()
            limits = Path(f"/proc/{running.child.pid}/limits").read_text()
            found = re.search(r"^Max open files +(\d+) +(\d+)", limits, re.MULTILINE)
            assert found is not None
            assert found[1] == found[2], "raised to the hard limit at the start"
            assert set(ready) == {"event", "role", "url", "instance_id"}
            assert (ready["event"], ready["role"]) == ("ready", role)
            assert httpx.get(ready["url"] + "/health").status_code == 200
        assert node.server_info()["instance_id"] == node.ready()["instance_id"]
        assert httpx.get(proxy.url + "/readiness").status_code == 200
        lost = httpx.post(node.url + "/v1/chat/completions", json={})
        assert lost.status_code == 404
        assert "go to the proxy" in lost.json()["error"]["message"]
        for running in (proxy, node):
            assert seconds_to_end(running) < 2 * END_SECONDS, "other tests run beside this one"


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.parametrize("backend", ["tcp", "nixl", "mooncake"])
def test_idle_processes_of_a_split_end_within_half_a_second(backend: str, tmp_path: Path) -> None:
    flags = ["--transfer-backend", backend]
    with deployment(EMBEDDED_MODEL, tmp_path, node_flags=flags, program=LAUNCH) as split:
        assert split.stream([1, 2, 3], 4).join().succeeded()
        for running in (split.proxy, *split.nodes):
            assert seconds_to_end(running) < END_SECONDS


@pytest.mark.parametrize("role", [pytest.param("unified", marks=pytest.mark.full), "proxy"])
def test_sigterm_finishes_what_runs_and_refuses_what_comes(
    role: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with proxy_and_target(role, tmp_path, request) as (proxy, target):
        answer = stream(proxy, 400)
        target.child.terminate()
        wait_until(lambda: refuses_new_requests(target), 10.0)
        refused = Stream(proxy.url, [1, 2, 3], 4).join()
        assert refused.status == 503
        assert answer.join().succeeded(), answer
        assert ended(target) == 0


@pytest.mark.parametrize("role", [pytest.param("unified", marks=pytest.mark.full), "proxy"])
def test_a_second_signal_ends_at_once_and_the_client_hears_of_it(
    role: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with proxy_and_target(role, tmp_path, request) as (proxy, target):
        answer = stream(proxy, 4000)
        target.child.terminate()
        wait_until(lambda: refuses_new_requests(target), 10.0)
        target.child.send_signal(signal.SIGINT)
        assert ended(target) == 0
        answer.join()
        assert answer.error is not None and not answer.done
        assert len(answer.output) < 4000


@pytest.mark.full
def test_the_drain_ends_when_its_time_is_over(tmp_path: Path) -> None:
    with (
        unified(tmp_path, "--drain-timeout", 0.2) as node,
        process(tmp_path, "proxy", "--unified", node.url, "--port", 0) as proxy,
    ):
        answer = stream(proxy, 4000)
        node.child.terminate()
        assert ended(node) == 0
        assert "did not finish within --drain-timeout" in node.log.read_text()
        assert answer.join().error is not None


def test_the_api_key_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PD_API_KEY", "secret")
    with process(tmp_path, "proxy", "--port", 0, program=()) as proxy:
        models = proxy.url + "/v1/models"
        assert httpx.get(models).status_code == 401
        given = {"Authorization": "Bearer secret"}
        assert httpx.get(models, headers=given).status_code == 200
        assert httpx.get(proxy.url + "/health").status_code == 200
        assert "secret" not in proxy.log.read_text()


def test_an_open_proxy_is_warned_about(tmp_path: Path) -> None:
    with process(tmp_path, "proxy", "--host", "0.0.0.0", "--port", 0, program=()) as proxy:
        assert "without an API key" in proxy.log.read_text()


def test_the_proxy_and_refused_commands_never_import_torch() -> None:
    code = (
        "import sys; from pd.cli import launch_parser; launch_parser();"
        "import pd.proxy.server, pd.launch, pd.commands.yaml_config;"
        "from pd.transfer.registry import check_backend; check_backend('fake');"
        "import pd.models.config; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- what stands around a process


def children(pid: int) -> list[int]:
    """Processes that the main thread of a process has started."""
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_a_signal_to_all_processes_of_a_proxy_that_starts_ends_it_cleanly(
    number: signal.Signals, tmp_path: Path
) -> None:
    """As a terminal and a service manager send it; the processes import their modules."""
    running = Process(
        "proxy", "--workers", "2", "--port", "0", log=tmp_path / "log", program=LAUNCH
    )
    try:
        wait_until(lambda: len(children(running.child.pid)) == 2, 30.0)
        for pid in (*children(running.child.pid), running.child.pid):
            os.kill(pid, number)
        output, _ = running.child.communicate(timeout=60)
        log = running.log.read_text()
        assert (running.child.returncode, output) == (0, ""), log
        assert "Traceback" not in log and "ERROR" not in log, log
    finally:
        running.stop()


@pytest.mark.parametrize("closed", [pytest.param("<&-", marks=pytest.mark.full), "<&- >&- 2>&-"])
def test_a_proxy_with_closed_standard_streams_serves(closed: str, tmp_path: Path) -> None:
    port = free_port()
    command = f"exec {sys.executable} -m pd.cli proxy --workers 2 --port {port} {closed}"
    running = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE)

    def serves() -> bool:
        assert running.poll() is None
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        except httpx.TransportError:  # the parent listens before its children have begun to answer
            return False

    try:
        wait_until(serves, 120.0)
        for pid in (running.pid, *children(running.pid)):
            streams = [os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)]
            assert not any("socket" in stream or "anon" in stream for stream in streams), streams
    finally:
        running.terminate()
        assert running.wait(60) == 0


def test_a_ready_line_that_cannot_be_printed_ends_the_process_with_a_line(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "pd.cli", "proxy", "--port", "0", "--log-level", "error"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ended.returncode == 1
    assert ended.stderr == (
        "pd-launch proxy: cannot print the ready line on standard output: No space left on device\n"
    )


def test_a_proxy_that_cannot_serve_its_port_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the last descriptor went to the port itself."""

    async def none_left(self: object, sockets: object = None) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("pd.net.connections.GuardedServer.startup", none_left)
    with pytest.raises(SetupError, match=r"cannot serve http://127.0.0.1:\d+: .*Too many open"):
        ProxyThread(ProxyConfig(port=0)).start()


def test_what_the_machine_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/var/x")

    assert cli._find_status("pd-launch x", full) == 1
    assert capsys.readouterr().err == "pd-launch x: /var/x: No space left on device\n"


# ---- the demo


def demo(log: Path, *flags: str) -> subprocess.Popen[str]:
    with log.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "pd.cli", "demo", *flags],
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
        )


def urls(text: str) -> list[str]:
    return re.findall(r"http://127\.0\.0\.1:\d+(?=  )", text)


def refuses(url: str) -> bool:
    try:
        httpx.get(url)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # it ended with the connection in its queue
        return False
    return False


def test_the_demo_answers_shows_its_times_serves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    running = demo(tmp_path / "log", "--serve")
    try:
        assert running.stdout is not None
        shown = ""
        for line in running.stdout:
            shown += line
            if "until Ctrl-C" in line:
                break
        addresses = urls(shown)
        assert len(addresses) == 3, shown
        assert "What does the prefill node do?" in shown
        assert "The prefill node computes the KV cache of the prompt" in shown
        times = dict(re.findall(r"^  (\w+) +([\d.]+) ms", shown, re.MULTILINE))
        assert set(times) == {*STAGES, "TTFT", "total"}
        assert all(float(seconds) > 0 for seconds in times.values()), times
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        answer = httpx.post(f"{addresses[-1]}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
    finally:
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=60)
    assert running.returncode == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text() == ""
    assert all(refuses(url) for url in addresses)


@pytest.mark.full
def test_the_demos_example_names_the_key_and_does_not_show_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(Children):
        def check_alive(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setenv("PD_API_KEY", "a-secret-of-this-test")
    _serve_until_interrupt("http://127.0.0.1:8000", Interrupted(Path()))
    shown = capsys.readouterr().out
    assert "a-secret-of-this-test" not in shown
    assert '-H "Authorization: Bearer $PD_API_KEY"' in shown


STAGES = ("queue", "prefill", "bootstrap", "transfer", "decode")


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_demo_that_is_interrupted_leaves_nothing_behind(
    number: signal.Signals, tmp_path: Path
) -> None:
    running = demo(tmp_path / "log")
    assert running.stdout is not None
    shown = ""
    while len(urls(shown)) < 2:  # both nodes are there, the proxy starts
        shown += running.stdout.readline()
    running.send_signal(number)
    rest, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert all(refuses(url) for url in urls(shown + rest))


@pytest.mark.full
def test_a_demo_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    running = demo(tmp_path / "log")
    assert running.stdout is not None
    shown = ""
    while len(urls(shown)) < 2:
        shown += running.stdout.readline()
    running.kill()
    running.wait()
    wait_until(lambda: all(refuses(url) for url in urls(shown)), 30.0)


@pytest.mark.full
def test_a_demo_that_fails_says_why_and_leaves_nothing_behind(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        running = demo(tmp_path / "log", "--port", str(port))
        shown, _ = running.communicate(timeout=120)
    assert running.returncode == 1
    log = (tmp_path / "log").read_text()
    assert f"cannot listen on 127.0.0.1:{port}" in log
    assert "the proxy ended" in log.splitlines()[-1]
    assert len(urls(shown)) == 2 and all(refuses(url) for url in urls(shown))


@pytest.mark.full
def test_a_node_whose_tensor_parallel_worker_dies_ends_with_status_1(tmp_path: Path) -> None:
    with unified(tmp_path, "--tp-size", 2) as node:
        pid = node.child.pid
        (worker,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(worker), signal.SIGKILL)
        assert ended(node) == 1
        assert "start it again" in node.log.read_text()
