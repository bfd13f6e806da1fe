"""A running pd, over HTTP."""

from __future__ import annotations

import json
import os
import threading
import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from pd.core.addresses import parse_base_url
from pd.core.errors import (
    NodeFailedError,
    NotFoundError,
    PDError,
    QueueFullError,
    SetupError,
    UnavailableError,
)
from pd.lang.native import NativeBackend
from pd.lang.statuses import error_of_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

T = TypeVar("T")

# We ask again for these, because the same request may succeed later.
_RETRIED = (QueueFullError, NodeFailedError, UnavailableError)
_MAX_ATTEMPTS = 6
_FIRST_PAUSE = 0.25
_MAX_PAUSE = 10.0
# Answers take as long as the server allows.
_TIMEOUT = httpx.Timeout(None, connect=10.0)
# Ctrl-C waits for these, also if the server is stuck.
_ABORT_TIMEOUT = httpx.Timeout(0.5)


class RuntimeEndpoint(NativeBackend):
    """Runs programs on a proxy of pd."""

    def __init__(
        self, base_url: str, api_key: str | None = None, verify: str | bool | None = None
    ) -> None:
        """Connect to a proxy.

        Args:
            base_url: such as ``http://127.0.0.1:8000``.
            verify: file with the authorities that the server's certificate may be from, or False.

        Raises UsageError for an invalid address, SetupError if nobody answers there.
        """
        url = parse_base_url(base_url, "base_url", "api_key")
        super().__init__(HttpService(url, api_key, verify))

    @property
    def endpoint(self) -> RuntimeEndpoint:
        """Itself, because SGLang's runtimes have their endpoint here."""
        return self


@dataclass
class _Call:
    """A request under way.

    Attributes:
        rid: its name at the server, which differs for each attempt.
        cancelled: set to give up, instead of asking again.
    """

    rid: str
    cancelled: threading.Event = field(default_factory=threading.Event)


class HttpService:
    """Pd's native requests over HTTP."""

    def __init__(self, url: str, api_key: str | None, verify: str | bool | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._make_client: Callable[[], httpx.Client] = lambda: httpx.Client(
            base_url=url,
            headers=headers,
            verify=True if verify is None else verify,
            timeout=_TIMEOUT,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self.connect()
        _services.add(self)

    def connect(self) -> None:
        """Make new connections, and forget requests under way."""
        self._client = self._make_client()
        self._lock = threading.Lock()
        self._calls: dict[str, _Call] = {}

    def generate(self, body: Mapping[str, Any]) -> Any:
        with self._begin_call(body["rid"]) as call:
            return self._retry(call, lambda: self._post("/generate", {**body, "rid": call.rid}))

    def stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        with self._begin_call(body["rid"]) as call:
            response = self._retry(call, lambda: self._open_stream({**body, "rid": call.rid}))
            try:
                yield from _read_events(response)
            except httpx.TransportError as error:
                raise _name_transport_error(error) from error
            finally:
                response.close()

    def abort(self, rid: str) -> None:
        with self._lock:
            call = self._calls.get(rid)
        if call is None:
            return
        call.cancelled.set()
        with suppress(NotFoundError):  # it has ended
            self._send("POST", "/abort_request", {"rid": call.rid}, _ABORT_TIMEOUT)

    def flush_cache(self) -> None:
        self._send("POST", "/flush_cache")

    def describe_model(self) -> dict[str, Any]:
        return dict(self._send("GET", "/get_model_info").json())

    def describe_tokenizer(self) -> dict[str, Any]:
        return dict(self._send("GET", "/tokenizer_info").json())

    def describe_server(self) -> dict[str, Any]:
        return dict(self._send("GET", "/server_info").json())

    @contextmanager
    def _begin_call(self, rid: str) -> Iterator[_Call]:
        call = _Call(rid)
        with self._lock:
            self._calls[rid] = call
        try:
            yield call
        finally:
            with self._lock:
                del self._calls[rid]

    def _retry(self, call: _Call, ask: Callable[[], T]) -> T:
        """Ask again while the server is busy, or its node has failed."""
        name, pause = call.rid, _FIRST_PAUSE
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                return ask()
            except _RETRIED:
                if attempt == _MAX_ATTEMPTS or call.cancelled.wait(pause):
                    raise
            pause = min(2 * pause, _MAX_PAUSE)
            call.rid = f"{name}.{attempt}"
        raise AssertionError("the last attempt returns or raises")

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._send("POST", path, body).json()

    def _send(
        self, method: str, path: str, body: Any = None, timeout: httpx.Timeout = _TIMEOUT
    ) -> httpx.Response:
        try:
            response = self._client.request(method, path, json=body, timeout=timeout)
        except httpx.TransportError as error:
            raise _name_transport_error(error) from error
        _check_status(response)
        return response

    def _open_stream(self, body: Mapping[str, Any]) -> httpx.Response:
        request = self._client.build_request("POST", "/generate", json=body)
        try:
            response = self._client.send(request, stream=True)
            if response.status_code != httpx.codes.OK:
                response.read()
        except httpx.TransportError as error:
            raise _name_transport_error(error) from error
        _check_status(response)
        return response


_services: weakref.WeakSet[HttpService] = weakref.WeakSet()


def _reconnect() -> None:
    """Give a forked process its own connections, because two cannot read from the same socket."""
    for service in list(_services):
        service.connect()


os.register_at_fork(after_in_child=_reconnect)


def _name_transport_error(error: httpx.TransportError) -> PDError:
    if isinstance(error, httpx.ConnectError):
        return SetupError(f"cannot reach the server at {error.request.url}: {error}")
    return UnavailableError(f"lost the connection to {error.request.url}: {error}")


def _check_status(response: httpx.Response) -> None:
    if response.status_code == httpx.codes.OK:
        return
    try:
        message, param = (response.json()["error"][name] for name in ("message", "param"))
    except (ValueError, KeyError, TypeError):
        message, param = f"status {response.status_code}: {response.text[:500]}", None
    raise error_of_status(response.status_code, message, param)


def _read_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream. Raises PDError for an error in it, or if it ends early."""
    received = b""
    for part in response.iter_bytes():
        # Not `iter_lines`, because texts may contain line ends of Unicode, such as U+2028.
        *lines, received = (received + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            if data == line:
                continue
            event = json.loads(data)
            if "error" in event:
                raise NodeFailedError(event["error"]["message"])
            yield event
    raise UnavailableError("the server ended the stream early")
