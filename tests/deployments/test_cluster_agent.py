"""What runs on hosts, and what becomes of it when either end of a connection dies."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from cluster_helpers import (
    foreign_process,
    pids_with,
    spec_of,
    unified_layout,
    wait_gone,
    write,
)
from lacking import skip_or_fail
from processes import wait_until

from pd.cluster import protocol
from pd.cluster.agent import Agent
from pd.cluster.deployment import Deployment, attach, connect, how_it_ended
from pd.cluster.host import Host
from pd.cluster.host_processes import (
    TOKEN_VARIABLE,
    ProcessHandle,
    identity_of,
    kill_all_with,
)
from pd.cluster.reach import Local, NetworkNamespace, Ssh
from pd.cluster.run_directory import ProcessRecord, RunDirectory, new_run_id
from pd.cluster.state import ClusterState, HostState, create_state, forget_state, load_state
from pd.commands.cluster import _up as up
from pd.commands.cluster import report, stop_deployment
from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator

WITHIN = 20.0
SLEEP = ["sleep", "600"]


def new_state(reach: Local | NetworkNamespace | Ssh | None = None) -> ClusterState:
    """A run on this machine alone."""
    known = HostState(reach or Local(), sys.executable, "127.0.0.1")
    return ClusterState("test", new_run_id(), {"here": known}, None)


def connected(state: ClusterState) -> Host:
    hosts, problems = connect(state, threading.Condition())
    assert not problems
    return hosts["here"]


@pytest.fixture
def state() -> Iterator[ClusterState]:
    made = new_state()
    yield made
    for name in ("here", "there"):
        kill_all_with(made.token_on(name))


@pytest.fixture
def host(state: ClusterState) -> Iterator[Host]:
    host = connected(state)
    yield host
    host.disconnect()
    wait_gone(state.token)


@pytest.fixture
def foreign() -> Iterator[int]:
    """The pid of a process that looks like those of the tests."""
    with foreign_process(*SLEEP) as pid:
        yield pid


def start(host: Host, name: str, *command: str) -> protocol.ProcessState:
    return host.start(protocol.StartProcess(name, list(command), {}))


def wait_ended(host: Host, name: str) -> protocol.ProcessState:
    wait_until(lambda: host.processes[name].ended, WITHIN)
    return host.processes[name]


# ---- life and death


def test_processes_end_with_the_connection(state: ClusterState, foreign: object) -> None:
    host = connected(state)
    start(host, "one", *SLEEP)
    start(host, "two", *SLEEP)
    wait_until(lambda: len(pids_with(state.token)) == 2, WITHIN)
    host.disconnect()
    wait_gone(state.token)


def test_kept_processes_are_found_again_and_stopped(state: ClusterState, foreign: object) -> None:
    host = connected(state)
    pid = start(host, "one", *SLEEP).pid
    host.tell(protocol.Keep())
    host.disconnect()
    wait_until(lambda: pids_with(state.token) == [pid], WITHIN)

    running, problems = attach(state)
    assert not problems
    (process,) = running.processes
    assert (process.name, process.state.pid, process.running) == ("one", pid, True)
    assert running.stop()
    assert process.state.ended
    wait_gone(state.token)
    assert not Path(running.hosts["here"].run_directory).exists()


def test_an_end_is_told_with_its_status_and_the_last_lines(host: Host) -> None:
    start(host, "one", "sh", "-c", "echo why >&2; exit 3")
    ended = wait_ended(host, "one")
    assert (how_it_ended(ended), ended.log) == ("ended with status 3", ["why"])
    start(host, "two", *SLEEP)
    host.signal("two", signal.SIGKILL)
    assert how_it_ended(wait_ended(host, "two")) == "was killed by SIGKILL"


def test_what_a_killed_process_leaves_behind_is_killed(
    state: ClusterState, host: Host, foreign: object
) -> None:
    start(host, "one", "sh", "-c", "setsid sleep 600 & sleep 600")
    wait_until(lambda: len(pids_with(state.token)) == 3, WITHIN)
    host.signal("one", signal.SIGKILL)
    wait_ended(host, "one")
    assert len(pids_with(state.token)) == 2
    host.tell(protocol.Close())
    wait_gone(state.token)


@pytest.mark.parametrize("end", ["close", "disconnect"])
def test_a_host_leaves_alone_what_another_one_runs_on_the_same_machine(
    end: str, state: ClusterState
) -> None:
    known = dict.fromkeys(("here", "there"), state.hosts["here"])
    state = msgspec.structs.replace(state, hosts=known)
    hosts, problems = connect(state, threading.Condition())
    assert not problems
    stays = start(hosts["here"], "one", *SLEEP).pid
    start(hosts["there"], "one", "sh", "-c", "setsid sleep 600 & sleep 600")
    wait_until(lambda: len(pids_with(state.token_on("there"))) == 3, WITHIN)
    if end == "close":
        hosts["there"].tell(protocol.Close(remove=True))
    hosts["there"].disconnect()
    wait_gone(state.token_on("there"))
    assert pids_with(state.token) == [stays]
    hosts["here"].disconnect()
    wait_gone(state.token)


def test_a_pid_that_now_belongs_to_another_process_is_left_alone(
    state: ClusterState, foreign: int
) -> None:
    host = connected(state)
    start(host, "one", *SLEEP)
    directory = Path(host.run_directory)
    host.disconnect()
    wait_gone(state.token)
    # What is recorded has the foreign process's pid, and started a tick earlier.
    identity = identity_of(foreign)
    assert identity is not None
    older = msgspec.structs.replace(identity, started=identity.started - 1)
    record = ProcessRecord(older, protocol.StartProcess("one", SLEEP, {}))
    (directory / "one.process").write_bytes(msgspec.json.encode(record))

    assert ProcessHandle.of(older) is None
    running, _ = attach(state)
    (process,) = running.processes
    assert process.state.pid == foreign
    assert process.state.ended
    running.hosts["here"].signal("one", signal.SIGKILL)
    assert running.stop()


@pytest.mark.parametrize("left", [0, 40])
def test_a_damaged_record_keeps_nothing_from_being_shown_and_stopped(
    left: int, state: ClusterState, foreign: object
) -> None:
    create_state(state)
    host = connected(state)
    start(host, "one", *SLEEP)
    start(host, "two", *SLEEP)
    host.tell(protocol.Keep())
    host.disconnect()
    os.truncate(Path(host.run_directory, "one.process"), left)

    running, problems = attach(state)
    assert not problems
    assert [process.name for process in running.processes] == ["two"]
    assert len(pids_with(state.token)) == 2
    assert running.stop()
    wait_gone(state.token)
    assert load_state(state.deployment) is None


def test_a_deployment_that_says_nothing_any_more_is_given_up(state_home: Path) -> None:
    program = "from pd.cluster import agent, protocol; protocol.AGENT_LEASE = 0.5; agent.main()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as agent:
        assert agent.stdin is not None
        agent.stdin.write(protocol.encode(protocol.OpenRun("test/run/here", "token-of-lease")))
        agent.stdin.write(protocol.encode(protocol.StartProcess("one", SLEEP, {})))
        agent.stdin.flush()
        assert agent.wait(WITHIN) == 0
    assert (state_home / "pd/clusters/test/run/here/one.process").exists()
    assert not pids_with("token-of-lease")


def test_a_host_that_answers_nothing_any_more_is_lost(
    state: ClusterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "PING_SECONDS", 0.1)
    monkeypatch.setattr(protocol, "AGENT_LEASE", 0.5)
    host = connected(state)
    agent = agent_pid(host)
    os.kill(agent, signal.SIGSTOP)
    try:
        wait_until(lambda: host.lost, WITHIN)
        assert host.lost == "no answer for 0.5 s"
        with pytest.raises(SetupError, match=r"host here \(this machine\) is lost"):
            start(host, "one", *SLEEP)
    finally:
        os.kill(agent, signal.SIGCONT)
        host.disconnect()


def agent_pid(host: Host) -> int:
    assert host._agent is not None
    assert "pd.cluster.agent" in command_line(host._agent.pid)
    return host._agent.pid


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_what_a_killed_agent_leaves_is_named_and_stopped(
    state: ClusterState, foreign: object
) -> None:
    create_state(state)
    host = connected(state)
    said: list[str] = []
    with Deployment(state, host._changed, {"here": host}, said.append) as running:
        host.start(protocol.StartProcess("one", SLEEP, {}, layout="main", role="unified"))
        wait_until(lambda: pids_with(state.token), WITHIN)
        os.kill(agent_pid(host), signal.SIGKILL)
        wait_until(lambda: host.lost, WITHIN)
        with pytest.raises(SetupError, match=r"is lost: .*status -9; it ran one"):
            running.check()
        assert pids_with(state.token)
    assert not pids_with(state.token)
    assert load_state(state.deployment) is None
    assert (running.logs / "here-one.log").is_file()


def test_one_file_is_up_once(state: ClusterState) -> None:
    create_state(state)
    with pytest.raises(SetupError, match="is up already"):
        create_state(new_state())
    # The end of another run does not forget this one.
    forget_state(new_state())
    assert load_state(state.deployment) == state
    forget_state(state)
    assert load_state(state.deployment) is None


def test_a_full_disk_leaves_no_record_that_keeps_a_deployment_from_starting(
    state: ClusterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(state: object) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(SetupError, match="No space left on device"):
        patch.setattr("pd.cluster.state.msgspec.json.encode", full)
        create_state(state)
    assert load_state(state.deployment) is None
    create_state(state)
    forget_state(state)


def test_a_full_disk_leaves_no_process_that_nobody_would_find_again(
    state: ClusterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RunDirectory.write

    def full(run: RunDirectory, name: str, content: bytes) -> None:
        if name.endswith(".process"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(run, name, content)

    with agent_here(state) as agent:
        with monkeypatch.context() as patch:
            patch.setattr(RunDirectory, "write", full)
            with pytest.raises(OSError, match="No space left on device"):
                agent._start(protocol.StartProcess("one", SLEEP, {}))
        assert not pids_with(state.token)
        # Neither does it keep another one from having the name.
        started = agent._start(protocol.StartProcess("one", SLEEP, {}))
        assert pids_with(state.token) == [started.pid]


@contextlib.contextmanager
def agent_here(state: ClusterState) -> Iterator[Agent]:
    """The agent of the state's host in this process, with nobody at the other end. What it has
    started is stopped at the end."""
    source, sink = os.pipe()
    agent = Agent(source, sink)
    agent._open(protocol.OpenRun(state.run_on("here"), state.token_on("here")))
    try:
        yield agent
    finally:
        agent._stop_all()
        agent._selector.close()
        os.close(source)
        os.close(sink)


def test_a_place_where_no_run_can_be_recorded_is_named(
    state: ClusterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    with pytest.raises(SetupError, match="cannot write /proc/nowhere/"):
        create_state(state)
    monkeypatch.delenv("XDG_STATE_HOME")

    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.raises(SetupError, match="set XDG_STATE_HOME"):
        load_state(state.deployment)


def test_a_deployment_whose_logs_cannot_be_written_is_stopped_all_the_same(host: Host) -> None:
    state = msgspec.structs.replace(new_state(), log_directory="/proc/nowhere")
    create_state(state)
    said: list[str] = []
    running = Deployment(state, host._changed, {"here": host}, said.append)
    start(host, "one", *SLEEP)
    assert running.stop()
    assert host.processes["one"].ended
    assert any("cannot write /proc/nowhere/here-one.log" in line for line in said), said


def test_a_deployment_is_stopped_though_nobody_can_be_told(
    state: ClusterState, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in ``pd-launch cluster up FILE 2>&1 | tee log`` after Ctrl-C, which ends ``tee``, too."""
    create_state(state)
    start(host, "one", *SLEEP)
    reader, writer = os.pipe()
    os.close(reader)
    broken = open(writer, "w")  # noqa: SIM115 (its end raises, too)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", broken)
        report("nobody reads this")
        stop_deployment(Deployment(state, host._changed, {"here": host}, report), 5.0)
        with pytest.raises(BrokenPipeError):
            broken.close()
        report("nor this")
    assert host.processes["one"].ended
    assert load_state(state.deployment) is None


