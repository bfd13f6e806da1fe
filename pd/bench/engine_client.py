"""A minimal proxy in a process of its own.

We do not run it in the node's process, because it would compete for Python's global lock.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import zmq

from pd.core.errors import PDError, SetupError, error_from_kind
from pd.core.messages import (
    HEARTBEAT_INTERVAL,
    ROOM_BYTES,
    Failed,
    Generate,
    ProxyHeartbeat,
    StepOutputs,
    decode_message,
    encode_message,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from pd.core.messages import Output
    from pd.core.sampling_params import SamplingParams


class Ask(NamedTuple):
    """One request: a prompt (int32, little-endian) and its sampling parameters."""

    prompt: bytes
    params: SamplingParams


@dataclass(slots=True)
class RequestTimes:
    """Times and counts of one request.

    Attributes:
        sent, first, ended: monotonic times at the client.
        to_first: seconds from the request's arrival at the node until it knew the first token.
        cached_tokens: number of prompt tokens from the cache.
    """

    sent: float
    first: float = 0.0
    ended: float = 0.0
    to_first: float = 0.0
    num_tokens: int = 0
    cached_tokens: int = 0

    def add_output(self, output: Output) -> bool:
        """Add an output; return whether it was the last one."""
        if not self.num_tokens:
            self.first = time.monotonic()
            self.cached_tokens = output.cached_tokens or 0
            if output.stages is not None:
                self.to_first = (output.stages.queue or 0.0) + (output.stages.prefill or 0.0)
        self.num_tokens += len(output.token_ids)
        if output.finish is None:
            return False
        self.ended = time.monotonic()
        return True


class Client:
    """Sends batches of requests to one node and waits for their answers."""

    def __init__(self, endpoint: str, instance_id: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        self._process = context.Process(
            target=_serve_pipe, args=(far, endpoint, instance_id), name="client", daemon=True
        )
        self._process.start()

    def run(self, asks: Sequence[Ask], timeout: float) -> list[RequestTimes]:
        """Send all at once and wait; see :meth:`wait_results`."""
        self.start(asks)
        return self.wait_results(timeout)

    def start(self, asks: Sequence[Ask]) -> None:
        """Send all at once and return."""
        self._pipe.send(list(asks))

    def wait_results(self, timeout: float) -> list[RequestTimes]:
        """Return the answers to the last batch, in its order.

        Raises:
            PDError: a request failed; the error is the node's.
            SetupError: a request had no answer within ``timeout`` seconds.
        """
        multiprocessing.connection.wait([self._pipe, self._process.sentinel], timeout)
        if not self._pipe.poll():
            ended = self._process.exitcode
            why = f"more than {timeout:g} s" if ended is None else f"the client's exit ({ended})"
            raise SetupError(f"requests were unanswered after {why}")
        answers: list[RequestTimes] | PDError = self._pipe.recv()
        if isinstance(answers, PDError):
            raise answers
        return answers

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class _NodeSocket:
    """The client's side of the node's socket."""

    def __init__(self, endpoint: str, instance_id: str) -> None:
        self._node = instance_id
        self._instance = secrets.token_hex(8)
        self.socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IPV6, "[" in endpoint)
        self.socket.setsockopt(zmq.IDENTITY, self._instance.encode())
        self.socket.connect(endpoint)
        self._batch: list[RequestTimes] = []
        self._pending: dict[bytes, RequestTimes] = {}
        self._next_heartbeat = 0.0

    def send_requests(self, asks: Sequence[Ask]) -> None:
        self._batch, self._pending = [], {}
        for ask in asks:
            room = secrets.token_bytes(ROOM_BYTES)
            message = Generate(
                to=self._node,
                sender=self._instance,
                rid=room.hex(),
                room=room,
                token_ids=ask.prompt,
                params=ask.params,
            )
            self._pending[room] = pending = RequestTimes(time.monotonic())
            self._batch.append(pending)
            self.socket.send(encode_message(message))

    def receive_message(self) -> list[RequestTimes] | PDError | None:
        """Handle one message. Return the answers once all are complete, or the first error."""
        message = decode_message(self.socket.recv_multipart()[-1])
        if isinstance(message, Failed) and message.room in self._pending:
            self._pending.clear()
            return error_from_kind(message.error.kind, message.error.message, message.error.param)
        if not isinstance(message, StepOutputs):
            return None
        before = len(self._pending)
        for output in message.outputs:
            pending = self._pending.get(output.room)
            if pending is not None and pending.add_output(output):
                del self._pending[output.room]
        return self._batch if before and not self._pending else None

    def send_heartbeat(self) -> None:
        """Send a heartbeat when one is due, because the node ends requests of silent clients."""
        if time.monotonic() >= self._next_heartbeat:
            self._next_heartbeat = time.monotonic() + HEARTBEAT_INTERVAL
            self.socket.send(encode_message(ProxyHeartbeat(to="", sender=self._instance)))


def _serve_pipe(pipe: Connection, endpoint: str, instance_id: str) -> None:
    """Pass requests to the node and results back until the other end closes the pipe."""
    connection = _NodeSocket(endpoint, instance_id)
    poller = zmq.Poller()
    poller.register(connection.socket, zmq.POLLIN)
    poller.register(pipe.fileno(), zmq.POLLIN)
    while True:
        ready: dict[object, int] = dict(poller.poll(round(HEARTBEAT_INTERVAL * 1000)))
        connection.send_heartbeat()
        if connection.socket in ready:
            result = connection.receive_message()
            if result is not None:
                pipe.send(result)
        if pipe.fileno() in ready:
            try:
                connection.send_requests(pipe.recv())
            except EOFError:
                return
