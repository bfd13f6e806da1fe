"""A deployment over four hosts of network namespaces, started by its YAML file."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import netns
import pytest
from cluster_helpers import TOKENS, kill_host, pids_with, spec_of, write

from pd.cluster.spec_file import load_spec
from pd.cluster.start import up
from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pd.cluster.deployment import Deployment

NAMES = ("client", "proxy", "prefill", "decode")
REQUEST = {"input_ids": TOKENS, "sampling_params": {"max_new_tokens": 6, "temperature": 0}}
ASK = """
import httpx, json, sys
body = json.loads(sys.argv[2])
answer = httpx.post(sys.argv[1] + "/generate", json=body, trust_env=False, timeout=60)
print(answer.text)
"""


@pytest.fixture
def network() -> Iterator[dict[str, netns.Host]]:
    netns.require()
    with netns.lan(len(NAMES)) as hosts:
        yield dict(zip(NAMES, hosts, strict=True))


def four_hosts(network: dict[str, netns.Host], backend: str) -> dict[str, Any]:
    """The deployment of these tests."""
    # Without this, UCX finds shared memory between namespaces of one machine.
    env = {"UCX_TLS": "tcp"} if backend == "nixl" else {}
    flags = {"trust-network": True} if backend == "nixl" else {}
    hosts = {
        name: {"netns": host.namespace, "address": host.address, "environment": env}
        for name, host in network.items()
    }
    nodes = [
        {"role": role, "host": role, "devices": ["cpu"], "flags": flags}
        for role in ("prefill", "decode")
    ]
    proxy = {"host": "proxy", "listen": "0.0.0.0"}
    return spec_of(hosts, nodes=nodes, proxy=proxy, transfer_backend=backend, load=["client"])


def ask_from_client(running: Deployment) -> Any:
    client = running.hosts["client"]
    url = running.layouts["main"].url
    spec_python = running.state.hosts["client"].python
    state = client.run("ask", [spec_python, "-c", ASK, url, json.dumps(REQUEST)])
    assert state.status == 0, client.read("ask.log")
    return json.loads(client.read("ask.out"))


def transferred(running: Deployment, backend: str) -> float:
    """Bytes of KV that the decode node got over the backend."""
    (decode,) = [p for p in running.servers if p.state.role == "decode"]
    page = decode.host.fetch(f"{decode.local_url}/metrics").body.decode()
    found = re.search(rf'^pd_transfer_bytes_total{{backend="{backend}"}} (\S+)', page, re.M)
    assert found is not None, page
    return float(found[1])


@pytest.mark.parametrize("backend", ["tcp", "nixl"])
def test_four_hosts_serve_and_one_that_dies_is_named(
    backend: str, network: dict[str, netns.Host], tmp_path: Path
) -> None:
    file = write(tmp_path / "four.yaml", four_hosts(network, backend))
    said: list[str] = []
    with up(load_spec(file), file, with_load=True, report=said.append) as running:
        token = running.state.token
        assert running.layouts["main"].url.startswith(f"http://{network['proxy'].address}:")
        answer = ask_from_client(running)
        assert len(answer.get("output_ids", [])) == 6, answer
        assert transferred(running, backend) > 0
        kill_host(network["decode"])
        with pytest.raises(SetupError, match=r"host decode .* is lost.*it ran main-decode-0"):
            while True:
                running.check()
                running.wait(1)
    assert not pids_with(token)
    collected = {path.name for path in running.logs.iterdir()}
    assert {f"{role}-main-{role}-0.log" for role in ("prefill", "decode")} <= collected
    assert {"proxy-main-proxy.log", "proxy-main-proxy.metrics", "client-ask.out"} <= collected
    assert (running.logs / "prefill-main-prefill-0.json").is_file()
    print("\n".join(said))
