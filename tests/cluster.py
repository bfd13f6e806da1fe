"""Nodes in this process, over real sockets, and a client that speaks tokens to them."""

from __future__ import annotations

import os
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import zmq
from waiting import wait_until as wait_until

from pd.core.config import NodeConfig
from pd.core.errors import PDError, error_from_kind
from pd.core.messages import (
    HEARTBEAT_INTERVAL,
    Abort,
    Failed,
    Finish,
    Generate,
    Output,
    ProxyHeartbeat,
    StepFailed,
    StepOutputs,
    TakeBack,
    TakenBack,
    TokenLogprobs,
    decode_message,
    encode_message,
)
from pd.core.sampling_params import SamplingParams
from pd.launch import NodeServer
from pd.scheduling import calibration
from pd.util.waker import Waker

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

torch.set_num_threads(1)
# Nodes of tests learn the time of their steps while they run.
calibration.SECONDS = 0.05


def start_node(role: str, model: Path, **settings: Any) -> NodeServer:
    """Start a node on free ports of loopback."""
    settings.setdefault("kv_cache_tokens", 8192)
    # PD_TEST_DEVICE=cuda runs the same tests on a GPU, still in float32.
    settings.setdefault("device", os.environ.get("PD_TEST_DEVICE", "cpu"))
    settings.setdefault("dtype", "float32")
    # PD_TEST_OVERLAP=on runs them with steps planned ahead, as on a GPU.
    settings.setdefault("overlap_schedule", os.environ.get("PD_TEST_OVERLAP", "auto"))
    # PD_TEST_SPECULATION=ngram runs them with drafts.
    settings.setdefault("speculative_algorithm", os.environ.get("PD_TEST_SPECULATION", "none"))
    # PD_TEST_ELASTIC=auto runs them with nodes that can do what every role does.
    settings.setdefault("elastic", os.environ.get("PD_TEST_ELASTIC", "off"))
    # What a node chooses by itself depends on what is installed here.
    settings.setdefault("transfer_backend", "tcp")
    # Answers are compared with transformers' under the sampling that a test asks for.
    settings.setdefault("generation_config", "none")
    server = NodeServer(NodeConfig(role=role, model=model, **settings))
    server.start()
    return server


@dataclass
class Stream:
    """What one choice of a request has received, each position once and in order."""

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    finish: Finish | None = None
    first_at: float | None = None


@dataclass
class Pending:
    """A request that was sent."""

    rid: str
    room: bytes
    nodes: list[NodeServer]
    choices: list[Stream]
    sent_at: float
    done: threading.Event = field(default_factory=threading.Event)
    error: PDError | None = None
    outputs: list[Output] = field(default_factory=list)
    cached_tokens: int | None = None
    transferred_bytes: int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    ended_at: float | None = None
    produced: Sequence[int] = ()
    taken_back: bool | None = None
    ends_after: Collection[int] = ()
    # Nodes that sent outputs and errors after the first had given the request back.
    late: list[str] = field(default_factory=list)

    def result(self, timeout: float = 120.0) -> list[list[int]]:
        """Return token ids of every choice, including earlier ones; raises the nodes' error."""
        assert self.done.wait(timeout), f"{self.rid} did not end within {timeout} s"
        if self.error is not None:
            raise self.error
        known = len(self.produced)
        return [
            [*self.produced, *(s.tokens[known + i] for i in range(len(s.tokens)))]
            for s in self.choices
        ]

    def tokens(self, timeout: float = 120.0) -> list[int]:
        """Return the token ids of the only choice."""
        (only,) = self.result(timeout)
        return only


def same(one: Pending, other: Pending, about: object = "") -> None:
    """Assert equal tokens, ends and log probabilities.

    Args:
        about: added to the message of a failure.
    """
    assert one.result() == other.result(), about
    for ours, theirs in zip(one.choices, other.choices, strict=True):
        assert ours.finish == theirs.finish, about
        assert ours.logprobs.keys() == theirs.logprobs.keys(), about
        for position, entry in ours.logprobs.items():
            expected = theirs.logprobs[position]
            assert (entry.token_id, entry.top_ids) == (expected.token_id, expected.top_ids), about
            pairs = zip(
                [entry.logprob, *entry.top_logprobs],
                [expected.logprob, *expected.top_logprobs],
                strict=True,
            )
            for found, known in pairs:
                assert found is not None
                assert known is not None
                assert abs(found - known) < 1e-4, about


