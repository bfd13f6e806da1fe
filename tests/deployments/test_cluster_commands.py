"""``pd-launch cluster up|status|down`` on this machine, with real nodes of the tiny model."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster_helpers import (
    TOKENS,
    Command,
    foreign_process,
    pid_of,
    pids_with,
    run,
    spec_of,
    state_of,
    table,
    unified_layout,
    wait_gone,
    write,
)
from processes import wait_until

from pd.cluster.host_processes import TOKEN_VARIABLE

WITHIN = 30.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A deployment of one unified node."""
    return write(tmp_path / "one.yaml", one_host(main=unified_layout()))


def one_host(**layouts: Any) -> dict[str, Any]:
    return spec_of({"here": {"local": True}}, layouts=layouts)


def token_of(file: Path) -> str:
    state = state_of(file)
    assert state is not None
    return state.token


def ask(url: str) -> Any:
    params = {"max_new_tokens": 4, "temperature": 0}
    body = {"input_ids": TOKENS, "sampling_params": params}
    return httpx.post(f"{url}/generate", json=body, timeout=60).raise_for_status().json()


def test_layouts_are_started_together_shown_and_stopped(tmp_path: Path) -> None:
    file = write(tmp_path / "two.yaml", one_host(a=unified_layout(), b=unified_layout()))
    # The same command line, as far as a list of processes shows it, from somebody else.
    foreign_command = [sys.executable, "-c", "import time; time.sleep(600)", "-m", "pd.cli"]
    with foreign_process(*foreign_command, **{TOKEN_VARIABLE: "another token"}):
        command = Command("up", file, "--detach")
        urls = command.urls()
        assert command.end() == (0, "")
        token = token_of(file)
        assert len(pids_with(token)) == 4
        answers = [ask(url)["output_ids"] for url in (urls["a"], urls["b"])]
        assert answers[0] == answers[1]

        status, out, _ = run("status", file)
        assert status == 0
        rows = {row[1]: row for row in table(out)}
        assert rows.keys() == {"a-proxy", "a-unified-0", "b-proxy", "b-unified-0"}
        assert all(row[6] == "ready" for row in rows.values()), out
        assert rows["a-proxy"][4] == urls["a"]

        status, _, log = run("up", file)
        assert (status, "is up already" in log) == (2, True), log

        file.write_text("what was started is stopped, whatever the file says now")
        status, _, log = run("down", file)
        assert status == 0, log
        assert not pids_with(token)
    logs = tmp_path.glob("state/pd/clusters/*/*/logs/*")
    names = {path.name for path in logs}
    assert {"here-a-proxy.log", "here-b-unified-0.metrics", "here-b-unified-0.json"} <= names
    assert run("down", file)[0] == 0
    status, _, log = run("status", file)
    assert (status, log) == (1, f"{file} is not up\n")


def test_a_process_that_ends_is_named_and_the_rest_is_stopped(file: Path) -> None:
    command = Command("up", file)
    command.urls()
    token = token_of(file)
    os.kill(pid_of(file, "main-unified-0"), signal.SIGKILL)
    status, _ = command.end()
    assert status == 1
    assert "main-unified-0 on host here (this machine) was killed by SIGKILL" in command.log
    assert not pids_with(token)
    assert state_of(file) is None


def test_a_start_that_fails_says_why_and_leaves_nothing(file: Path, tmp_path: Path) -> None:
    spec = one_host(main=unified_layout())
    spec["flags"]["page-size"] = 3
    write(file, spec)
    status, out, log = run("up", file)
    assert (status, out) == (1, "")
    assert "main-unified-0 on host here (this machine) ended with status 2" in log
    assert "--page-size must be one of" in log
    assert state_of(file) is None
    assert not list(tmp_path.glob("state/pd/clusters/*/*/here"))


def test_what_is_not_ready_in_time_is_named(file: Path) -> None:
    status, _, log = run("up", file, "--wait", "0.2")
    assert status == 1
    assert "not ready after 0.2 s: main-unified-0 on host here: starting" in log
    assert state_of(file) is None


@pytest.mark.full
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "down", "SIGKILL"])
def test_everything_stops_with_the_command_in_the_foreground(how: str, file: Path) -> None:
    command = Command("up", file)
    command.urls()
    token = token_of(file)
    assert len(pids_with(token)) == 2
    if how == "down":
        assert run("down", file)[0] == 0
    else:
        command.process.send_signal(getattr(signal, how))
    status, _ = command.end()
    assert status == (-signal.SIGKILL if how == "SIGKILL" else 0), command.log
    wait_gone(token)
    if how == "SIGKILL":
        assert run("status", file)[0] == 1
        # What it could not clean up does not keep it from starting again.
        again = Command("up", file)
        again.urls()
        again.process.terminate()
        assert again.end()[0] == 0
    assert state_of(file) is None


@pytest.mark.full
def test_a_killed_node_is_shown_and_the_rest_still_stopped(tmp_path: Path) -> None:
    nodes = [{"role": role, "host": "here", "devices": ["cpu"]} for role in ("prefill", "decode")]
    layout = {"nodes": nodes, "proxy": {"host": "here"}}
    file = write(tmp_path / "split.yaml", one_host(split=layout))
    assert run("up", file, "--detach")[0] == 0
    token = token_of(file)
    os.kill(pid_of(file, "split-decode-0"), signal.SIGKILL)

    def states() -> dict[str, str]:
        return {row[1]: row[6] for row in table(run("status", file)[1])}

    wait_until(lambda: "not serving" in states()["split-proxy"], WITHIN, states)
    assert states()["split-decode-0"] == "gone"
    assert states()["split-prefill-0"] == "ready"
    assert run("down", file)[0] == 0
    assert not pids_with(token)


@pytest.mark.full
def test_keys_are_in_no_list_of_processes_and_no_file_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cluster.key").write_text("secret-cluster-key-of-this-test")
    monkeypatch.setenv("PD_API_KEY", "secret-api-key-of-this-test")
    spec = one_host(main=unified_layout())
    spec |= {"cluster_key_file": "cluster.key", "pass_environment": ["PD_API_KEY"]}
    file = write(tmp_path / "keys.yaml", spec)
    command = Command("up", file, "--detach")
    url = command.urls()["main"]
    command.end()
    pids = pids_with(token_of(file))
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
    (key_file,) = tmp_path.glob("state/**/cluster.key")
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert httpx.get(f"{url}/v1/models").status_code == 401
    authorized = {"Authorization": "Bearer secret-api-key-of-this-test"}
    assert httpx.get(f"{url}/v1/models", headers=authorized).status_code == 200
    assert run("down", file)[0] == 0
    assert len(lines) == 2
    assert not any(b"secret" in line for line in lines), lines
    kept = [path for path in tmp_path.glob("state/**/*") if path.is_file()]
    assert kept
    assert not any(b"-of-this-test" in path.read_bytes() for path in kept)
