"""Lists and watches EndpointSlices through the API server of our own cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import httpx
import msgspec

from pd.core.addresses import format_host
from pd.core.brief import short_repr
from pd.core.errors import UsageError
from pd.proxy.nodes.discovery.source import SourceError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_HOST, _PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
# A slice of a hundred endpoints has some 40 KiB.
MAX_LIST_BYTES = 2 << 20
MAX_LINE_BYTES = 1 << 20
MAX_SLICES = 256
_PAGE = 50
_MAX_FILE_BYTES = 1 << 20
_LIST_SECONDS = 20.0
# The server ends a watch after this time. A longer watch is broken, and a silent one may be. We may
# therefore learn of changes this late.
_WATCH_SECONDS = 60
_SILENCE_SECONDS = 15.0
_CONNECT_SECONDS = 5.0

_ShortText = Annotated[str, msgspec.Meta(max_length=256)]
_MediumText = Annotated[str, msgspec.Meta(max_length=8192)]


class Conditions(msgspec.Struct):
    """State of an endpoint. A missing condition is unknown, which counts as ready."""

    ready: bool | None = None
    terminating: bool | None = None


class SliceEndpoint(msgspec.Struct):
    """Addresses of one pod."""

    addresses: list[str] = []
    conditions: Conditions | None = None


class EndpointPort(msgspec.Struct):
    """A port of all endpoints of a slice."""

    name: str | None = None
    port: int | None = None


class SliceMeta(msgspec.Struct, rename="camel"):
    """Name and version of an object."""

    name: _ShortText = ""
    resource_version: _ShortText = ""


class EndpointSlice(msgspec.Struct):
    """Some of the endpoints of a service. An error status of the server has the same type."""

    metadata: SliceMeta = msgspec.field(default_factory=SliceMeta)
    endpoints: list[SliceEndpoint] | None = None
    ports: list[EndpointPort] | None = None
    code: int = 0
    message: str = ""


class WatchEvent(msgspec.Struct):
    """One line of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: EndpointSlice


class _ListMeta(msgspec.Struct, rename={"resource_version": "resourceVersion", "more": "continue"}):
    resource_version: _ShortText = ""
    more: _MediumText | None = None


class _SliceList(msgspec.Struct):
    metadata: _ListMeta
    items: list[EndpointSlice] | None = None


class ExpiredError(Exception):
    """The server has forgotten changes since our list, so we must list again."""


_list_decoder = msgspec.json.Decoder(_SliceList)
_event_decoder = msgspec.json.Decoder(WatchEvent)


