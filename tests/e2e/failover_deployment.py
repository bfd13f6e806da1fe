"""Two prefill and two decode nodes in this process behind a proxy. They can vanish, stand still, be
emptied and lose their link, and come back on the same port."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from typing import TYPE_CHECKING, Any

import httpx
from cluster import start_node, wait_idle, wait_until
from processes import free_port

from pd.proxy.config import ProxyConfig
from pd.proxy.server import ProxyThread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from netns import Host, Lan

    from pd.launch import NodeServer


class Place:
    """A node on a fixed port; peers introduce themselves at any free one.

    Args:
        host: where all of its sockets are; None for loopback.
    """

    def __init__(self, role: str, model: Path, host: Host | None = None, **settings: Any) -> None:
        self.role, self.host = role, host
        self._model = model
        self._settings = settings | {"port": free_port()}
        if host is not None:
            self._settings["host"] = host.address
        self.restart()

    def restart(self) -> None:
        def start() -> NodeServer:
            return start_node(self.role, self._model, **self._settings)

        self.server: NodeServer = start() if self.host is None else self.host.call(start)

    def vanish(self) -> None:
        """End without a word, as a process that is killed."""
        server, node = self.server, self.server.node
        node.control.stop()
        server._http.stop()
        node.step_loop.stop()
        for end in node.ends:
            end.close()
        for transfer in node.transfers:
            transfer.close()
        node.engine.close()

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Hear and say nothing, as a process that is stopped."""
        with self.server.node.core.events.lock:
            yield

    @property
    def busy(self) -> bool:
        return any(True for _ in self.server.node.requests.iter_live())

    @property
    def has_cached(self) -> bool:
        """Whether anything is in the prefix cache."""
        info: Any = self.server.node.server_info()
        return bool(info["pages"]["cached"])


class Answer:
    """A streamed request to ``/generate``, read by a thread of its own."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.texts: dict[int, str] = {}
        self.output_ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.meta: dict[int, dict[str, Any]] = {}
        self.error: Any = None
        self.done = False
        self._url, self._body = url, body | {"stream": True, "incremental": True}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self._url}/generate", json=self._body, timeout=120
            ) as response:
                if response.status_code != 200:
                    self.error = json.loads(response.read())["error"]
                    return
                for line in response.iter_lines():
                    if line:
                        self._take(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.error = repr(error)

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]
            return
        index = event.get("index", 0)
        self.texts[index] = self.texts.get(index, "") + event["text"]
        self.output_ids.setdefault(index, []).extend(event["output_ids"])
        self.meta[index] = event["meta_info"]
        entries = event["meta_info"].get("output_token_logprobs", [])
        self.logprobs.setdefault(index, []).extend(entries)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.output_ids.values()))

    @property
    def failovers(self) -> list[Any]:
        return next((m["failovers"] for m in self.meta.values() if "failovers" in m), [])

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait_over(self) -> None:
        """Wait for the end of the stream, whatever it is."""
        self._thread.join(90)
        assert self.is_over, "the stream did not end"

    def join(self) -> Answer:
        """Wait for the whole answer."""
        self.wait_over()
        assert self.error is None and self.done, self.error
        return self

    def assert_same(self, expected: Answer) -> None:
        """Equal to an undisturbed answer: tokens, text, reasons, counts; log probabilities but for
        rounding."""
        assert self.output_ids == expected.output_ids
        assert self.texts == expected.texts
        for index, meta in self.meta.items():
            other = expected.meta[index]
            for name in ("finish_reason", "prompt_tokens", "completion_tokens"):
                assert meta[name] == other[name], name
        for index, entries in self.logprobs.items():
            for (found, *rest), (right, *others) in zip(
                entries, expected.logprobs[index], strict=True
            ):
                assert rest == others
                assert abs(found - right) < 1e-4


class FailoverDeployment:
    """Nodes and the proxy before them.

    Args:
        counts: of prefill, decode and unified nodes.
        lan: has a host for each node, and joins this machine; None for nodes on loopback, which
            cannot be cut off.
    """

    def __init__(
        self,
        model: Path,
        counts: tuple[int, int, int] = (2, 2, 0),
        lan: Lan | None = None,
        **settings: Any,
    ) -> None:
        self.lan = lan
        roles = ("prefill", "decode", "unified")
        key = None if lan is None else secrets.token_bytes(32)
        hosts: Iterator[Host | None] = iter([None] * sum(counts) if lan is None else lan.hosts)
        made = [
            [Place(role, model, next(hosts), cluster_key=key, **settings) for _ in range(count)]
            for role, count in zip(roles, counts, strict=True)
        ]
        self.prefill, self.decode, self.unified = made
        urls = {
            role: [place.server.url for place in places]
            for role, places in zip(roles, made, strict=True)
        }
        config = ProxyConfig(
            **urls, tokenizer=str(model), policy="round_robin", port=0, cluster_key=key
        )
        self._proxy = ProxyThread(config).start()
        self._client = httpx.Client(base_url=self._proxy.url, timeout=10)

    @property
    def places(self) -> list[Place]:
        return [*self.prefill, *self.decode, *self.unified]

    @property
    def url(self) -> str:
        return self._proxy.url

    def ask(self, body: dict[str, Any]) -> Answer:
        return Answer(self.url, body)

    def involved(self, role: str) -> Place:
        """The node of a role that works on the only request, or has done its part of it, if caches
        were empty before."""
        places = self.prefill if role == "prefill" else self.decode
        busy = [place for place in places if place.busy]
        return (busy or [place for place in places if place.has_cached])[0]

    @contextlib.contextmanager
    def cut_off(self, place: Place) -> Iterator[None]:
        """Nothing passes between a node and all others, the proxy included. The node lives."""
        assert self.lan is not None and place.host is not None
        with self.lan.without(place.host):
            yield

    def uses(self, place: Place) -> bool:
        """Whether the proxy would give a node requests."""
        return place.server.instance_id in self._used()

    def _used(self) -> set[str]:
        workers = self._client.get("/workers").json()["workers"]
        return {worker["instance_id"] for worker in workers if worker["ready"]}

    def wait_whole(self) -> None:
        """Wait until every node is used, nothing is anywhere, and no page is lost."""
        instances = {place.server.instance_id for place in self.places}
        wait_until(lambda: self._used() == instances, 30, lambda: self._client.get("/workers").text)
        for place in self.places:
            wait_idle(place.server, 30)

    def close(self) -> None:
        self._client.close()
        self._proxy.stop()
        for place in self.places:
            place.server.stop()

    def __enter__(self) -> FailoverDeployment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
