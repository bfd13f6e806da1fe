"""Nodes without a model for ``pd-bench proxy``: a process that speaks the messages of a unified
node and answers at a programmed rate.

Like a real node it sends one message a step with the tokens of all its requests. Times of the steps
are kept, and written to standard output at the end, one line of JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from pd.core.messages import (
    Abort,
    Finish,
    Generate,
    GenerateTogether,
    Message,
    NodeHeartbeat,
    Output,
    ProxyHeartbeat,
    Stages,
    StepOutputs,
    counts,
    decode,
    encode,
    heartbeat_owner,
)
from pd.core.numbering import Sent

if TYPE_CHECKING:
    from collections.abc import Iterator

_POLL_MS = 50


class NodeScript(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the node says of itself and how it answers.

    Attributes:
        model_path: directory of the tokenizer.
        token_ids: what every answer consists of, over and over.
        step_seconds: between two tokens of a request.
    """

    model_path: str
    vocab_size: int
    context_length: int
    token_ids: list[int]
    step_seconds: float


class _Running:
    """A request under way."""

    def __init__(self, request: Generate) -> None:
        self.request = request
        self.sent = 0


class ScriptedNode:
    """Runs on the calling thread until its standard input ends."""

    def __init__(self, script: NodeScript) -> None:
        self._script = script
        self._instance = uuid.uuid4().hex
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.setsockopt(zmq.LINGER, 0)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._endpoint = f"tcp://127.0.0.1:{port}"
        self._running: dict[bytes, _Running] = {}
        self._numbers: dict[str, Sent] = {}
        # When the tokens of a request were sent, by its name.
        self.sent_at: dict[str, list[float]] = {}
        self._over = threading.Event()

    def serve_http(self) -> str:
        """Answer ``/server_info`` on a thread; returns the URL."""
        info = json.dumps(self._server_info()).encode()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(info)))
                self.end_headers()
                self.wfile.write(info)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    def run(self) -> None:
        """Take messages and step until :meth:`stop`."""
        due = time.perf_counter()
        while not self._over.is_set():
            now = time.perf_counter()
            wait = _POLL_MS if not self._running else max(0, int((due - now) * 1e3))
            if self._router.poll(wait):
                self._take_messages()
            now = time.perf_counter()
            if self._running and now >= due:
                self._step(now)
                # A node that is behind does not catch up.
                due = max(due + self._script.step_seconds, now)
            elif not self._running:
                due = now

    def stop(self) -> None:
        """End :meth:`run`; any thread."""
        self._over.set()

    def _take_messages(self) -> None:
        while True:
            try:
                identity, *_, frame = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message, proxy = decode(frame), identity.decode()
            if isinstance(message, ProxyHeartbeat):
                self._answer(proxy)
            elif isinstance(message, Generate):
                self._running[message.room] = _Running(message)
            elif isinstance(message, GenerateTogether):
                self._running |= {each.room: _Running(each) for each in message.requests}
            elif isinstance(message, Abort):
                self._running.pop(message.room, None)

    def _answer(self, proxy: str) -> None:
        if heartbeat_owner(proxy.encode()).decode() != proxy:
            return  # the proxy's thread that only keeps the lease
        beat = NodeHeartbeat(
            to=proxy, sender=self._instance, ready=True, queued_tokens=0, running=len(self._running)
        )
        self._send(proxy, beat)

    def _step(self, now: float) -> None:
        by_proxy: dict[str, list[Output]] = {}
        for room, running in list(self._running.items()):
            request = running.request
            by_proxy.setdefault(request.sender, []).append(self._next(running))
            self.sent_at.setdefault(request.rid, []).append(now)
            if running.sent == request.params.max_tokens:
                del self._running[room]
        for proxy, outputs in by_proxy.items():
            self._send(proxy, StepOutputs(to=proxy, sender=self._instance, outputs=outputs))

    def _next(self, running: _Running) -> Output:
        script, request = self._script, running.request
        output = Output(
            room=request.room,
            index=0,
            position=running.sent,
            token_ids=[script.token_ids[running.sent % len(script.token_ids)]],
        )
        if running.sent == 0:
            output.cached_tokens, output.stages = 0, Stages(queue=0.0, prefill=0.0)
        running.sent += 1
        if running.sent == request.params.max_tokens:
            output.finish = Finish("length")
        return output

    def _send(self, proxy: str, message: Message) -> None:
        number = self._numbers.setdefault(proxy, Sent()).number(counts=counts(message))
        self._router.send_multipart([proxy.encode(), number, encode(message)])

    def _server_info(self) -> dict[str, Any]:
        script = self._script
        return {
            "role": "unified",
            "instance_id": self._instance,
            "version": "0",
            "model": "scripted",
            "model_path": script.model_path,
            "dtype": "bfloat16",
            "page_size": 16,
            "transfer_backend": "tcp",
            "context_length": script.context_length,
            "vocab_size": script.vocab_size,
            "endpoints": {"zmq": self._endpoint, "bootstrap": ""},
            "pages": {"total": 1 << 20, "free": 1 << 20},
        }


def main() -> None:
    """Serve until standard input ends, then write the times of all tokens."""
    lines = _lines()
    script = msgspec.json.decode(next(lines), type=NodeScript)
    node = ScriptedNode(script)
    print(json.dumps({"event": "ready", "url": node.serve_http()}), flush=True)

    def listen() -> None:
        for _ in lines:
            # The parent asks for what was sent so far.
            sent, node.sent_at = node.sent_at, {}
            print(json.dumps(sent), flush=True)
        node.stop()

    threading.Thread(target=listen, daemon=True).start()
    node.run()


def _lines() -> Iterator[str]:
    yield from sys.stdin


if __name__ == "__main__":
    main()
