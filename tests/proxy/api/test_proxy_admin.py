"""Health, models, tokenization, metrics, and the process around it all."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fake_node import wait_until
from proxy_cluster import wait_for_all
from proxy_tokenizers import byte_level

from pd import __version__
from pd.bench.proxy_processes import list_children
from pd.core.errors import SetupError, UsageError
from pd.core.messages import Finish
from pd.proxy.config import ProxyConfig
from pd.proxy.server import Proxy, ProxyThread, bind_listener
from pd.proxy.text.tokenizer_info import describe_tokenizer

if TYPE_CHECKING:
    from proxy_cluster import Cluster

    from pd.core.messages import Generate


def test_health_readiness_and_models(cluster: Cluster) -> None:
    cluster.pair()
    client = cluster.client(served_model_name=["nice-name", "other-name"])
    assert client.get("/health").status_code == 200
    assert client.get("/readiness").json() == {"status": "ready"}
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [m["id"] for m in listed["data"]] == ["nice-name", "fake"]
    assert listed["data"][0]["max_model_len"] == 200
    assert client.get("/v1/models/fake").json()["id"] == "fake"
    shown = {"nice-name": "nice-name", "other-name": "nice-name", "": "nice-name", "fake": "fake"}
    for model, name in shown.items():
        body = {"model": model, "prompt": [5], "max_tokens": 1}
        assert client.post("/v1/completions", json=body).json()["model"] == name
    assert client.get("/v1/models/other-name").json()["id"] == "nice-name"
    for model in ("nice-name:latest", "third-name"):
        assert client.get(f"/v1/models/{model}").status_code == 404
        body = {"model": model, "prompt": [5], "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code == 404


def test_what_sglangs_and_vllms_tools_ask(cluster: Cluster) -> None:
    cluster.pair(model_path="/models/m")
    client = cluster.client(text=False, api_key="s3cret")
    key = {"Authorization": "Bearer s3cret"}
    for method in ("GET", "POST"):
        ping = client.request(method, "/ping")
        assert (ping.status_code, ping.content) == (200, b"")
    for path in ("/version", "/get_model_info", "/health_generate"):
        assert client.get(path).status_code == 401
    assert client.get("/version", headers=key).json() == {"version": __version__}
    for path in ("/get_model_info", "/model_info"):
        info = client.get(path, headers=key).json()
        assert info["model_path"] == info["tokenizer_path"] == "/models/m"
        assert info["is_generation"] is True
    healthy = client.get("/health_generate", headers=key)
    assert (healthy.status_code, healthy.content) == (200, b"")
    # Both nodes took part.
    (asked,) = cluster.decode[0].generates
    assert asked.params.max_tokens == 2


def test_server_info_is_what_sglangs_benchmark_reads(cluster: Cluster) -> None:
    nodes = cluster.pair(model_path="/models/m")
    cluster.node("decode", model_path="/models/m")
    client = cluster.client(text=False, api_key="s3cret", served_model_name=["nice-name"])
    wait_for_all(client)
    key = {"Authorization": "Bearer s3cret"}
    assert client.get("/server_info").status_code == 401
    wait_until(lambda: client.get("/server_info", headers=key).json()["max_total_num_tokens"] > 400)
    asked = {"input_ids": [5], "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}
    assert client.post("/generate", json=asked, headers=key).status_code == 200
    for path in ("/server_info", "/get_server_info"):
        found = client.get(path, headers=key).json()
        (state,) = found.pop("internal_states")
        assert state["last_gen_throughput"] >= 0.0
        assert state["avg_spec_accept_length"] is None
        info = nodes[1].server_info()
        assert found == {
            "version": __version__,
            "model_path": "/models/m",
            "tokenizer_path": "/models/m",
            "served_model_name": "nice-name",
            "context_length": 200,
            "page_size": info["page_size"],
            "max_total_num_tokens": 2 * info["page_size"] * info["pages"]["total"],
        }


def test_server_info_before_a_node_generates_is_of_those_that_are_there(cluster: Cluster) -> None:
    client = cluster.client(text=False, wait_ready=0)
    assert client.get("/server_info").status_code == 503
    cluster.node("prefill")
    client = cluster.client(text=False, wait_ready=0.5)
    wait_until(lambda: client.get("/server_info").status_code == 200)
    assert client.get("/server_info").json()["max_total_num_tokens"] == 400


def test_load_is_the_number_of_requests_under_way(cluster: Cluster) -> None:
    node = cluster.node("unified", auto=False)
    client = cluster.client(text=False, api_key="s3cret")
    key = {"Authorization": "Bearer s3cret"}
    assert client.get("/load").status_code == 401

    def load() -> Any:
        return client.get("/load", headers=key).json()

    assert load() == {"server_load": 0}
    with ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(client.post, "/generate", json={"input_ids": [5]}, headers=key)
            for _ in range(2)
        ]
        wait_until(lambda: len(node.generates) == 2)
        assert load() == {"server_load": 2}
        for request in node.generates:
            node.say(request, [40], cached_tokens=0, finish=Finish("length"))
        assert all(each.result(20).status_code == 200 for each in asked)
    wait_until(lambda: load() == {"server_load": 0})


@pytest.mark.one_process("changes a constant of a running proxy")
def test_throughput_is_of_the_time_since_it_was_asked(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.proxy.api.compat_api._MIN_SECONDS", 60.0)
    cluster.pair()
    client = cluster.client(text=False)

    def throughput() -> Any:
        return client.get("/server_info").json()["internal_states"][0]["last_gen_throughput"]

    throughput()
    asked = {"input_ids": [5], "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}
    client.post("/generate", json=asked)
    assert throughput() == 0.1
    assert throughput() == 0.0


@pytest.mark.one_process("changes a constant of a running proxy")
def test_health_generate_is_about_tokens(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd.proxy.api.compat_api.HEALTH_SECONDS", 0.3)
    prefill, _ = cluster.pair(auto=False)
    client = cluster.client(text=False, max_queue=1)
    ill = client.get("/health_generate")
    assert ill.status_code == 503
    assert "nothing can be generated" in ill.json()["error"]["message"]
    # A full queue is no illness as long as tokens come.
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(client.post, "/generate", json={"input_ids": [5]})
        wait_until(lambda: len(prefill.generates) == 2)
        request = prefill.generates[1]
        full = client.get("/health_generate")
        assert full.status_code == 503
        assert "no token came" in full.json()["error"]["message"]
        monkeypatch.setattr("pd.proxy.api.compat_api.HEALTH_SECONDS", 20.0)
        health = pool.submit(client.get, "/health_generate")
        while not health.done():
            prefill.say(request, [40])
            time.sleep(0.02)
        assert health.result().status_code == 200
        client.post("/abort_request", json={"abort_all": True})
        assert running.result(20).status_code == 200


@pytest.mark.one_process("each process checks by itself")
def test_many_health_checks_are_one_request_at_a_time(cluster: Cluster) -> None:
    node = cluster.node("unified", auto=False)
    client = cluster.client(text=False, max_queue=4)
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(client.get, "/health_generate") for _ in range(20)]
        answered: list[Generate] = []

        def changed() -> bool:
            return len(node.generates) > len(answered) or all(each.done() for each in asked)

        # On a slow machine some ask only after the first ones have their answer.
        while not all(each.done() for each in asked):
            wait_until(changed)
            assert len(node.generates) <= len(answered) + 1
            for request in node.generates[len(answered) :]:
                node.say(request, [40], finish=Finish("length"))
                answered.append(request)
        assert {each.result().status_code for each in asked} == {200}
    assert len(answered) < 20


@pytest.mark.one_process("reads the log of this process")
def test_nodes_that_do_not_fit_together_are_warned_about_and_named_in_every_503(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.node("prefill", dtype="float32")
    cluster.node("decode", dtype="bfloat16")
    client = cluster.client(text=False, wait_ready=0)
    why = "prefill has dtype 'float32', decode has 'bfloat16'"
    wait_until(lambda: why in caplog.text)
    assert caplog.text.count(why) == 1
    for response in (
        client.get("/readiness"),
        client.post("/generate", json={"input_ids": [5]}),
        client.get("/health_generate"),
    ):
        assert response.status_code == 503
        assert why in response.json()["error"]["message"]


def test_a_503_says_what_is_wrong_with_the_nodes(cluster: Cluster) -> None:
    client = cluster.client(text=False, wait_ready=0, unified=["http://127.0.0.1:9"])
    wait_until(lambda: "cannot connect" in client.get("/workers").text)
    for path, body in (("/generate", {"input_ids": [5]}), ("/v1/completions", {"prompt": [5]})):
        response = client.post(path, json=body)
        assert response.status_code == 503
        assert "http://127.0.0.1:9: cannot connect" in response.json()["error"]["message"]


def test_tokenize_and_detokenize_are_inverse(cluster: Cluster) -> None:
    cluster.pair()
    client = cluster.client()
    for field in ("prompt", "text"):
        answer = client.post("/tokenize", json={field: "hello 😀"}).json()
        assert answer["tokens"] == byte_level().encode("hello 😀").ids
        assert answer["count"] == len(answer["tokens"])
    back = client.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back["text"] == back["prompt"] == "hello 😀"
    assert client.post("/detokenize", json={"tokens": []}).json()["text"] == ""
    raw = {"tokens": [0], "skip_special_tokens": False}
    assert client.post("/detokenize", json=raw).json()["text"] == "<s>"


def test_tokenizer_info_has_what_renders_a_chat(cluster: Cluster, tmp_path: Path) -> None:
    settings = {
        "chat_template": "{{ eos_token }}",
        "eos_token": {"content": "</s>", "lstrip": False},
        "bos_token": "<s>",
        "added_tokens_decoder": {"0": {"content": "<s>"}},
        "additional_special_tokens": ["<s>"],
        "model_max_length": 1000000000000000019884624838656,
        "add_bos_token": True,
        "padding_side": None,
        "scale": 0.5,
        "name_or_path": "/home/somebody/model",
        "vocab_file": "/home/somebody/vocab",
        "long": "x" * 10_000,
        "huge": 10**400,
        "none": float("nan"),
    }
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    cluster.pair()
    client = cluster.client(tokenizer=str(tmp_path), api_key="s3cret")
    assert client.get("/tokenizer_info").status_code == 401
    answer = client.get("/tokenizer_info", headers={"Authorization": "Bearer s3cret"})
    assert answer.json() == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{{ eos_token }}",
        "eos_token": "</s>",
        "bos_token": "<s>",
        "unk_token": None,
        "pad_token": None,
        "sep_token": None,
        "cls_token": None,
        "model_max_length": 1e30,
        "add_bos_token": True,
        "padding_side": None,
        "scale": 0.5,
    }


def test_tokenizer_info_is_bounded() -> None:
    settings = {f"setting {number}": number for number in range(1000)}
    info = describe_tokenizer(settings | {"tokenizer_class": 5}, {"eos_token": "e"}, None)
    assert (info["eos_token"], info["tokenizer_class"]) == ("e", "PreTrainedTokenizerFast")
    assert len(info) < 300
    assert describe_tokenizer({"tokenizer_class": "X"}, {}, "t") == {
        "tokenizer_class": "X",
        "chat_template": "t",
    }


def test_half_a_character_in_a_tokenizers_settings_is_told_as_a_question_mark() -> None:
    info = describe_tokenizer({"a": "\ud800"}, {"eos_token": "\udfff"}, "{{ '\ud800' }}")
    assert (info["a"], info["eos_token"], info["chat_template"]) == ("?", "?", "{{ '?' }}")


def test_a_proxy_without_a_tokenizer_has_no_tokenizer_info(cluster: Cluster) -> None:
    cluster.pair()
    answer = cluster.client(text=False).get("/tokenizer_info")
    assert answer.status_code == 404
    assert "--tokenizer" in answer.json()["error"]["message"]


def test_the_nodes_model_directory_is_the_default_tokenizer(cluster: Cluster) -> None:
    cluster.pair(model_path=cluster.model_dir)
    client = cluster.client(text=False)
    body = client.post("/generate", json={"text": "hello", "sampling_params": {"stop": "x"}}).json()
    assert body["text"]


def test_a_model_directory_on_another_host_leaves_token_ids(cluster: Cluster) -> None:
    cluster.pair(model_path="/not/here")
    client = cluster.client(text=False)
    assert client.post("/generate", json={"text": "hello"}).status_code == 400
    assert client.post("/generate", json={"input_ids": [5]}).status_code == 200


def test_a_broken_chat_template_of_a_node_costs_only_chat(cluster: Cluster, tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    cluster.pair(model_path=str(tmp_path))
    client = cluster.client(text=False)
    assert client.post("/generate", json={"text": "hello"}).json()["text"]
    messages = [{"role": "user", "content": "hello"}]
    response = client.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400
    with pytest.raises(UsageError, match="does not compile"):
        ProxyThread(ProxyConfig(port=0, tokenizer=str(tmp_path))).start()


def test_metrics(cluster: Cluster) -> None:
    prefill, decode = cluster.pair()
    prefill.cached_tokens = 4
    client = cluster.client()
    sampling = {"max_new_tokens": 7}
    client.post("/generate", json={"input_ids": [5] * 6, "sampling_params": sampling})
    client.post("/generate", json={"input_ids": []})
    text = client.get("/metrics").text
    rows = dict(row.rsplit(" ", 1) for row in text.splitlines() if not row.startswith("#"))
    assert rows['pd_proxy_requests_total{endpoint="/generate",outcome="ok"}'] == "1.0"
    refused = 'pd_proxy_requests_total{endpoint="/generate",outcome="invalid_request"}'
    assert rows[refused] == "1.0"
    assert rows["pd_proxy_prompt_tokens_total"] == "6.0"
    assert rows["pd_proxy_cached_tokens_total"] == "4.0"
    assert rows["pd_proxy_output_tokens_total"] == "7.0"
    assert rows["pd_proxy_ttft_seconds_count"] == "1.0"
    assert rows["pd_proxy_e2e_seconds_count"] == "1.0"
    assert float(rows["pd_proxy_itl_seconds_count"]) >= 1
    for stage in ("queue", "bootstrap", "prefill", "transfer", "decode"):
        assert rows[f'pd_proxy_stage_seconds_count{{stage="{stage}"}}'] == "1.0"
    assert rows['pd_proxy_stage_seconds_sum{stage="prefill"}'] == "1.5"
    assert rows[f'pd_proxy_worker_up{{role="decode",url="{decode.url}"}}'] == "1.0"
    assert rows["pd_proxy_running_requests"] == "0.0"


class TestStart:
    def test_a_port_in_use_is_one_line(self, cluster: Cluster) -> None:
        first = cluster.proxy(wait_ready=0)
        port = int(first.url.rsplit(":", 1)[1])
        with pytest.raises(SetupError, match=f"127.0.0.1:{port}.*choose another") as error:
            asyncio.run(Proxy(ProxyConfig(port=port)).start())
        assert "\n" not in error.value.message

    def test_an_address_that_is_not_ours(self) -> None:
        with pytest.raises(SetupError, match=r"203\.0\.113\.1"):
            asyncio.run(Proxy(ProxyConfig(host="203.0.113.1", port=0)).start())

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"policy": "best"}, "cache_aware"),
            ({"max_queue": 0}, "--max-queue"),
            ({"request_timeout": 0}, "--request-timeout"),
            ({"api_key": ""}, "--api-key"),
            ({"tokenizer": "/not/here"}, "/not/here"),
        ],
    )
    def test_what_cannot_work_is_a_usage_error(self, options: Any, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            ProxyThread(ProxyConfig(**options)).start()

    def test_a_tokenizer_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="has no tokenizer"):
            ProxyThread(ProxyConfig(port=0, tokenizer=str(tmp_path))).start()
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(UsageError, match="cannot read"):
            ProxyThread(ProxyConfig(port=0, tokenizer=str(tmp_path))).start()

    def test_secrets_are_not_shown(self) -> None:
        config = ProxyConfig(api_key="s3cret", cluster_key=b"0123456789abcdefs3cret")
        assert "s3cret" not in repr(config)


def test_secrets_are_not_logged(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = b"0123456789abcdef0123456789abcdef"
    cluster.pair(cluster_key=key)
    client = cluster.client(api_key="s3cret", cluster_key=key)
    client.get("/workers", headers={"Authorization": "Bearer s3cret"})
    client.get("/workers", headers={"Authorization": "Bearer wrong-guess"})
    client.post("/flush_cache", headers={"Authorization": "Bearer s3cret"})
    for secret in ("s3cret", "wrong-guess", key.decode()):
        assert secret not in caplog.text


_PROGRAM = """
import asyncio, sys
from pd.proxy.config import ProxyConfig
from pd.proxy.workers.parent import ProxyProcesses
from pd.proxy.server import Proxy, serve, stop_on_signals
assert not {"torch", "transformers"} & sys.modules.keys()
prefill, decode, workers = sys.argv[1:]
config = ProxyConfig(prefill=[prefill], decode=[decode], port=0, workers=int(workers))