def test_a_command_that_cannot_be_one_is_refused_and_the_host_stays(host: Host) -> None:
    with pytest.raises(SetupError, match="one cannot be started: embedded null byte"):
        start(host, "one", "sleep", "6\0")
    assert start(host, "one", *SLEEP).pid
    assert not host.lost


def test_a_deployment_that_cannot_be_detached_is_stopped(
    state: ClusterState,
    host: Host,
    state_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create_state(state)
    start(host, "one", *SLEEP)
    running = Deployment(state, host._changed, {"here": host}, print)
    monkeypatch.setattr("pd.commands.cluster.start_deployment", lambda *_, **__: running)
    # In the place of the record that it is detached.
    (state_home / "pd/clusters/test/state.part").mkdir()
    file = write(tmp_path / "one.yaml", spec_of({"here": {"local": True}}, **unified_layout()))
    with pytest.raises(SetupError, match=r"cannot write .*/state\.json: Is a directory"):
        up(argparse.Namespace(file=file, wait=1.0, grace=5.0, detach=True))
    wait_gone(state.token)
    assert load_state(state.deployment) is None


# ---- files and secrets


def test_files_of_a_run_are_for_its_user_only(host: Host) -> None:
    host.write("cluster.key", b"secret")
    directory = Path(host.run_directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "cluster.key").stat().st_mode & 0o777 == 0o600
    assert host.read("cluster.key") == b"secret"
    host.tell(protocol.Close())
    assert not (directory / "cluster.key").exists()


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "", "a/b", "."])
def test_files_elsewhere_are_refused(host: Host, name: str) -> None:
    with pytest.raises(SetupError, match="no name of a file"):
        host.read(name)
    with pytest.raises(SetupError, match="no name of a file"):
        host.write(name, b"")


