"""Fake nodes and proxies for these tests; everything they started is gone afterwards."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_node import FakeNode
from tokenizers_for_tests import byte_level

from pd.proxy.server import ProxyConfig, ProxyThread

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a byte-level tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("model")
    byte_level().save(str(directory / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory)


class Cluster:
    """Makes nodes, proxies and clients, and ends them."""

    def __init__(self, stack: ExitStack, model_dir: str) -> None:
        self._stack = stack
        self.model_dir = model_dir
        self.prefill: list[FakeNode] = []
        self.decode: list[FakeNode] = []
        self.unified: list[FakeNode] = []

    def node(self, role: str, *args: Any, **options: Any) -> FakeNode:
        node = FakeNode(role, *args, **options)
        getattr(self, role).append(node)
        self._stack.callback(node.kill)
        return node

    def pair(self, *args: Any, **options: Any) -> tuple[FakeNode, FakeNode]:
        return self.node("prefill", *args, **options), self.node("decode", *args, **options)

    def proxy(self, *, wait_ready: float = 10.0, text: bool = True, **options: Any) -> ProxyThread:
        """A proxy on all nodes made so far."""
        options.setdefault("tokenizer", self.model_dir if text else None)
        for role in ("prefill", "decode", "unified"):
            options.setdefault(role, [node.url for node in getattr(self, role)])
        thread = ProxyThread(ProxyConfig(port=0, **options))
        self._stack.callback(thread.stop)
        return thread.start(wait_ready)

    def client(self, proxy: ProxyThread | None = None, **options: Any) -> httpx.Client:
        """An HTTP client of a proxy (of a new one)."""
        proxy = proxy or self.proxy(**options)
        return self._stack.enter_context(httpx.Client(base_url=proxy.url, timeout=20))


@pytest.fixture
def cluster(model_dir: str) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, model_dir)


Events = Callable[[httpx.Response], list[Any]]


def read_events(response: httpx.Response) -> list[Any]:
    """The events of a stream; its end (``[DONE]``) is the string ``DONE``."""
    events: list[Any] = []
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            events.append("DONE" if data == "[DONE]" else json.loads(data))
    return events