class TokenClient:
    """A proxy reduced to its messages: sends both parts, orders positions, keeps nodes' leases."""

    def __init__(self, nodes: Sequence[NodeServer]) -> None:
        self.instance = secrets.token_hex(8)
        self._context = zmq.Context()
        self._outbox: list[tuple[NodeServer, Any]] = []
        self._lock = threading.Lock()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._rooms: dict[bytes, Pending] = {}
        self._nodes = list(nodes)
        self._running = True
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._waker, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def generate(
        self,
        prompt: Sequence[int],
        nodes: Sequence[NodeServer],
        *,
        rid: str = "",
        namespace: str = "",
        owner: str = "",
        priority: int = 0,
        timeout: float | None = None,
        room: bytes | None = None,
        produced: Sequence[int] = (),
        ends_after: Collection[int] = (),
        **params: Any,
    ) -> Pending:
        """Send one request to a pair (computes the prompt, generates) or to one node.

        Args:
            produced: its output so far, by other nodes.
            ends_after: tokens with which the client ends a choice, as a proxy does that finds a
                stop string.
        """
        params = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True} | params
        sampling = SamplingParams(**params)
        room = room or secrets.token_bytes(16)
        pending = Pending(
            rid or room.hex(),
            room,
            list(nodes),
            [Stream() for _ in range(sampling.n)],
            time.monotonic(),
            produced=produced,
            ends_after=ends_after,
        )
        with self._lock:
            self._rooms[room] = pending
        for node in nodes:
            others = [other for other in nodes if other is not node]
            message = Generate(
                to=node.instance_id,
                sender=self.instance,
                rid=pending.rid,
                room=room,
                token_ids=np.asarray([*prompt, *produced], dtype="<i4").tobytes(),
                produced=len(produced),
                params=sampling,
                namespace=namespace,
                owner=owner,
                priority=priority,
                timeout=timeout,
                peer=others[0].instance_id if others else "",
                peer_bootstrap=nodes[0].bootstrap_url if node is not nodes[0] else "",
            )
            self._post(node, message)
        return pending

    def abort(self, pending: Pending, index: int | None = None) -> None:
        """Give a request up, as after a client left."""
        for node in pending.nodes:
            message = Abort(
                to=node.instance_id, sender=self.instance, room=pending.room, index=index
            )
            self._post(node, message)

    def take_back(self, pending: Pending) -> None:
        """Ask the first node to give a request back; ``pending.taken_back`` is the answer."""
        node = pending.nodes[0]
        message = TakeBack(to=node.instance_id, sender=self.instance, room=pending.room)
        self._post(node, message)

    def close(self) -> None:
        """Vanish without a message, like a killed proxy."""
        self._running = False
        self._waker.wake_poll()
        self._thread.join()
        self._waker.close()
        self._context.destroy(linger=0)

    def _post(self, node: NodeServer, message: Any) -> None:
        with self._lock:
            self._outbox.append((node, message))
        self._waker.wake_poll()

    def _socket(self, node: NodeServer) -> zmq.Socket[bytes]:
        socket = self._sockets.get(node.node.endpoint)
        if socket is None:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, self.instance.encode())
            socket.connect(node.node.endpoint)
            self._sockets[node.node.endpoint] = socket
            self._poller.register(socket, zmq.POLLIN)
        return socket

    def _run(self) -> None:
        next_heartbeat = 0.0
        while self._running:
            with self._lock:
                outbox, self._outbox = self._outbox, []
            for node, message in outbox:
                self._socket(node).send(encode_message(message))
            if time.monotonic() > next_heartbeat:
                next_heartbeat = time.monotonic() + HEARTBEAT_INTERVAL
                for node in self._nodes:
                    beat = ProxyHeartbeat(to="", sender=self.instance)
                    self._socket(node).send(encode_message(beat))
            until_heartbeat = max(0.0, next_heartbeat - time.monotonic())
            for ready, _ in self._poller.poll(1e3 * until_heartbeat + 1):
                if ready == self._waker.fileno():
                    self._waker.drain()
                    continue
                while ready.poll(0):
                    self._receive(decode_message(ready.recv_multipart()[-1]))

    def _receive(self, message: Any) -> None:
        if isinstance(message, TakenBack):
            pending = self._rooms[message.room]
            pending.taken_back = message.taken
            if message.taken:
                self._end(pending)
        elif isinstance(message, Failed | StepFailed):
            for room in [message.room] if isinstance(message, Failed) else message.rooms:
                pending = self._rooms.get(room)
                if pending is not None and pending.taken_back:
                    pending.late.append(message.sender)
                elif pending is not None and not pending.done.is_set():
                    error = message.error
                    pending.error = error_from_kind(error.kind, error.message, error.param)
                    self._end(pending)
        elif isinstance(message, StepOutputs):
            for output in message.outputs:
                pending = self._rooms.get(output.room)
                if pending is not None and pending.taken_back:
                    pending.late.append(message.sender)
                elif pending is not None and not pending.done.is_set():
                    self._take(pending, output)

    def _take(self, pending: Pending, output: Output) -> None:
        pending.outputs.append(output)
        stream = pending.choices[output.index]
        if pending.ends_after and stream.finish is not None:
            return  # more came before the nodes knew
        stream.first_at = stream.first_at or time.monotonic()
        for offset, token in enumerate(output.token_ids):
            position = output.position + offset
            known = stream.tokens.setdefault(position, token)
            assert known == token, f"position {position} is {known} and {token}"
            if output.logprobs is not None:
                stream.logprobs.setdefault(position, output.logprobs[offset])
        for name in ("cached_tokens", "transferred_bytes", "prompt_logprobs"):
            value = getattr(output, name)
            if value is not None:
                setattr(pending, name, value)
        if output.finish is not None:
            stream.finish = output.finish
        self._end_choice(pending, output.index)
        if all(choice.finish is not None for choice in pending.choices):
            self._end(pending)

    def _end_choice(self, pending: Pending, index: int) -> None:
        """End a choice after the first token that ends it."""
        stream = pending.choices[index]
        ends = [at for at, token in stream.tokens.items() if token in pending.ends_after]
        if not ends:
            return
        last = min(ends)
        stream.tokens = {at: token for at, token in stream.tokens.items() if at <= last}
        stream.logprobs = {at: entry for at, entry in stream.logprobs.items() if at <= last}
        stream.finish = Finish("stop")
        self.abort(pending, index)

    def _end(self, pending: Pending) -> None:
        pending.ended_at = time.monotonic()
        pending.done.set()


