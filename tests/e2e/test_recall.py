"""The embedded model notices a wrong page: it recalls needles from long prompts, or it does not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cluster import Cluster
from embedded.heldout import Example, is_right, recall_examples

from pd.embedded import EMBEDDED_MODEL
from pd.proxy.server import ProxyConfig, ProxyThread

if not EMBEDDED_MODEL.is_dir():
    pytest.skip("the embedded model is not in this version", allow_module_level=True)

LENGTH = 1000
# Of the model's own bar (98 % up to 2,000 tokens); damaged pages cost far more.
SHARE = 0.95


def ask(url: str, example: Example) -> Any:
    """The whole conversation; its last answer is judged."""
    messages = [{"role": m.role, "content": m.content} for m in example.before]
    messages += [{"role": "user", "content": example.turns[-1].question}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 32}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)


def serve(cluster: Cluster) -> ProxyThread:
    urls = {role: [n.url for n in getattr(cluster, role)] for role in ("prefill", "decode")}
    return ProxyThread(ProxyConfig(**urls, port=0))


def settings(**more: Any) -> dict[str, Any]:
    return {"kv_cache_tokens": 32768, "chunked_prefill_size": 512, **more}


@pytest.mark.parametrize("backend", ["tcp", "fake"])
@pytest.mark.parametrize("prompts", [20, pytest.param(100, marks=pytest.mark.full)])
@pytest.mark.timeout(600)
def test_recall_survives_the_split(backend: str, prompts: int) -> None:
    examples = recall_examples(LENGTH, prompts)
    with Cluster(EMBEDDED_MODEL, **settings(transfer_backend=backend)) as cluster:
        with serve(cluster) as proxy, ThreadPoolExecutor(prompts) as pool:
            answers = list(pool.map(lambda e: ask(proxy.url, e).json(), examples))
        cluster.wait_idle()
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    right = sum(is_right(e, text) for e, text in zip(examples, texts, strict=True))
    assert right >= SHARE * prompts, [
        (e.turns[-1], t) for e, t in zip(examples, texts, strict=True)
    ]
