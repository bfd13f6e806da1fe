"""Processes of two releases of pd in one deployment: readiness and handshakes name both, in
whichever process, and no answer of theirs is mixed."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from other_releases import PROGRAM, later_release, old_build
from processes import Process, free_port, wait_until
from tiny import tiny_model, tiny_node

from pd.bootstrap import handshake
from pd.core.errors import HandshakeError
from pd.core.release import RELEASE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)

LATER = "9.0.0"
NODE = ("--load-format", "dummy", "--kv-cache-tokens", "512", "--transfer-backend", "tcp")
ADVICE = "--cluster-key-file"


class Started:
    """Processes of this release and of another one."""

    def __init__(self, stack: ExitStack, logs: Path, env: dict[str, str]) -> None:
        self._stack, self._logs, self._env = stack, logs, env

    def start(self, *command: str, other: bool) -> Process:
        name = f"{command[0]}-{'other' if other else 'own'}.log"
        program: dict[str, Any] = {"program": PROGRAM, "env": self._env} if other else {}
        process = Process(*command, "--port", str(free_port()), log=self._logs / name, **program)
        self._stack.callback(process.stop)
        return process

    def node(self, role: str, *, other: bool) -> Process:
        registry = ("--bootstrap-port", str(free_port())) if role == "prefill" else ()
        model = ("--model", str(tiny_model()), *NODE, *registry)
        return self.start(role, *model, other=other)

    def proxy(self, prefill: Process, decode: Process, *, other: bool) -> Process:
        nodes = ("--prefill", prefill.url, "--decode", decode.url)
        return self.start("proxy", *nodes, other=other)

    def log(self, name: str) -> str:
        return (self._logs / f"{name}.log").read_text()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def readiness(proxy: Process) -> str:
    return httpx.get(f"{proxy.url}/readiness", timeout=10).text


def test_a_node_of_a_later_release_is_named_by_the_proxy_and_in_handshakes(
    stack: ExitStack, tmp_path: Path
) -> None:
    started = Started(stack, tmp_path, later_release(tmp_path, LATER))
    prefill = started.node("prefill", other=True)
    decode = started.node("decode", other=False)
    proxy = started.proxy(prefill, decode, other=False)
    wait_until(lambda: LATER in readiness(proxy), 60, lambda: readiness(proxy))
    assert f"it runs pd {LATER} (protocol" in readiness(proxy)
    assert f"this proxy pd {RELEASE}: run the same release" in readiness(proxy)
    assert ADVICE not in readiness(proxy)
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}
    answer = httpx.post(f"{proxy.url}/generate", json=body, timeout=60)
    assert (answer.status_code, LATER in answer.text) == (503, True)
    refused = handshake_refusal(stack, prefill)
    assert "version differs" in refused
    assert LATER in refused and RELEASE in refused


def handshake_refusal(stack: ExitStack, prefill: Process) -> str:
    """What a decode node of this release is told, which no proxy would send there."""
    own = tiny_node("decode")
    stack.callback(own.stop)
    info = prefill.server_info()
    url, instance = info["endpoints"]["bootstrap"], info["instance_id"]
    with pytest.raises(HandshakeError) as raised:
        handshake(url, own.node.own, expected_instance=instance, timeout=30)
    return str(raised.value)


@pytest.mark.full
def test_a_proxy_of_a_later_release_names_both_and_so_do_the_nodes(
    stack: ExitStack, tmp_path: Path
) -> None:
    started = Started(stack, tmp_path, later_release(tmp_path, LATER))
    prefill, decode = (started.node(role, other=False) for role in ("prefill", "decode"))
    proxy = started.proxy(prefill, decode, other=True)
    wait_until(lambda: RELEASE in readiness(proxy), 60, lambda: readiness(proxy))
    assert f"it runs pd {RELEASE}, this proxy pd {LATER}" in readiness(proxy)
    assert ADVICE not in readiness(proxy)
    assert prefill.healthy() and decode.healthy()


@pytest.mark.full
def test_nodes_of_a_build_that_states_no_release_are_named(
    stack: ExitStack, tmp_path: Path
) -> None:
    started = Started(stack, tmp_path, env_of_old_build(tmp_path))
    prefill, decode = (started.node(role, other=True) for role in ("prefill", "decode"))
    proxy = started.proxy(prefill, decode, other=False)
    wait_until(lambda: "(protocol 1)" in readiness(proxy), 60, lambda: readiness(proxy))
    assert readiness(proxy).count(f"this proxy pd {RELEASE}: run the same release") == 2
    assert ADVICE not in readiness(proxy)
    refused = handshake_refusal(stack, prefill)
    assert f"if it runs another release than this node, pd {RELEASE}, run the same" in refused


@pytest.mark.full
def test_a_proxy_of_a_build_that_states_no_release_blames_no_key(
    stack: ExitStack, tmp_path: Path
) -> None:
    started = Started(stack, tmp_path, env_of_old_build(tmp_path))
    prefill, decode = (started.node(role, other=False) for role in ("prefill", "decode"))
    proxy = started.proxy(prefill, decode, other=True)
    wait_until(lambda: "an earlier pd" in started.log("decode-own"), 60)
    wait_until(lambda: "not ready" in readiness(proxy), 60, lambda: readiness(proxy))
    assert ADVICE not in readiness(proxy)
    assert "run the same release of pd" in started.log("decode-own")


def env_of_old_build(directory: Path) -> dict[str, str]:
    env = old_build(directory)
    if env is None:
        pytest.skip("this clone has not the history of that build; its messages are recorded")
    return env