class Cluster:
    """Prefill, decode and unified nodes of one model, and a client.

    ``settings`` go to every node; ``prefill_settings`` and ``decode_settings`` to one role.
    """

    def __init__(
        self,
        model: Path,
        prefill: int = 1,
        decode: int = 1,
        unified: int = 0,
        *,
        prefill_settings: dict[str, Any] | None = None,
        decode_settings: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        ps, ds = settings | (prefill_settings or {}), settings | (decode_settings or {})
        self.prefill = [start_node("prefill", model, **ps) for _ in range(prefill)]
        self.decode = [start_node("decode", model, **ds) for _ in range(decode)]
        self.unified = [start_node("unified", model, **settings) for _ in range(unified)]
        self.client = TokenClient(self.nodes)

    @property
    def nodes(self) -> list[NodeServer]:
        return [*self.prefill, *self.decode, *self.unified]

    @property
    def pair(self) -> tuple[NodeServer, NodeServer]:
        return self.prefill[0], self.decode[0]

    def wait_idle(self, timeout: float = 10.0) -> None:
        """Wait until nothing is anywhere, then prove that no page was lost."""
        for server in self.nodes:
            wait_idle(server, timeout)

    def close(self) -> None:
        self.client.close()
        # Together, because an HTTP server takes a fifth of a second to end.
        with ThreadPoolExecutor() as pool:
            list(pool.map(NodeServer.stop, self.nodes))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def wait_idle(server: NodeServer, timeout: float = 10.0) -> None:
    """Wait until queues are empty, ``free + cached = total``, and every invariant holds."""
    wait_until(lambda: is_idle(server), timeout, lambda: server.node.server_info())
    server.node.check_books()


def is_idle(server: NodeServer) -> bool:
    info: Any = server.node.server_info()
    pages = info["pages"]
    quiet = server.node.idle and not any(info["queues"].values())
    return quiet and pages["free"] + pages["cached"] == pages["total"]


def random_prompts(seed: int, lengths: Sequence[int], vocab: int = 256) -> Iterator[list[int]]:
    rng = np.random.default_rng(seed)
    for length in lengths:
        yield rng.integers(0, vocab, length).tolist()