async def main():
    proxy = Proxy(config) if config.workers == 1 else ProxyProcesses(config)
    stop_on_signals(proxy)
    await serve(proxy, lambda url, name: print(url, name, flush=True))

asyncio.run(main())
"""


@pytest.mark.one_process("starts a proxy by its command")
@pytest.mark.parametrize(
    ("number", "workers"),
    [
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.full),
        (signal.SIGINT, 1),
        (signal.SIGTERM, 2),
    ],
)
def test_a_signal_lets_requests_finish(cluster: Cluster, number: int, workers: int) -> None:
    import threading

    import httpx

    from pd.core.messages import Finish

    prefill, decode = cluster.pair(auto=False)
    command = [sys.executable, "-c", _PROGRAM, prefill.url, decode.url, str(workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url, _ = process.stdout.readline().split()
        # Nodes that were up are in use when the proxy says that it is ready.
        assert httpx.get(url + "/readiness").status_code == 200
        answers: list[Any] = []

        def post() -> None:
            answers.append(httpx.post(url + "/generate", json={"input_ids": [5]}, timeout=20))

        thread = threading.Thread(target=post)
        thread.start()
        first, second = prefill.wait_generate(), decode.wait_generate()
        os.kill(process.pid, number)
        time.sleep(0.1)
        prefill.say(first, [40])
        decode.say(second, [40, 41], finish=Finish("length"))
        thread.join()
        assert answers[0].json()["output_ids"] == [40, 41]
        assert process.wait(10) == 0


def runs(pid: int) -> bool:
    """Whether a process lives. One whose parent is gone may have ended and wait to be collected."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.one_process("starts a proxy by its command")
def test_processes_whose_parent_is_killed_end_and_free_the_port(cluster: Cluster) -> None:
    prefill, decode = cluster.pair()
    command = [sys.executable, "-c", _PROGRAM, prefill.url, decode.url, "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url, _ = process.stdout.readline().split()
        left = list_children(process.pid)
        assert len(left) >= 2
        process.kill()
        process.wait(10)
    wait_until(lambda: not any(map(runs, left)), 30)
    port = int(url.rpartition(":")[2])
    bind_listener("127.0.0.1", port).close()


def test_the_proxy_never_imports_torch() -> None:
    program = (
        "import pkgutil, importlib, sys, pd.proxy\n"
        "for m in pkgutil.iter_modules(pd.proxy.__path__): "
        "importlib.import_module('pd.proxy.' + m.name)\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert json.loads(result.stdout) == [], result.stderr
