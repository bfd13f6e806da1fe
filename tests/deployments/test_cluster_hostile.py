"""A control service and processes that answer anything at all do no harm to the operator."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
from processes import python_path
from ray_hosts import OPERATOR, ROOT, write_spec

from pd.cluster import orders
from pd.cluster.client import ControlAddress, ControlClient
from pd.cluster.deployment import DeploymentRecord, make_deployment_id, open_deployment
from pd.cluster.spec import RaySettings
from pd.cluster.supervisor import Supervisor
from pd.core.errors import SetupError
from pd.util.printable import escape_text
from pd.util.secret_files import write_secret_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ESCAPES = "\x1b]0;owned\x07\x1b[2J\r\n\u202e\x9b31m"


class HostileControl:
    """A control service with the right key, whose answers a test chooses."""

    def __init__(self, answer: Callable[[dict[str, Any]], bytes]) -> None:
        self._answer = answer
        self.requests: list[dict[str, Any]] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        public, secret = zmq.curve_keypair()
        self._socket.curve_server, self._socket.curve_secretkey = True, secret
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = ControlAddress("127.0.0.1", port, public.decode())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over.is_set():
            if self._socket.poll(50):
                self.requests.append(json.loads(self._socket.recv()))
                self._socket.send(self._answer(self.requests[-1]))

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._context.destroy(linger=0)


def start_and_close(service: type[Any]) -> Iterator[Any]:
    """Yield a function that starts services, and close these afterwards."""
    with contextlib.ExitStack() as stack:
        yield lambda answer: stack.enter_context(contextlib.closing(service(answer)))


@pytest.fixture
def control() -> Iterator[Any]:
    yield from start_and_close(HostileControl)


def record(tmp_path: Path, service: HostileControl) -> tuple[Path, dict[str, str]]:
    """A deployment whose control service is this one, and the operator's environment."""
    file = write_spec(tmp_path / "cluster.yaml", nodes=[{"role": "unified"}], proxy={})
    state = tmp_path / "state" / "pd" / "clusters"
    state.mkdir(parents=True)
    content = msgspec.json.encode(DeploymentRecord(service.address, zmq.curve_keypair()))
    write_secret_file(state / f"{make_deployment_id(file)}.json", content)
    environment = {"XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": python_path(ROOT)}
    return file, os.environ | environment


def launch(
    file: Path, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", OPERATOR, "cluster", *arguments, str(file)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, errors="replace", timeout=120
    )


def list_files(directory: Path) -> set[str]:
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


def state(**fields: Any) -> dict[str, Any]:
    base = {"name": "main-proxy", "layout": "main", "role": "proxy", "state": "ready"}
    return base | fields


HOSTILE_STATES = {
    "a name that leads elsewhere": state(name="../../../etc/cron.d/x"),
    "an absolute name": state(name="/etc/passwd"),
    "a name with a line break": state(name="main-proxy\n"),
    "a name with an escape sequence": state(name="main\x1b[2J"),
    "a role that is none": state(role="root"),
    "a state that is none": state(state=-999),
    "a long text": state(detail="x" * 100_000),
    "too many processes": None,
    "no JSON": b"\x80\x04cposix\nsystem\n",
    "a huge answer": b'{"error": "' + b"x" * (12 << 20) + b'"}',
}


@pytest.mark.parametrize("what", HOSTILE_STATES)
def test_answers_that_make_no_sense_are_refused_in_one_line(control: Any, what: str) -> None:
    content = HOSTILE_STATES[what]
    processes = [state(name=f"p{n}") for n in range(600)] if content is None else [content]
    raw = content if isinstance(content, bytes) else json.dumps({"processes": processes}).encode()
    service = control(lambda request: raw)
    client = ControlClient(service.address, zmq.curve_keypair())
    with pytest.raises(SetupError) as problem:
        client.send_request(orders.ReadStates(), 5.0)
    assert problem.value.message.isprintable() and len(problem.value.message) < 500
    client.close()


