"""Reads node addresses from the EndpointSlices of Kubernetes, as they change."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import time
from typing import TYPE_CHECKING, NamedTuple

from pd.core.addresses import format_host
from pd.core.brief import short_repr
from pd.core.errors import UsageError
from pd.proxy.nodes.discovery.kubernetes_api import MAX_SLICES, ExpiredError, KubernetesApi
from pd.proxy.nodes.discovery.source import MAX_ADDRESSES, SourceError, check_count

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import httpx

    from pd.proxy.nodes.discovery.kubernetes_api import EndpointSlice

logger = logging.getLogger(__name__)

HTTP_PORT_NAME = "http"
# We limit requests to this rate, because a server may end every watch at once.
_SECONDS_BETWEEN_REQUESTS = 1.0

_LABEL = r"([a-z0-9A-Z]([-a-z0-9A-Z_.]{0,61}[a-z0-9A-Z])?)"
_KEY = rf"([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_LABEL}"
_TERM = (
    rf" *(! *{_KEY}|{_KEY}( *(=|==|!=) *{_LABEL}?| +(in|notin) *"
    rf"\( *{_LABEL}( *, *{_LABEL})* *\))?) *"
)
_SELECTOR = re.compile(rf"{_TERM}(,{_TERM})*")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_PORT_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
_MAX_SELECTOR = 1024


class _Listed(NamedTuple):
    """The nodes of one EndpointSlice, or why it has none."""

    urls: frozenset[str]
    problem: str = ""


class KubernetesSource:
    """``[NAMESPACE/]SELECTOR[:PORT]``: ready endpoints of the services with matching labels.

    PORT is the name of a port of the service, or a number. By default it is ``http``, or the only
    port of the service.

    Args:
        api: by default the API of our own cluster.
    """

    def __init__(self, text: str, api: KubernetesApi | None = None) -> None:
        """Parse ``text``. Raises UsageError for another form, and outside of a cluster."""
        self.name = f"kubernetes:{text}"
        self._namespace, self._selector, self._port = _parse_selector(text)
        self._api = api or KubernetesApi()
        self._problem = ""

    async def watch_urls(self) -> AsyncGenerator[frozenset[str], None]:
        """See :meth:`pd.proxy.nodes.discovery.source.Source.watch_urls`."""
        namespace = self._namespace or self._api.read_namespace()
        if not _NAMESPACE.fullmatch(namespace):
            raise SourceError(f"invalid namespace {short_repr(namespace)}")
        async with self._api.open_client() as client:
            while True:
                began = time.monotonic()
                with contextlib.suppress(ExpiredError):
                    async with contextlib.aclosing(self._follow_slices(client, namespace)) as lists:
                        async for urls in lists:
                            yield urls
                await _pause_since(began)

    async def _follow_slices(
        self, client: httpx.AsyncClient, namespace: str
    ) -> AsyncGenerator[frozenset[str], None]:
        """List slices, and watch them from there. Raises ExpiredError if we must list again."""
        listed, version = await self._api.list_slices(client, namespace, self._selector)
        slices = {item.metadata.name: self._read_slice(item) for item in listed}
        urls = self._collect_urls(slices)
        yield urls
        while True:
            began = time.monotonic()
            events = self._api.watch_slices(client, namespace, self._selector, version)
            async with contextlib.aclosing(events):
                async for event in events:
                    item = event.object
                    version = item.metadata.resource_version or version
                    if event.type == "BOOKMARK":
                        continue
                    if event.type == "DELETED":
                        slices.pop(item.metadata.name, None)
                    else:
                        slices[item.metadata.name] = self._read_slice(item)
                    if len(slices) > MAX_SLICES:
                        raise SourceError(f"there are more than {MAX_SLICES} EndpointSlices")
                    new = self._collect_urls(slices)
                    if new != urls:
                        urls = new
                        yield urls
            await _pause_since(began)

    def _collect_urls(self, slices: dict[str, _Listed]) -> frozenset[str]:
        """Collect the nodes of all slices. Raises SourceError if there are none because of a
        problem."""
        urls: frozenset[str] = frozenset().union(*(listed.urls for listed in slices.values()))
        problem = next((listed.problem for listed in slices.values() if listed.problem), "")
        if problem and not urls:
            raise SourceError(problem)
        if problem != self._problem:
            self._problem = problem
            if problem:
                logger.warning("discovery: %s: %s", self.name, problem)
        return check_count(self.name, urls)

    def _read_slice(self, item: EndpointSlice) -> _Listed:
        ready = [
            address
            for endpoint in item.endpoints or ()
            if (state := endpoint.conditions) is None
            or (state.ready is not False and not state.terminating)
            # All addresses of an endpoint belong to the same pod.
            for address in endpoint.addresses[:1]
            if _is_host(address)
        ]
        if not ready:
            return _Listed(frozenset())
        name = short_repr(item.metadata.name)
        if len(ready) > MAX_ADDRESSES:
            raise SourceError(
                f"EndpointSlice {name} has {len(ready)} addresses (at most {MAX_ADDRESSES})"
            )
        port = self._port_of(item)
        if port is None:
            wanted = self._port or HTTP_PORT_NAME
            other = "another port" if self._port else "its port: kubernetes:SELECTOR:PORT"
            return _Listed(
                frozenset(), f"EndpointSlice {name} has no port named {wanted}; name {other}"
            )
        return _Listed(frozenset(f"http://{format_host(address)}:{port}" for address in ready))

    def _port_of(self, item: EndpointSlice) -> int | None:
        """Find the port of a slice's nodes. Return None if the slice does not name it."""
        if isinstance(self._port, int):
            return self._port
        ports = item.ports or []
        named = [port for port in ports if port.name == (self._port or HTTP_PORT_NAME)]
        if not named and self._port is None and len(ports) == 1:
            named = ports
        if not named or named[0].port is None or not 0 < named[0].port < 1 << 16:
            return None
        return named[0].port


def _parse_selector(text: str) -> tuple[str, str, str | int | None]:
    """Split a text into namespace, selector and port."""
    selector, colon, port_text = text.partition(":")
    port: str | int | None = None
    if colon:
        is_number = re.fullmatch(r"[0-9]{1,5}", port_text)
        if not _PORT_NAME.fullmatch(port_text) or (is_number and not 0 < int(port_text) < 1 << 16):
            raise UsageError(
                f"--discover kubernetes: the port {short_repr(port_text)} must be a number or the "
                "name of a port"
            )
        port = int(port_text) if is_number else port_text
    # A label's key may also have a prefix. It is a domain and so contains a dot.
    namespace, slash, rest = selector.partition("/")
    if slash and _NAMESPACE.fullmatch(namespace):
        selector = rest
    else:
        namespace = ""
    if len(selector) > _MAX_SELECTOR or not _SELECTOR.fullmatch(selector):
        raise UsageError(
            f"--discover kubernetes: invalid label selector {short_repr(selector)}; give one such "
            "as app=pd,role=decode"
        )
    return namespace, selector, port


def _is_host(address: str) -> bool:
    """Whether a host can have this IP address. Slices of names are of no use."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not parsed.is_multicast and not parsed.is_unspecified


async def _pause_since(began: float) -> None:
    await asyncio.sleep(max(0.0, began + _SECONDS_BETWEEN_REQUESTS - time.monotonic()))
