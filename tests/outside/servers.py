"""Starts a proxy and a node of every role in this process, and looks at them from outside.

We record the metrics and the routes while the servers are made, because neither can be read from
outside completely: labels appear in ``/metrics`` only once something was counted, and nodes have
no OpenAPI document.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from unittest import mock

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 62,
    "eos_token_id": 63,
    "tie_word_embeddings": False,
}
_JSON = {"Content-Type": "application/json"}
# Requests to a proxy without nodes: method, path, headers, body.
_PROXY_REQUESTS: tuple[tuple[str, str, dict[str, str], str], ...] = (
    ("GET", "/health", {}, ""),
    ("GET", "/readiness", {}, ""),
    ("GET", "/ping", {}, ""),
    ("GET", "/version", {}, ""),
    ("GET", "/v1/models", {}, ""),
    ("GET", "/v1/models/none", {}, ""),
    ("GET", "/workers", {}, ""),
    ("GET", "/server_info", {}, ""),
    ("GET", "/load", {}, ""),
    ("GET", "/no-such-path", {}, ""),
    ("GET", "/generate", {}, ""),
    ("GET", "/health", {"X-Long": "x" * 100_000}, ""),
    ("GET", "/health", {f"X-{number}": "" for number in range(300)}, ""),
    ("POST", "/v1/completions", _JSON, '{"model": "m", "prompt": [1]}'),
    ("POST", "/v1/completions", _JSON, '{"model": "m", "prompt": [1], "max_tokens": -1}'),
    ("POST", "/v1/completions", _JSON, '{"model": "m", "prompt": [1], "stream": true}'),
    ("POST", "/v1/completions", _JSON, "{"),
    ("POST", "/v1/completions", {"Content-Type": "text/plain"}, "{}"),
    ("POST", "/v1/completions", {**_JSON, "Host": "other.example"}, "{}"),
    ("POST", "/v1/completions", {**_JSON, "Origin": "http://other.example"}, "{}"),
    ("POST", "/v1/chat/completions", _JSON, '{"model": "m", "messages": []}'),
    ("POST", "/generate", _JSON, '{"input_ids": [1]}'),
    ("POST", "/tokenize", _JSON, '{"model": "m", "prompt": "a"}'),
    ("POST", "/abort_request", _JSON, '{"rid": "unknown"}'),
    ("POST", "/workers", _JSON, '{"role": "cook", "url": "http://127.0.0.1:1"}'),
    ("DELETE", "/workers/unknown", {}, ""),
)
_NODE_REQUESTS: tuple[tuple[str, str, dict[str, str], str], ...] = (
    ("GET", "/health", {}, ""),
    ("GET", "/server_info", {}, ""),
    ("GET", "/no-such-path", {}, ""),
    ("GET", "/drain", {}, ""),
    ("POST", "/health", _JSON, ""),
    ("POST", "/flush_cache", _JSON, ""),
    ("POST", "/drain?migrate=2", _JSON, ""),
    ("POST", "/drain?migrate=1", _JSON, ""),
    ("POST", "/undrain", _JSON, ""),
    ("POST", "/abort_request", _JSON, '{"rid": "unknown"}'),
    ("POST", "/abort_request", _JSON, '{"abort_all": true}'),
    ("POST", "/abort_request", _JSON, '{"unknown": 1}'),
    ("POST", "/undrain", {**_JSON, "Host": "other.example"}, ""),
)
_HANDSHAKES: tuple[tuple[str, str, dict[str, str], str], ...] = (
    ("GET", "/health", {}, ""),
    ("POST", "/bootstrap/handshake", _JSON, "{"),
)


class RunningServers(contextlib.ExitStack):
    """A proxy and nodes, which run until the context ends.

    Args:
        node_server, node_config, kv_events_config, proxy_server, proxy_config: classes of pd.
    """

    def __init__(
        self,
        node_server: Any,
        node_config: Any,
        kv_events_config: Any,
        proxy_server: Any,
        proxy_config: Any,
    ) -> None:
        super().__init__()
        self._make_node, self._make_proxy = node_server, proxy_server
        self._node_config, self._proxy_config = node_config, proxy_config
        self._kv_events = kv_events_config
        self._collectors: dict[str, list[Any]] = {}
        self._apps: dict[str, list[Starlette]] = {}
        self._urls: dict[str, str] = {}
        self._bootstrap_urls: dict[str, str] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        model = Path(self.enter_context(tempfile.TemporaryDirectory()))
        (model / "config.json").write_text(json.dumps(_MODEL))
        settings: dict[str, Any] = {
            "model": model,
            "device": "cpu",
            "dtype": "float32",
            "load_format": "dummy",
            "kv_cache_tokens": 256,
            "page_size": 16,
            "transfer_backend": "tcp",
        }
        events = self._kv_events(
            enable_kv_cache_events=True, publisher="zmq", endpoint="tcp://127.0.0.1:0"
        )
        try:
            for role in ("prefill", "decode", "unified"):
                self._start_node(role, role, settings)
            more = {"elastic": "auto", "kv_events_config": events}
            self._start_node("elastic", "prefill", settings | more)
            with self._recording("proxy"):
                proxy = self._make_proxy(self._proxy_config(port=0))
                self.callback(proxy.stop)
                proxy.start(0)
            self._urls["proxy"] = proxy.url
        except BaseException:
            self.close()
            raise
        return self

    def _start_node(self, name: str, role: str, settings: dict[str, Any]) -> None:
        with self._recording(name):
            server = self._make_node(self._node_config(role=role, **settings))
            self.callback(server.stop)
            server.start()
        self._urls[name] = server.url
        if server.bootstrap_url:
            self._bootstrap_urls[name] = server.bootstrap_url

    @contextlib.contextmanager
    def _recording(self, name: str) -> Iterator[None]:
        """Record the metrics and applications that this server makes."""
        collectors = self._collectors[name] = []
        apps = self._apps[name] = []
        register = CollectorRegistry.register

        def record_collector(registry: CollectorRegistry, collector: Any) -> None:
            collectors.append(collector)
            register(registry, collector)

        def recording(initialize: Callable[..., None]) -> Callable[..., None]:
            def record_app(app: Starlette, *args: Any, **settings: Any) -> None:
                apps.append(app)
                initialize(app, *args, **settings)

            return record_app

        with (
            mock.patch.object(CollectorRegistry, "register", record_collector),
            # FastAPI does not call the constructor of its base class.
            mock.patch.object(FastAPI, "__init__", recording(FastAPI.__init__)),
            mock.patch.object(Starlette, "__init__", recording(Starlette.__init__)),
        ):
            yield

    def describe_metrics(self) -> dict[str, dict[str, str]]:
        """Describe type and labels of every metric of every server, by their names."""
        return {
            server: dict(metric for each in collectors for metric in _describe_metrics(each))
            for server, collectors in self._collectors.items()
        }

    def describe_routes(self) -> dict[str, list[str]]:
        """List methods and paths of every server."""
        return {
            server: sorted(
                f"{method} {route.path}"
                for app in apps
                for route in app.routes
                if isinstance(route, Route)
                for method in route.methods or ()
            )
            for server, apps in self._apps.items()
        }

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document of the proxy."""
        document: dict[str, Any] = httpx.get(f"{self._urls['proxy']}/openapi.json").json()
        return document

    def describe_answers(self) -> dict[str, dict[str, Any]]:
        """Describe the answers of each kind of server to requests with a known outcome."""
        return {
            "proxy": _ask_all(self._urls["proxy"], _PROXY_REQUESTS),
            "node": _ask_all(self._urls["decode"], _NODE_REQUESTS),
            "elastic node": _ask_all(self._urls["elastic"], _NODE_REQUESTS),
            "bootstrap": _ask_all(self._bootstrap_urls["prefill"], _HANDSHAKES),
        }


