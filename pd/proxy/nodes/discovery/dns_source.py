"""Reads node addresses from DNS, again whenever the records expire."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import dns.exception
import dns.name
import dns.rdatatype
import dns.resolver

from pd.core.addresses import format_host
from pd.core.brief import short_repr
from pd.core.errors import UsageError
from pd.proxy.nodes.discovery.source import HOLD_SECONDS, MAX_ADDRESSES, SourceError, check_count

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from dns.rdatatype import RdataType

RESOLV_CONF = "/etc/resolv.conf"
# We query records again after their time to live, limited to this range.
MIN_SECONDS = 2.0
MAX_SECONDS = 30.0
# An empty answer has no time to live.
_EMPTY_SECONDS = 2.0
_QUERY_SECONDS = 3.0
# Maximum size of answers in UDP, which passes every network. Larger ones come over TCP.
_UDP_BYTES = 1232
_THREADS = 4
_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_MAX_NAME = 253


class Records(NamedTuple):
    """One answer.

    Attributes:
        data: addresses, or targets with ports of SRV records.
        extra: addresses of targets included in the answer, by name.
        ttl: seconds until the answer expires.
    """

    data: list[tuple[str, int]]
    extra: dict[str, set[str]]
    ttl: float


class SystemResolver:
    """Queries the name servers of ``/etc/resolv.conf``. We read it again when it changes."""

    def __init__(self, path: str = RESOLV_CONF) -> None:
        self._path = path
        self._version: tuple[int, int, int] | None = None
        self._resolver: dns.resolver.Resolver | None = None

    def __call__(self) -> dns.resolver.Resolver:
        """Return the resolver. Raises OSError or DNSException for an unusable file."""
        status = os.stat(self._path)
        version = status.st_ino, status.st_mtime_ns, status.st_size
        if self._resolver is None or version != self._version:
            resolver = dns.resolver.Resolver(self._path)
            resolver.use_edns(0, 0, _UDP_BYTES)
            self._resolver, self._version = resolver, version
        return self._resolver


class DnsSource:
    """Nodes at all addresses of a name, or at the targets and ports of its SRV records.

    ``NAME:PORT`` stands for all addresses of a name, such as the name of a headless service.
    ``_SERVICE._tcp.NAME`` stands for SRV records.

    Args:
        get_resolver: returns the current resolver.
    """

    def __init__(
        self, text: str, get_resolver: Callable[[], dns.resolver.Resolver] | None = None
    ) -> None:
        """Parse ``text``. Raises UsageError for another form."""
        self.name = f"dns:{text}"
        self._host, self._port = _parse_name(text)
        self._get_resolver = get_resolver or SystemResolver()
        # When a query fails, we keep its last answer for a while, because other queries may
        # succeed.
        self._last: dict[tuple[str, RdataType], tuple[float, frozenset[str]]] = {}

    async def watch_urls(self) -> AsyncGenerator[frozenset[str], None]:
        """See :meth:`pd.proxy.nodes.discovery.source.Source.watch_urls`."""
        # We parse messages in threads, because one of 64 KiB takes a third of a second.
        threads = ThreadPoolExecutor(_THREADS, "pd-dns")
        try:
            while True:
                urls, ttl = await self._look_up(threads)
                yield check_count(self.name, urls)
                await asyncio.sleep(min(max(ttl, MIN_SECONDS), MAX_SECONDS))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    async def _look_up(self, threads: ThreadPoolExecutor) -> tuple[frozenset[str], float]:
        if self._port is not None:
            addresses, ttl = await self._query_addresses(threads, [self._host])
            return _make_urls((a, self._port) for a in addresses[self._host]), ttl
        records = await self._query_records(threads, self._host, dns.rdatatype.SRV)
        targets = {target for target, _ in records.data}
        if len(targets) > MAX_ADDRESSES:
            raise SourceError(f"{self.name} has {len(targets)} targets (at most {MAX_ADDRESSES})")
        addresses, ttl = await self._query_addresses(threads, sorted(targets - set(records.extra)))
        addresses.update(records.extra)
        urls = _make_urls((a, port) for target, port in records.data for a in addresses[target])
        return urls, min(ttl, records.ttl)

    async def _query_addresses(
        self, threads: ThreadPoolExecutor, names: list[str]
    ) -> tuple[dict[str, set[str]], float]:
        """Query the addresses of names. Return them and their time to live.

        Raises SourceError if we know nothing about any of the names.
        """
        keys = [(name, kind) for name in names for kind in (dns.rdatatype.A, dns.rdatatype.AAAA)]
        answers = await asyncio.gather(
            *(self._query_records(threads, *key) for key in keys), return_exceptions=True
        )
        now, ttl = time.monotonic(), MAX_SECONDS
        last, self._last = self._last, {}
        addresses: dict[str, set[str]] = {name: set() for name in names}
        failures: list[BaseException] = []
        for key, answer in zip(keys, answers, strict=True):
            if isinstance(answer, Records):
                self._last[key] = now, frozenset(address for address, _ in answer.data)
                ttl = min(ttl, answer.ttl)
            elif not isinstance(answer, SourceError):
                raise answer
            else:
                failures.append(answer)
                ttl = _EMPTY_SECONDS
                if key in last and now - last[key][0] < HOLD_SECONDS:
                    self._last[key] = last[key]
            addresses[key[0]] |= self._last.get(key, (0.0, frozenset()))[1]
        if failures and not any(addresses.values()):
            raise failures[0]
        return addresses, ttl

    async def _query_records(
        self, threads: ThreadPoolExecutor, name: str, kind: RdataType
    ) -> Records:
        """Query records. An unknown name has none. Raises SourceError."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(threads, self._resolve_records, name, kind)
        except (dns.exception.DNSException, OSError, ValueError) as error:
            reason = short_repr(str(error) or type(error).__name__)
            raise SourceError(f"no {kind.name} records of {name}: {reason}") from None

    def _resolve_records(self, name: str, kind: RdataType) -> Records:
        try:
            answer = self._get_resolver().resolve(
                name, kind, search=True, lifetime=_QUERY_SECONDS, raise_on_no_answer=False
            )
        except dns.resolver.NXDOMAIN:
            return Records([], {}, _EMPTY_SECONDS)
        if answer.rrset is None:
            return Records([], {}, _EMPTY_SECONDS)
        ttl = float(answer.chaining_result.minimum_ttl)
        if kind != dns.rdatatype.SRV:
            return Records([(record.address, 0) for record in answer.rrset], {}, ttl)
        targets = [
            (record.target.to_text().lower(), record.port)
            for record in answer.rrset
            if record.port and record.target != dns.name.root
        ]
        extra: dict[str, set[str]] = {}
        wanted = {target for target, _ in targets}
        for rrset in answer.response.additional:
            target = rrset.name.to_text().lower()
            if target in wanted and rrset.rdtype in (dns.rdatatype.A, dns.rdatatype.AAAA):
                extra.setdefault(target, set()).update(record.address for record in rrset)
                ttl = min(ttl, float(rrset.ttl))
        return Records(targets, extra, ttl)


def _parse_name(text: str) -> tuple[str, int | None]:
    """Split a text into name and port. The port is None for SRV records, which contain it."""
    name, colon, port = text.rpartition(":")
    if not colon:
        name = text
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME or _is_address(name):
        raise UsageError(f"--discover dns: {short_repr(name)} is not a valid DNS name")
    if name.startswith("_"):
        if colon:
            raise UsageError(
                f"--discover dns: SRV records have ports of their own; leave out {short_repr(port)}"
            )
        return name, None
    if not re.fullmatch(r"[0-9]{1,5}", port) or not colon or not 0 < int(port) < 1 << 16:
        raise UsageError(
            f"--discover dns:{short_repr(text)[1:-1]}: give dns:NAME:PORT, such as pd:30000"
        )
    return name, int(port)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _make_urls(addresses: Iterable[tuple[str, int]]) -> frozenset[str]:
    """Make the URLs of addresses. We skip impossible addresses, because a server may return any."""
    return frozenset(
        f"http://{format_host(address)}:{port}"
        for address, port in addresses
        if not ipaddress.ip_address(address).is_multicast
        and not ipaddress.ip_address(address).is_unspecified
    )
