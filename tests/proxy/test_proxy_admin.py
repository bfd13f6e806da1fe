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
from typing import TYPE_CHECKING, Any

import pytest
from proxy_tokenizers import byte_level

from pd.core.errors import SetupError, UsageError
from pd.proxy.server import Proxy, ProxyConfig, ProxyThread

if TYPE_CHECKING:
    from pathlib import Path

    from proxy_cluster import Cluster


def test_health_readiness_and_models(cluster: Cluster) -> None:
    cluster.pair()
    client = cluster.client(served_model_name="nice-name")
    assert client.get("/health").status_code == 200
    assert client.get("/readiness").json() == {"status": "ready"}
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [m["id"] for m in listed["data"]] == ["nice-name", "fake"]
    assert listed["data"][0]["max_model_len"] == 200
    assert client.get("/v1/models/fake").json()["id"] == "fake"
    for model in ("nice-name", "fake"):
        body = {"model": model, "prompt": [5], "max_tokens": 1}
        assert client.post("/v1/completions", json=body).json()["model"] == model


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
from pd.proxy.server import ProxyConfig, serve
assert not {"torch", "transformers"} & sys.modules.keys()
config = ProxyConfig(prefill=[sys.argv[1]], decode=[sys.argv[2]], port=0)
asyncio.run(serve(config, lambda url, name: print(url, name, flush=True)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_finish(cluster: Cluster, number: int) -> None:
    import threading

    import httpx

    from pd.core.messages import Finish

    prefill, decode = cluster.pair(auto=False)
    command = [sys.executable, "-c", _PROGRAM, prefill.url, decode.url]
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


def test_the_proxy_never_imports_torch() -> None:
    program = (
        "import pkgutil, importlib, sys, pd.proxy\n"
        "for m in pkgutil.iter_modules(pd.proxy.__path__): "
        "importlib.import_module('pd.proxy.' + m.name)\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert json.loads(result.stdout) == [], result.stderr