def _describe_metrics(collector: Any) -> Iterator[tuple[str, str]]:
    """Yield names and descriptions of the metrics of one collector."""
    for family in collector.collect():
        # Without a sample only the object that makes the samples knows its labels.
        source = family if hasattr(family, "_labelnames") else collector
        labels = getattr(source, "_labelnames", ())
        yield family.name, f"{family.type}({', '.join(labels)})"


def _ask_all(url: str, requests: tuple[Any, ...]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    with httpx.Client(base_url=url, timeout=20) as client:
        for method, path, headers, body in requests:
            shown = ", ".join(f"{name}: {value}" for name, value in list(headers.items())[:2])
            request = f"{method} {path} {shown[:60]} {body}".strip()
            answer = client.request(method, path, headers=headers, content=body or None)
            answers[" ".join(request.split())] = _describe_answer(answer)
    return answers


def _describe_answer(answer: httpx.Response) -> dict[str, Any]:
    facts: dict[str, Any] = {"status": answer.status_code}
    kind = answer.headers.get("content-type")
    if kind is not None:
        facts["content type"] = kind
    if "Retry-After" in answer.headers:
        facts["Retry-After"] = answer.headers["Retry-After"]
    if "Allow" in answer.headers:
        facts["Allow"] = sorted(answer.headers["Allow"].split(", "))
    if kind == "application/json":
        facts["body"] = _shape(answer.json())
    return facts


def _shape(value: Any) -> Any:
    """Reduce JSON to its keys and types, but keep ``code``, ``type`` and ``param`` of errors."""
    if isinstance(value, dict):
        return {
            key: inner if key in ("code", "type", "param", "kind") else _shape(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_shape(value[0])] if value else []
    return "null" if value is None else type(value).__name__