def test_texts_of_hosts_control_no_terminal_and_write_no_other_file(
    control: Any, tmp_path: Path
) -> None:
    def answer(request: dict[str, Any]) -> bytes:
        told = state(detail=ESCAPES, address=ESCAPES, url=f"http://x/{ESCAPES}")
        if request["type"] == "read":
            first = request.get("offset", 0) == 0
            return msgspec.json.encode(orders.Reply(data=b"a log" if first else b""))
        if request["type"] in ("remove", "end_service"):
            return json.dumps({"error": f"no{ESCAPES}"}).encode()
        return json.dumps({"processes": [told]}).encode()

    file, environment = record(tmp_path, control(answer))
    before = list_files(tmp_path)
    for action in ("status", "down"):
        done = launch(file, environment, action)
        assert done.returncode == 1
        text = (done.stdout + done.stderr).replace("\n", "")
        assert text.isprintable(), ascii(text)
        assert "forbidden" not in text and "Traceback" not in text
    logs = f"state/pd/clusters/{make_deployment_id(file)}.logs"
    expected = {f"{logs}/main-proxy.{suffix}" for suffix in ("log", "metrics", "json")}
    assert list_files(tmp_path) - before == expected


def test_logs_without_end_are_cut(
    control: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pd.cluster import deployment

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(deployment, "_MAX_LOG_BYTES", 1 << 20)
    endless = msgspec.json.encode(orders.Reply(data=b"x" * orders.MAX_PART_BYTES))
    service = control(lambda request: endless)
    found = deployment.Deployment("name", DeploymentRecord(service.address, zmq.curve_keypair()))
    found._collect_logs([orders.ProcessState("p", "main", "proxy")], lambda line: None)
    assert (tmp_path / "pd/clusters/name.logs/p.log").stat().st_size == 1 << 20
    found.client.close()


def test_a_service_that_does_not_prove_its_key_learns_nothing(control: Any) -> None:
    service = control(lambda request: b"{}")
    other_key = zmq.curve_keypair()[0].decode()
    claimed = msgspec.structs.replace(service.address, public_key=other_key)
    client = ControlClient(claimed, zmq.curve_keypair())
    with pytest.raises(SetupError, match="no answer"):
        client.send_request(orders.Apply([], "the cluster key"), 1.0)
    assert service.requests == []
    client.close()


class HostileJobs:
    """A Jobs server whose answers a test chooses, and the requests that it gets."""

    def __init__(self, answers: Callable[[str], bytes]) -> None:
        self.requests: list[str] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(handler) -> None:
                length = int(handler.headers.get("Content-Length", 0))
                content = handler.rfile.read(length).decode()
                self.requests.append(f"{handler.command} {handler.path} {handler.headers}{content}")
                handler.send_response(200)
                handler.end_headers()
                handler.wfile.write(answers(handler.path))

            do_POST = do_GET

            def log_message(handler, *arguments: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def jobs() -> Iterator[Any]:
    yield from start_and_close(HostileJobs)


HOSTILE_JOBS = {
    "no JSON": b"\x80\x04cposix\nsystem\n",
    "another type": b"[1, 2]",
    "a status that is none": json.dumps({"status": ESCAPES * 1000}).encode(),
    "escape sequences": json.dumps({"status": "FAILED", "message": f"a\n{ESCAPES}b"}).encode(),
    "a huge answer": b"x" * (9 << 20),
    "no port": json.dumps({"status": "SUCCEEDED", "logs": "control service on port 0"}).encode(),
    "no log": b'{"status": "SUCCEEDED", "logs": null}',
}


@pytest.mark.parametrize("what", HOSTILE_JOBS)
def test_up_survives_a_jobs_server_that_answers_anything(
    jobs: Any, tmp_path: Path, what: str
) -> None:
    server = jobs(lambda path: HOSTILE_JOBS[what])
    ray = {"address": server.address}
    nodes = [{"role": "unified"}]
    secret = {"PD_API_KEY": "secret of the operator"}
    file = write_spec(
        tmp_path / "cluster.yaml", nodes=nodes, proxy={}, ray=ray, pass_environment=[*secret]
    )
    before = list_files(tmp_path)
    environment = {"XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": python_path(ROOT)}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "token of the operator"}
    done = launch(file, os.environ | environment | token | secret, "up")
    assert done.returncode == 1, done.stderr
    text = done.stdout + done.stderr
    assert text.rstrip().isprintable() and len(text) < 1500 and server.address in text, ascii(text)
    assert "forbidden" not in text and "Traceback" not in text
    assert list_files(tmp_path) == before
    # It learns the token of Ray, which it asks for, and no secret of the deployment.
    assert "Authorization: Bearer token of the operator" in server.requests[0]
    assert "secret of the operator" not in "".join(server.requests)


def test_a_service_that_a_jobs_server_names_learns_nothing_without_the_operators_key(
    jobs: Any, control: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "token")
    monkeypatch.setattr(
        ControlClient,
        "send_request",
        functools.partialmethod(ControlClient.send_request, seconds=2),
    )
    service = control(lambda request: b"{}")
    log = f"control service on port {service.address.port}"
    server = jobs(lambda path: json.dumps({"status": "SUCCEEDED", "logs": log}).encode())
    with pytest.raises(SetupError, match="no answer"):
        open_deployment("name", RaySettings(server.address), False, print)
    assert service.requests == [] and list_files(tmp_path) == set()


@pytest.mark.parametrize(
    ("token", "problem"), [("", "no token"), ("token", "would travel unencrypted")]
)
def test_a_ray_cluster_without_a_token_or_a_fence_is_refused(
    token: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    with pytest.raises(SetupError, match=f"{problem}.* or give --trust-network"):
        open_deployment("name", RaySettings("192.0.2.1:8265"), False, print)


def test_a_head_without_the_operators_key_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pd.cluster.control", "name", "run", "127.0.0.1", "0"]
    environment = os.environ | {"PYTHONPATH": python_path(ROOT)}
    done = subprocess.run(
        [*command, str(tmp_path / "key")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "No such file" in line and "ray.key_file" in line


@pytest.mark.parametrize(
    "code",
    [
        "import ray",
        "pickle.loads(b'N.')",
        "from pickle import Unpickler; Unpickler(None)",
        "import subprocess; subprocess.run(['true'])",
        "os.fork()",
    ],
)
def test_the_operators_process_of_these_tests_ends_when_it_unpickles_or_starts_a_program(
    code: str,
) -> None:
    """Otherwise the tests that use it would show nothing."""
    guarded = OPERATOR.replace("from pd.cli import launch", code)
    done = subprocess.run([sys.executable, "-c", guarded], capture_output=True, text=True)
    assert done.returncode == 99 and "forbidden to the operator" in done.stderr


def test_escapes_are_shown_not_sent() -> None:
    assert escape_text(ESCAPES).isprintable() and "\\x1b" in escape_text(ESCAPES)
    assert escape_text("Grüße, 你好") == "Grüße, 你好"


def test_a_process_that_announces_anything_is_at_its_own_host_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(Supervisor, "_supervise_process", lambda self: None)
    order = orders.Process("main-decode-0", "main", "decode", [])
    supervisor = Supervisor("name", msgspec.json.encode(order), "", "10.0.0.7")
    supervisor._locate_file("lock").write_text("[1, 2]")
    for line in (
        b'{"url": "http://evil.example:80"}',
        b'{"url": "ftp://10.0.0.7:21"}',
        b'{"url": "http://10.0.0.7:99999"}',
        b'{"url": ["x"]}',
        b"\xff\xfe",
    ):
        supervisor._read_ready(line)
    found = msgspec.json.decode(supervisor.renew_lease([]), type=orders.ProcessState)
    assert found.url == "http://10.0.0.7:80"
