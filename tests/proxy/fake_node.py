"""A scripted node: real sockets, the real message protocol, tokens that come from the test."""

from __future__ import annotations

import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from pd.core.messages import (
    Abort,
    AnyMessage,
    ErrorInfo,
    Failed,
    Fault,
    Finish,
    Generate,
    GenerateTogether,
    Message,
    NodeHeartbeat,
    Output,
    ProxyHeartbeat,
    Stages,
    StepFailed,
    StepOutputs,
    TakeBack,
    TakenBack,
    TokenLogprobs,
    decode_message,
    encode_message,
    heartbeat_owner,
    is_counted,
)
from pd.net.cluster_key import (
    derive_admin_key,
    derive_client_keypair,
    derive_server_info_key,
    derive_server_keypair,
)
from pd.net.signed_requests import NONCE_HEADER, SIGNATURE_HEADER, RequestVerifier, sign_reply
from pd.util.numbering import SentNumbers

if TYPE_CHECKING:
    from email.message import Message as EmailMessage

    from pd.core.node_load import NodeLoad
    from pd.core.sampling_params import SamplingParams

EOS = 1
Answer = Callable[[list[int], int], list[int]]


def counting(prompt: list[int], index: int) -> list[int]:
    """A default answer: 10, 11, 12, … (choice 1: 20, 21, …), without an end."""
    return [10 * (index + 1) + i % 10 for i in range(1000)]