class KubernetesApi:
    """The API server named by the environment, used with the service account of our pod.

    We read token and certificate for every connection, because they rotate.

    Args:
        account: directory with ``token``, ``ca.crt`` and ``namespace``.
    """

    def __init__(
        self, account: Path = SERVICE_ACCOUNT, environment: Mapping[str, str] = os.environ
    ) -> None:
        """Find the API server. Raises UsageError outside of a cluster."""
        host, port = environment.get(_HOST, ""), environment.get(_PORT, "443")
        if not host or not port.isdecimal():
            raise UsageError(
                f"--discover kubernetes: {_HOST} and {_PORT} are not set: the proxy does not run "
                "in a pod"
            )
        self._account = account
        self._base = f"https://{format_host(host)}:{port}/apis/discovery.k8s.io/v1/namespaces"

    @contextlib.asynccontextmanager
    async def open_client(self) -> AsyncIterator[httpx.AsyncClient]:
        """Make a client. Raises SourceError.

        It trusts only the cluster's authority, follows no redirects and decompresses nothing.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(cadata=self._read_account_file("ca.crt"))
        except (ssl.SSLError, ValueError) as error:
            raise SourceError(f"{self._account / 'ca.crt'} holds no certificate: {error}") from None
        async with httpx.AsyncClient(
            verify=context,
            trust_env=False,
            timeout=httpx.Timeout(_SILENCE_SECONDS, connect=_CONNECT_SECONDS),
            headers={"Accept": "application/json", "Accept-Encoding": "identity"},
        ) as client:
            yield client

    def read_namespace(self) -> str:
        """Read the namespace of our pod. Raises SourceError."""
        return self._read_account_file("namespace")

    async def list_slices(
        self, client: httpx.AsyncClient, namespace: str, selector: str
    ) -> tuple[list[EndpointSlice], str]:
        """List all slices. Also return the version from which to watch. Raises SourceError."""
        slices: list[EndpointSlice] = []
        size, more = 0, ""
        with _as_source_errors():
            async with asyncio.timeout(_LIST_SECONDS):
                while True:
                    query = {"labelSelector": selector, "limit": str(_PAGE)}
                    content = bytearray()
                    async with self._open_stream(
                        client, namespace, query | ({"continue": more} if more else {})
                    ) as response:
                        async for part in response.aiter_raw():
                            content += part
                            if size + len(content) > MAX_LIST_BYTES:
                                raise SourceError(f"the list exceeds {MAX_LIST_BYTES} bytes")
                    size += len(content)
                    page = _list_decoder.decode(content)
                    slices += page.items or []
                    if len(slices) > MAX_SLICES:
                        raise SourceError(f"the list has more than {MAX_SLICES} EndpointSlices")
                    if not page.metadata.more:
                        return slices, page.metadata.resource_version
                    if page.metadata.more == more:
                        raise SourceError("the list does not end")
                    more = page.metadata.more

    async def watch_slices(
        self, client: httpx.AsyncClient, namespace: str, selector: str, version: str
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield events after a version, until the server ends the watch or the connection breaks.

        Raises:
            ExpiredError: the version is too old.
            SourceError: the server refuses, or its answer makes no sense.
        """
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "labelSelector": selector,
            "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        with _as_source_errors():
            async with self._open_stream(client, namespace, query, _WATCH_SECONDS) as response:
                with contextlib.suppress(httpx.TransportError):
                    # The next watch repeats an event cut off in the middle.
                    async for line in _iter_lines(response):
                        yield _read_event(line)

    @contextlib.asynccontextmanager
    async def _open_stream(
        self,
        client: httpx.AsyncClient,
        namespace: str,
        query: dict[str, str],
        silence: float = 0.0,
    ) -> AsyncIterator[httpx.Response]:
        timeout = httpx.Timeout(silence + _SILENCE_SECONDS, connect=_CONNECT_SECONDS)
        async with client.stream(
            "GET",
            f"{self._base}/{namespace}/endpointslices",
            params=query,
            headers={"Authorization": f"Bearer {self._read_account_file('token')}"},
            timeout=timeout,
        ) as response:
            if response.status_code == HTTPStatus.GONE:
                raise ExpiredError
            if response.status_code != HTTPStatus.OK:
                raise SourceError(_explain_status(response.status_code, namespace))
            yield response

    def _read_account_file(self, name: str) -> str:
        path = self._account / name
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_FILE_BYTES).decode().strip()
        except OSError as error:
            raise SourceError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise SourceError(f"{path} is not a text file") from None
        if not text or (name != "ca.crt" and not (text.isascii() and text.isprintable())):
            raise SourceError(f"{path} is empty or not one line")
        return text


@contextlib.contextmanager
def _as_source_errors() -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        reason = short_repr(str(error) or type(error).__name__)
        raise SourceError(f"cannot reach the API server: {reason}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(f"invalid answer of the API server: {short_repr(str(error))}") from None


def _explain_status(status: int, namespace: str) -> str:
    remedy: dict[int, str] = {
        HTTPStatus.UNAUTHORIZED: ": it does not accept the token of the service account",
        HTTPStatus.FORBIDDEN: (
            ": let the service account list and watch endpointslices (discovery.k8s.io) in "
            f"namespace {namespace}"
        ),
        HTTPStatus.BAD_REQUEST: ": it does not understand the selector",
    }
    return f"the API server answers with status {status}{remedy.get(status, '')}"


async def _iter_lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield whole lines, until the answer or its time ends. Raises SourceError for a long line."""
    buffer = bytearray()
    end_at = time.monotonic() + _WATCH_SECONDS + _SILENCE_SECONDS
    async for part in response.aiter_raw():
        start = len(buffer)
        buffer += part
        while (end := buffer.find(b"\n", start)) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            start = 0
            if line.strip():
                yield line
        if len(buffer) > MAX_LINE_BYTES:
            raise SourceError(f"a line of the watch exceeds {MAX_LINE_BYTES} bytes")
        if time.monotonic() > end_at:
            return


def _read_event(line: bytes) -> WatchEvent:
    event = _event_decoder.decode(line)
    if event.type == "ERROR":
        if event.object.code == HTTPStatus.GONE:
            raise ExpiredError
        reason = short_repr(event.object.message or event.object.code)
        raise SourceError(f"the API server ends the watch: {reason}")
    return event
