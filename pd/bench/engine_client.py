"""A proxy reduced to its messages, in a process of its own, as the proxy is when it serves.

It must not share Python's global lock with the node that is measured.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import secrets
import time
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
    decode,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from pd.core.messages import Output
    from pd.core.sampling_params import SamplingParams


class Ask(NamedTuple):
    """One request: a prompt (int32, little-endian) and how to sample."""

    prompt: bytes
    params: SamplingParams


class RequestTimes(NamedTuple):
    """Times and counts of one request.

    Attributes:
        sent, first, ended: monotonic times at the client.
        to_first: seconds from the request's arrival at the node until token 1 was known there.
        cached_tokens: of the prompt.
    """

    sent: float
    first: float
    ended: float
    to_first: float
    num_tokens: int
    cached_tokens: int


class Client:
    """Sends batches of requests to one node and waits for their ends."""

    def __init__(self, endpoint: str, instance_id: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(far, endpoint, instance_id), name="client", daemon=True
        )
        self._process.start()

    def run(self, asks: Sequence[Ask], timeout: float) -> list[RequestTimes]:
        """Send all at once; see :meth:`result`."""
        self.start(asks)
        return self.result(timeout)

    def start(self, asks: Sequence[Ask]) -> None:
        """Send all at once and return."""
        self._pipe.send(list(asks))

    def result(self, timeout: float) -> list[RequestTimes]:
        """The answers to what was started last, in its order.

        Raises:
            PDError: a request failed; the error is the node's.
            SetupError: not all ended within ``timeout`` seconds.
        """
        multiprocessing.connection.wait([self._pipe, self._process.sentinel], timeout)
        if not self._pipe.poll():
            ended = self._process.exitcode
            what = f"more than {timeout:g} s" if ended is None else f"the client's exit ({ended})"
            raise SetupError(f"requests were unanswered after {what}")
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


class _Pending:
    """A request under way."""

    __slots__ = ("cached_tokens", "ended", "first", "num_tokens", "sent", "to_first")

    def __init__(self, sent: float) -> None:
        self.sent = sent
        self.first = self.ended = self.to_first = 0.0
        self.num_tokens = self.cached_tokens = 0

    def take(self, output: Output) -> bool:
        """True when this was the last one."""
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

    def answer(self) -> RequestTimes:
        return RequestTimes(
            self.sent,
            self.first,
            self.ended,
            self.to_first,
            self.num_tokens,
            self.cached_tokens,
        )


class _NodeSocket:
    """The client's side of the node's socket."""

    def __init__(self, endpoint: str, instance_id: str) -> None:
        self._node = instance_id
        self._instance = secrets.token_hex(8)
        self.socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IPV6, "[" in endpoint)
        self.socket.setsockopt(zmq.IDENTITY, self._instance.encode())
        self.socket.connect(endpoint)
        self._batch: list[_Pending] = []
        self._pending: dict[bytes, _Pending] = {}
        self._next_heartbeat = 0.0

    def send(self, asks: Sequence[Ask]) -> None:
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
            self._pending[room] = pending = _Pending(time.monotonic())
            self._batch.append(pending)
            self.socket.send(encode(message))

    def receive(self) -> list[RequestTimes] | PDError | None:
        """Take one message; the answers when all are there, or what went wrong."""
        message = decode(self.socket.recv_multipart()[-1])
        if isinstance(message, Failed) and message.room in self._pending:
            self._pending.clear()
            return error_from_kind(message.error.kind, message.error.message, message.error.param)
        if not isinstance(message, StepOutputs):
            return None
        before = len(self._pending)
        for output in message.outputs:
            pending = self._pending.get(output.room)
            if pending is not None and pending.take(output):
                del self._pending[output.room]
        return [p.answer() for p in self._batch] if before and not self._pending else None

    def beat(self) -> None:
        """Send a heartbeat when one is due; without them the node ends the client's requests."""
        if time.monotonic() >= self._next_heartbeat:
            self._next_heartbeat = time.monotonic() + HEARTBEAT_INTERVAL
            self.socket.send(encode(ProxyHeartbeat(to="", sender=self._instance)))


def _serve(pipe: Connection, endpoint: str, instance_id: str) -> None:
    """Pass requests to the node and results back, until the other end closes the pipe."""
    connection = _NodeSocket(endpoint, instance_id)
    poller = zmq.Poller()
    poller.register(connection.socket, zmq.POLLIN)
    poller.register(pipe.fileno(), zmq.POLLIN)
    while True:
        ready: dict[object, int] = dict(poller.poll(round(HEARTBEAT_INTERVAL * 1000)))
        connection.beat()
        if connection.socket in ready:
            result = connection.receive()
            if result is not None:
                pipe.send(result)
        if pipe.fileno() in ready:
            try:
                connection.send(pipe.recv())
            except EOFError:
                return
