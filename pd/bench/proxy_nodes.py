"""Nodes without a model for ``pd-bench proxy``: a process that speaks a unified node's messages and
answers at a programmed rate.

Like a real node it sends one message per step with the tokens of all its requests. All choices of a
request have the same tokens, with made-up log probabilities where a client asks for them. At the
end it writes the times of its steps to standard output, as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import numpy as np
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
    TokenLogprobs,
    decode_message,
    encode_message,
    heartbeat_owner,
    is_counted,
)
from pd.util.numbering import SentNumbers

_POLL_MS = 50


class NodeScript(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a scripted node: its ``/server_info`` and its answers.

    Attributes:
        model_path: directory of the tokenizer.
        token_ids: tokens of every answer, repeated as needed.
        step_seconds: time between two tokens of a request.
    """

    model_path: str
    vocab_size: int
    context_length: int
    token_ids: list[int]
    step_seconds: float


class _Running:
    """A request under way.

    Attributes:
        choices: indexes of unfinished choices.
        first: number of the step with its first token; every later step adds one.
    """

    def __init__(self, request: Generate, first: int) -> None:
        self.request = request
        self.room = request.room
        self.choices = list(range(request.params.n))
        self.first = first
        self.last = first + request.params.max_tokens - 1


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
        self._token_ids = [[token_id] for token_id in script.token_ids]
        # Requests by the id of their proxy.
        self._running: dict[str, dict[bytes, _Running]] = {}
        self._numbers: dict[str, SentNumbers] = {}
        # Times of the steps, and new requests since the last ``take_sent``.
        self._steps: list[float] = []
        self._began: list[_Running] = []
        self._over = threading.Event()

    def serve_http(self) -> str:
        """Answer ``/server_info`` on a thread; return the URL."""
        script = self._script
        facts = {
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
        info = json.dumps(facts).encode()

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
        """Handle messages and run steps until :meth:`stop`."""
        due = time.perf_counter()
        while not self._over.is_set():
            if any(self._running.values()):
                # We sleep, because a poll is not exact to the microsecond. Messages wait for the
                # step.
                time.sleep(max(0.0, due - time.perf_counter()))
                self._take_messages()
                now = time.perf_counter()
                self._run_step(now)
                # A late node does not catch up.
                due = max(due + self._script.step_seconds, now)
            elif self._router.poll(_POLL_MS):
                self._take_messages()
                due = time.perf_counter()

    def stop(self) -> None:
        """End :meth:`run`. Any thread may call it."""
        self._over.set()

    def _take_messages(self) -> None:
        while True:
            try:
                identity, *_, frame = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message, proxy = decode_message(frame), identity.decode()
            if isinstance(message, ProxyHeartbeat):
                # Other identities are threads of the proxy that only renew its lease.
                if heartbeat_owner(identity).decode() == proxy:
                    running = sum(map(len, self._running.values()))
                    beat = NodeHeartbeat(
                        to=proxy,
                        sender=self._instance,
                        ready=True,
                        queued_tokens=0,
                        running=running,
                    )
                    self._send_message(proxy, beat)
            elif isinstance(message, Generate):
                self._start_request(message)
            elif isinstance(message, GenerateTogether):
                for each in message.requests:
                    self._start_request(each)
            elif isinstance(message, Abort):
                for requests in self._running.values():
                    self._abort_request(requests, message)

    def _start_request(self, request: Generate) -> None:
        running = _Running(request, len(self._steps))
        self._running.setdefault(request.sender, {})[request.room] = running
        self._began.append(running)

    def _abort_request(self, requests: dict[bytes, _Running], message: Abort) -> None:
        running = requests.get(message.room)
        if running is None:
            return
        if message.index is not None:
            running.choices = [index for index in running.choices if index != message.index]
        if message.index is None or not running.choices:
            del requests[message.room]
            running.last = len(self._steps) - 1

    def take_sent(self) -> dict[str, list[float]]:
        """Return when tokens were sent, by the ids of the requests that began since the last call.
        None of them may still run."""
        began, self._began = self._began, []
        return {
            running.request.rid: self._steps[running.first : running.last + 1] for running in began
        }

    def _run_step(self, now: float) -> None:
        number, token_ids = len(self._steps), self._token_ids
        self._steps.append(now)
        for proxy, requests in self._running.items():
            if not requests:
                continue
            ending: list[bytes] = []
            outputs: list[Output] = []
            for running in requests.values():
                position = number - running.first
                new = token_ids[position % len(token_ids)]
                for index in running.choices:
                    output = Output(running.room, index, position, new)
                    if position == 0:
                        output.cached_tokens, output.stages = 0, Stages(queue=0.0, prefill=0.0)
                    if running.request.params.logprobs:
                        self._add_logprobs(running.request, output)
                    if number == running.last:
                        output.finish = Finish("length")
                    outputs.append(output)
                if number == running.last:
                    ending.append(running.room)
            self._send_message(proxy, StepOutputs(to=proxy, sender=self._instance, outputs=outputs))
            for room in ending:
                del requests[room]

    def _add_logprobs(self, request: Generate, output: Output) -> None:
        """Add made-up log probabilities; the prompt's come with the first choice."""
        params = request.params
        output.logprobs = self._make_logprobs(output.token_ids, params.top_logprobs)
        start = params.prompt_logprobs_start
        if start is not None and output.position == output.index == 0:
            prompt = np.frombuffer(request.token_ids, "<i4").tolist()
            entries = self._make_logprobs(prompt, params.top_logprobs)
            entries[0] = TokenLogprobs(prompt[0], None)
            output.prompt_logprobs = entries[start:]

    def _make_logprobs(self, token_ids: list[int], top: int) -> list[TokenLogprobs]:
        size, values = self._script.vocab_size, [-0.5 * (1 + place) for place in range(top)]
        return [
            TokenLogprobs(token, -0.5, [(token + place) % size for place in range(top)], values)
            for token in token_ids
        ]

    def _send_message(self, proxy: str, message: Message) -> None:
        number = self._numbers.setdefault(proxy, SentNumbers()).number_message(
            counts=is_counted(message)
        )
        self._router.send_multipart([proxy.encode(), number, encode_message(message)])


def main() -> None:
    """Serve until standard input ends, then write the times of all tokens."""
    lines = iter(sys.stdin)
    script = msgspec.json.decode(next(lines), type=NodeScript)
    node = ScriptedNode(script)
    print(json.dumps({"event": "ready", "url": node.serve_http()}), flush=True)

    def listen() -> None:
        for _ in lines:
            # The parent asks for the times so far.
            print(json.dumps(node.take_sent()), flush=True)
        node.stop()

    threading.Thread(target=listen, daemon=True).start()
    node.run()


if __name__ == "__main__":
    main()
