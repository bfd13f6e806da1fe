"""Keeps the proxy's nodes equal to the nodes listed by sources."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from pd.core.addresses import is_loopback
from pd.core.errors import InvalidRequestError
from pd.proxy.nodes.discovery.follower import Follower
from pd.proxy.nodes.node_http import NodeHttpError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.proxy.nodes.discovery.source import Source
    from pd.proxy.nodes.node_handle import NodeHandle
    from pd.proxy.nodes.pool import NodePool

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.5
# We bound the CPU time spent on dead addresses, however many there are and however fast they
# change: a probe takes one or two milliseconds.
_PROBES_AT_ONCE = 32
_SECONDS_BETWEEN_PROBES = 0.02
_FIRST_RETRY_SECONDS = 0.25
_LAST_RETRY_SECONDS = 5.0
_SECONDS_PER_PENDING_PROBE = 0.05
_REPORT_SECONDS = 30.0
# An added node must send heartbeats within this time. Otherwise we try another address of the same
# instance.
_MEETING_SECONDS = 10.0


class _Added(NamedTuple):
    """A node added by discovery, not by the operator. ``at``: on the monotonic clock."""

    node: NodeHandle
    instance_id: str
    at: float


class Discovery:
    """Adds the nodes listed by sources, and drains nodes listed no longer.

    We add a node when its ``/server_info`` answers, because we need its role. With a cluster key
    the answer is signed, so an address alone makes nobody a node. We never drain nodes given by URL
    or with ``POST /workers``. A node removed by an administrator stays away until it is listed
    anew.

    Args:
        has_key: whether nodes prove a cluster key. Without one, we use only loopback addresses.
    """

    def __init__(self, sources: Sequence[Source], pool: NodePool, *, has_key: bool) -> None:
        self._followers = [Follower(source, self._apply_lists) for source in sources]
        self._pool, self._has_key = pool, has_key
        self._listed: frozenset[str] = frozenset()
        self._ignored: frozenset[str] = frozenset()
        self._added: dict[str, _Added] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._problems: dict[str, str] = {}
        self._report_at = 0.0
        self._slots = asyncio.Semaphore(_PROBES_AT_ONCE)
        self._turn = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start to follow the sources, on the running event loop."""
        follows = (follower.follow_source() for follower in self._followers)
        self._tasks = [asyncio.create_task(work) for work in (self._check_periodically(), *follows)]

    async def close(self) -> None:
        """Stop following the sources. The nodes stay."""
        tasks = [*self._tasks, *self._probes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _check_periodically(self) -> None:
        # Sources may stay empty or silent, so we check the time without waiting for them.
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                for follower in self._followers:
                    follower.drop_after_hold()
                self._check_nodes()
                self._report_problems()
            except Exception:  # a fault with one node must not stop discovery of the others
                logger.exception("discovery failed")

    def _apply_lists(self) -> None:
        listed: frozenset[str] = frozenset().union(*(f.urls for f in self._followers))
        usable = self._drop_strangers(listed)
        for url in self._listed - usable:
            self._problems.pop(url, None)
            probe = self._probes.pop(url, None)
            if probe is not None:
                probe.cancel()
            # NOTE: we remember a draining node, because it is still ours if it is listed again.
            if url in self._added and self._added[url].node in self._pool.nodes:
                logger.info("discovery: %s is no longer listed; draining it", url)
                self._pool.drain_node(self._added[url].node)
        for url in usable - self._listed:
            self._probes[url] = asyncio.create_task(self._probe_address(url))
        self._listed = usable

    def _drop_strangers(self, urls: frozenset[str]) -> frozenset[str]:
        if self._has_key:
            return urls
        usable = frozenset(url for url in urls if is_loopback(urlsplit(url).hostname or ""))
        ignored = urls - usable
        if new := sorted(ignored - self._ignored):
            others = f" and {len(new) - 1} others are" if new[1:] else " is"
            logger.warning(
                "discovery: %s%s ignored: nodes on other hosts must prove a cluster key; "
                "set --cluster-key-file",
                new[0],
                others,
            )
        self._ignored = ignored
        return usable

    def _check_nodes(self) -> None:
        """Forget nodes that left the pool, and probe nodes again after a change of role."""
        there = set(self._pool.nodes)
        for url, (node, _, _) in list(self._added.items()):
            if node not in there:
                del self._added[url]
            elif node.proved_role is not None and not node.is_draining and url in self._listed:
                logger.info(
                    "discovery: %s node %s is a %s node now", node.added_as, url, node.proved_role
                )
                self._pool.drain_node(node)
                self._probes[url] = asyncio.create_task(self._probe_address(url))

    def _report_problems(self) -> None:
        now = time.monotonic()
        if self._problems and now > self._report_at:
            self._report_at = now + _REPORT_SECONDS
            url = min(self._problems)
            logger.warning(
                "discovery: %d listed addresses are not in use, such as %s: %s",
                *(len(self._problems), url, self._problems[url]),
            )

    async def _probe_address(self, url: str) -> None:
        """Probe a listed address until a node there is in use, added by us or the operator."""
        pause = _FIRST_RETRY_SECONDS
        while True:
            try:
                if await self._add_address(url):
                    break
            except NodeHttpError as error:
                self._problems[url] = f"/server_info: {error}"
            except InvalidRequestError as error:
                self._problems[url] = error.message
            except Exception:  # a fault with one address must not end its probes
                logger.exception("discovery: cannot probe %s", url)
            least = _SECONDS_PER_PENDING_PROBE * len(self._probes)
            await asyncio.sleep(max(pause, least) * random.uniform(0.75, 1.25))
            pause = min(2 * pause, _LAST_RETRY_SECONDS)
        self._problems.pop(url, None)
        del self._probes[url]

    async def _add_address(self, url: str) -> bool:
        """Add the node at this address. Return False to try again later."""
        if self._is_operators(url):
            return True
        async with self._slots:
            async with self._turn:
                await asyncio.sleep(_SECONDS_BETWEEN_PROBES)
            info = await self._pool.fetch_server_info(url)
        if self._is_operators(url):
            return True
        if self._is_in_use(info.instance_id, url):
            # This is another address of the same node. We may need it once the one in use is gone.
            self._problems.pop(url, None)
            return False
        node = self._pool.add_node(info.role, url)
        self._added[url] = _Added(node, info.instance_id, time.monotonic())
        return True

    def _is_operators(self, url: str) -> bool:
        """Whether the operator added a node at this URL."""
        added = self._added.get(url)
        return any(
            node.url == url and (added is None or node is not added.node)
            for node in self._pool.nodes
        )

    def _is_in_use(self, instance_id: str, url: str) -> bool:
        """Whether this instance is in use, or soon will be, at another URL."""
        now = time.monotonic()
        for node in self._pool.nodes:
            if node.url == url or node.is_draining:
                continue
            if node.is_alive and node.instance_id == instance_id:
                return True
            added = self._added.get(node.url)
            if not node.is_alive and added is not None and added.instance_id == instance_id:
                return now - added.at < _MEETING_SECONDS
        return False