class _Only:
    """Lets one CURVE key in."""

    def __init__(self, public: bytes) -> None:
        self._public = z85.encode(public)

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class FakeNode:
    """One prefill, decode or unified node.

    By default it answers each request at once with ``answer(prompt, index)``, cut at ``EOS`` or
    ``max_tokens``. With ``auto=False`` the test sends outputs itself (``say``, ``fail``).
    """

    def __init__(
        self,
        role: str,
        answer: Answer = counting,
        *,
        auto: bool = True,
        cluster_key: bytes | None = None,
        **info: Any,
    ):
        self.role = role
        self.cluster_key = cluster_key
        key = derive_admin_key(cluster_key)
        self.verifier = None if key is None else RequestVerifier(key)
        self.answer = answer
        self.auto = auto
        self.ready = True
        self.cached_tokens = 0
        self.overrides = info
        self.queued_tokens = 0
        self.running = 0
        self.http_port = 0
        self.http_requests: list[tuple[str, EmailMessage]] = []
        self.silent = False
        self.leaving = self.stuck = False
        self.load: NodeLoad | None = None
        self.start()

    # ---- life

    def start(self) -> None:
        self.instance_id = uuid.uuid4().hex
        self.generates: list[Generate] = []
        self.aborts: list[Abort] = []
        self.take_backs: list[TakeBack] = []
        self._changed = threading.Condition()
        self._outbox: queue.Queue[tuple[str, Message | bytes]] = queue.Queue()
        self.heartbeats: dict[str, int] = {}
        self.longest_silence = 0.0
        self._heard: float | None = None
        self._numbers: dict[str, SentNumbers] = {}
        self.losses = 0
        self.linked: list[str] | None = None
        self.meet: dict[str, str] = {}
        self.run_delay = 0.0
        self.run_delays: dict[str, float] = {}
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router.setsockopt(zmq.LINGER, 0)
        # As a node's own, which drops nothing of a burst of answers to a proxy without a CPU.
        self._router.setsockopt(zmq.SNDHWM, 100_000)
        self._secure()
        zmq_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{zmq_port}"
        node = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                key = derive_server_info_key(node.cluster_key)
                self._reply(node.server_info(), key, self.headers.get(NONCE_HEADER))

            def do_POST(self) -> None:
                node.http_requests.append((self.path, self.headers))
                given = self.headers.get("Authorization", "")
                nonce = None
                if node.verifier is not None:
                    nonce, reason = node.verifier.verify_request(
                        given, "POST", self.path, node.instance_id, b""
                    )
                    if reason:
                        self.send_error(401, reason)
                        return
                self._reply({}, derive_admin_key(node.cluster_key), nonce)

            def _reply(self, value: Any, key: bytes | None, nonce: str | None) -> None:
                body = json.dumps(value).encode()
                self.send_response(200)
                if key is not None and nonce:
                    self.send_header(SIGNATURE_HEADER, sign_reply(key, nonce, 200, body))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._http = Server(("127.0.0.1", self.http_port), Handler)
        self.http_port = self._http.server_address[1]
        self._threads = [
            threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True),
            threading.Thread(target=self._loop, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _secure(self) -> None:
        """CURVE as the real nodes have it: only who has the clients' key pair may talk."""
        if self.cluster_key is None:
            return
        theirs, _ = derive_client_keypair(self.cluster_key)
        public, secret = derive_server_keypair(self.cluster_key, self.instance_id)
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", _Only(z85.decode(theirs)))
        self._router.curve_server = True
        self._router.curve_publickey = public
        self._router.curve_secretkey = secret

    def kill(self) -> None:
        """Vanish without a word, as after SIGKILL."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._http.shutdown()
        self._http.server_close()
        for thread in self._threads:
            thread.join()
        if self.cluster_key is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    def restart(self) -> None:
        """Come back on the same port as a new instance."""
        self.kill()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def server_info(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "instance_id": self.instance_id,
            "version": "0",
            "model": "fake",
            "dtype": "float32",
            "page_size": 4,
            "transfer_backend": "tcp",
            "context_length": 200,
            "vocab_size": 1000,
            "endpoints": {"zmq": self.endpoint, "bootstrap": f"http://boot.{self.instance_id}"},
            "pages": {"total": 100, "free": 100},
        } | self.overrides

    # ---- what the proxy said

    def wait_generate(self, count: int = 1) -> Generate:
        """The ``count``-th request."""
        self._wait(lambda: len(self.generates) >= count, "request")
        return self.generates[count - 1]

    def wait_abort(self, room: bytes, index: int | None = None) -> Abort:
        def found() -> list[Abort]:
            return [a for a in self.aborts if a.room == room and a.index == index]

        self._wait(lambda: bool(found()), "abort")
        return found()[0]

    def wait_take_back(self, count: int = 1) -> TakeBack:
        """The ``count``-th request that is asked back."""
        self._wait(lambda: len(self.take_backs) >= count, "request to give one back")
        return self.take_backs[count - 1]

    def give_back(self, asked: TakeBack, *, taken: bool) -> None:
        self.send(asked.sender, TakenBack(to="", sender="", room=asked.room, taken=taken))

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout=10), f"no {what} came"

    # ---- what the node says

    def say(
        self,
        request: Generate,
        token_ids: list[int],
        *,
        position: int = 0,
        index: int = 0,
        finish: Finish | None = None,
        **extra: Any,
    ) -> None:
        """Send one output."""
        output = Output(
            room=request.room,
            index=index,
            position=position,
            token_ids=token_ids,
            finish=finish,
            **extra,
        )
        self.send(request.sender, StepOutputs(to="", sender="", outputs=[output]))

    def forget_silence(self) -> None:
        """Begin to measure anew for how long no proxy was heard."""
        self._heard, self.longest_silence = None, 0.0

    def fail(
        self,
        request: Generate,
        kind: str,
        message: str = "as scripted",
        param: str | None = None,
        fault: Fault = "node",
    ) -> None:
        error = ErrorInfo(kind=kind, message=message, param=param)
        failed = Failed(to="", sender="", room=request.room, error=error, fault=fault)
        self.send(request.sender, failed)

    def fail_step(self, requests: list[Generate]) -> None:
        """Fail requests of one proxy together."""
        rooms, error = (
            [request.room for request in requests],
            ErrorInfo("node_failed", "as scripted"),
        )
        message = StepFailed(to="", sender="", rooms=rooms, error=error)
        self.send(requests[0].sender, message)

    def send(self, proxy: str, message: Message) -> None:
        message.to, message.sender = message.to or proxy, message.sender or self.instance_id
        self._outbox.put((proxy, message))

    def number(self, proxy: str, message: Message) -> bytes:
        """Call it for a message that is then not sent: a reset of the connection lost it."""
        sent = self._numbers.setdefault(proxy, SentNumbers())
        return sent.number_message(counts=is_counted(message))

    def send_raw(self, proxy: str, frame: bytes) -> None:
        self._outbox.put((proxy, frame))

    def reply(self, request: Generate) -> None:
        """The whole default answer: token 1 from a prefill node, everything from the others."""
        prompt = np.frombuffer(request.token_ids, "<i4").tolist()
        for index in range(request.params.n):
            tokens = self.answer(prompt, index)[: request.params.max_tokens]
            if EOS in tokens:
                tokens = tokens[: tokens.index(EOS) + 1]
            self._reply_choice(request, index, tokens, prompt)

    def _reply_choice(
        self, request: Generate, index: int, tokens: list[int], prompt: list[int]
    ) -> None:
        params = request.params
        ended = tokens[-1] == EOS and not params.ignore_eos
        finish = Finish("stop", EOS) if ended else Finish("length")
        if self.role == "decode":
            if len(tokens) == 1:
                return  # token 1 was the end, so the prefill node told us to drop the room
            stages = Stages(transfer=0.25, decode=0.5)
            for position in range(0, len(tokens), 3):
                part = tokens[position : position + 3]
                last = position + 3 >= len(tokens)
                self.say(
                    request,
                    part,
                    position=position,
                    index=index,
                    finish=finish if last else None,
                    stages=stages,
                    logprobs=self._logprobs_of_answer(part, params),
                )
            return
        shown = tokens[:1] if request.peer else tokens
        start = params.prompt_logprobs_start
        entries = None
        if start is not None:
            entries = self.logprobs(prompt, params.top_logprobs)
            entries[0] = TokenLogprobs(prompt[0], None)
            entries = entries[start:]
        self.say(
            request,
            shown,
            index=index,
            finish=finish if len(shown) == len(tokens) else None,
            cached_tokens=self.cached_tokens,
            prompt_logprobs=entries,
            logprobs=self._logprobs_of_answer(shown, params),
            stages=Stages(queue=0.125, bootstrap=0.0625, prefill=1.5),
        )

    def _logprobs_of_answer(
        self, tokens: list[int], params: SamplingParams
    ) -> list[TokenLogprobs] | None:
        if not params.logprobs:
            return None
        return self.logprobs(tokens, params.top_logprobs, params.logprob_token_ids)

    @staticmethod
    def logprobs(tokens: list[int], top: int, named: Sequence[int] = ()) -> list[TokenLogprobs]:
        """Made up: token t has -t/100, the likeliest are t, t+1, …

        ``named``: token ids whose log probabilities come after those of the likeliest.
        """
        shown = [[*range(t, t + top), *named] for t in tokens]
        return [
            TokenLogprobs(t, -t / 100, ids, [-each / 100 for each in ids])
            for t, ids in zip(tokens, shown, strict=True)
        ]

    def _loop(self) -> None:
        while not self._stop.is_set():
            if self._router.poll(3):
                identity, *_, frame = self._router.recv_multipart()
                self._receive(identity.decode(), decode_message(frame))
            while not self._outbox.empty():
                proxy, message = self._outbox.get()
                if isinstance(message, bytes):
                    self._router.send_multipart([proxy.encode(), message])
                    continue
                number = self.number(proxy, message)
                self._router.send_multipart([proxy.encode(), number, encode_message(message)])

    def _receive(self, proxy: str, message: AnyMessage) -> None:
        if message.to not in ("", self.instance_id):
            return
        if isinstance(message, ProxyHeartbeat):
            now = time.monotonic()
            self.longest_silence = max(self.longest_silence, now - (self._heard or now))
            self._heard = now
            self.heartbeats[proxy] = self.heartbeats.get(proxy, 0) + 1
            self.run_delays = message.run_delays or self.run_delays
            self.meet = message.meet or self.meet
            if not self.silent and heartbeat_owner(proxy.encode()) == proxy.encode():
                beat = NodeHeartbeat(
                    to=proxy,
                    sender=self.instance_id,
                    ready=self.ready,
                    queued_tokens=self.queued_tokens,
                    running=self.running,
                    losses=self.losses,
                    run_delay=self.run_delay,
                    linked=self.linked,
                    leaving=self.leaving,
                    stuck=self.stuck,
                    load=self.load,
                    answers=message.number,
                )
                self.send(proxy, beat)
            return
        if isinstance(message, Generate):
            requests = [message]
        else:
            requests = message.requests if isinstance(message, GenerateTogether) else []
        with self._changed:
            self.generates += requests
            if isinstance(message, Abort):
                self.aborts.append(message)
            if isinstance(message, TakeBack):
                self.take_backs.append(message)
            self._changed.notify_all()
        if self.auto:
            for request in requests:
                self.reply(request)


def wait_until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    """Wait for something that nothing announces."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)