def test_a_long_file_is_read_in_parts_from_its_end(host: Host) -> None:
    content = os.urandom(protocol.MAX_CHUNK_BYTES * 2 + 17)
    host.write("long", content)
    assert host.read("long") == content
    assert host.read("long", limit=protocol.MAX_CHUNK_BYTES + 5) == content[-(1 << 20) - 5 :]


def test_environments_are_in_no_command_line_and_no_file(host: Host) -> None:
    host.start(protocol.StartProcess("one", SLEEP, {"PD_API_KEY": "a-secret-of-this-test"}))
    agent = agent_pid(host)
    pid = host.processes["one"].pid
    # Linux shows none for an instant after a process has begun with its program.
    wait_until(
        lambda: b"a-secret-of-this-test" in Path(f"/proc/{pid}/environ").read_bytes(), WITHIN
    )
    for process in (agent, pid):
        assert "a-secret-of-this-test" not in command_line(process)
    for path in Path(host.run_directory).rglob("*"):
        assert b"a-secret-of-this-test" not in path.read_bytes()


def test_processes_that_begin_programs_all_the_time_are_killed(tmp_path: Path) -> None:
    """Linux shows no environment of a process for an instant after it has begun a program."""
    again = tmp_path / "again"
    again.write_text('#!/bin/sh\nexec "$0"\n')
    again.chmod(0o755)
    for number in range(100):
        token = f"{new_run_id()}-{number}"
        process = subprocess.Popen([again], env={**os.environ, TOKEN_VARIABLE: token})
        try:
            assert process.pid in kill_all_with(token), number
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("key", ["secret\nof-this-test", "secret\u20acof-this-test"])
def test_a_key_that_is_no_header_is_refused_and_not_shown(host: Host, key: str) -> None:
    """A server that is there is not asked."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/workers"
        with pytest.raises(SetupError, match=r"cannot ask .*/workers: a header") as refused:
            host.fetch(url, 1.0, {"Authorization": f"Bearer {key}"})
    assert "of-this-test" not in refused.value.message
    assert not any("of-this-test" in line for line in host._errors)


# ---- ways to a host


@pytest.mark.parametrize(
    ("reach", "python", "why"),
    [
        (Local(), "/nowhere/python", "/nowhere/python: No such file"),
        (NetworkNamespace("pd-nowhere"), sys.executable, "pd-nowhere"),
        (Local(), "false", "its agent ended with status 1"),
        (Ssh("nobody@127.0.0.1", port=9), sys.executable, "Connection refused"),
    ],
    ids=["no interpreter", "no namespace", "no agent", "no sshd"],
)
def test_a_host_that_cannot_be_reached_is_named_with_the_reason(
    reach: Local | NetworkNamespace | Ssh, python: str, why: str
) -> None:
    if isinstance(reach, Ssh) and shutil.which("ssh") is None:
        skip_or_fail("this needs openssh-client")
    host = Host("far", reach, python, "127.0.0.1", threading.Condition())
    with pytest.raises(SetupError, match=rf"host far \(.*\) cannot be reached: .*{why}"):
        host.open(protocol.OpenRun("test/run/far", "token"))
    host.disconnect()


def test_a_directory_that_is_not_there_is_named(state: ClusterState) -> None:
    nowhere = msgspec.structs.replace(state.hosts["here"], directory="/nowhere")
    state = msgspec.structs.replace(state, hosts={"here": nowhere})
    _, problems = connect(state, threading.Condition())
    assert problems == {"here": "host here (this machine): the directory /nowhere is not there"}


def test_ssh_takes_no_character_of_an_argument_for_its_own() -> None:
    reach = Ssh("user@far", port=2222, identity="/keys/a b", known_hosts="/known hosts")
    hostile = "$(touch /tmp/x); 'quoted' \"&|<>"
    command = reach.command(["echo", hostile, "two words"])
    assert command[-3:-1] == ["--", "user@far"]
    # The other side's shell sees what was meant.
    said = subprocess.run(["sh", "-c", command[-1]], capture_output=True, text=True, check=True)
    assert said.stdout == f"{hostile} two words\n"
    for option in ("BatchMode=yes", "StrictHostKeyChecking=yes", "IdentitiesOnly=yes"):
        assert option in command
    assert 'UserKnownHostsFile="/known hosts"' in command
