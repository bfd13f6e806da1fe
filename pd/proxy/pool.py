"""All nodes: which are there, which died, and which came back."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import zmq

from pd.core.addresses import check_node_url
from pd.core.brief import brief
from pd.core.errors import InvalidRequestError, NotFoundError
from pd.core.messages import (
    HEARTBEAT_INTERVAL,
    LEASE_SECONDS,
    MAX_MEETINGS,
    AnyMessage,
    NodeHeartbeat,
    PrefixEvents,
)
from pd.proxy.heartbeats import HeartbeatThread, LoopWatch
from pd.proxy.node_handle import NodeHandle, ServerInfo
from pd.proxy.node_http import NodeHttp, NodeHttpError, NotListeningError
from pd.proxy.role_lease import DecisionLease
from pd.proxy.roles import RoleBalancer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Literal

    from pd.core.node_info import Role
    from pd.proxy.channel import Sockets

logger = logging.getLogger(__name__)

POLL_INTERVAL = 1.0
# How long a node that has not proved itself keeps others from the message port that it names.
TURN_SECONDS = 2.5
# A node costs a poll a second, four heartbeats a second and three sockets.
MAX_WORKERS = 256
# A refused connection proves a death only together with silence, or if messages are refused, too: a
# node's HTTP side may restart.
SILENCE_SECONDS = 1.0
CONNECT_TRIES = 50
CONNECT_TRY_SECONDS = 0.01
LINK_POLL_SECONDS = 0.05
MIN_POLL_PAUSE = 0.05

_GONE = "its port refuses connections and its heartbeats stopped"
NO_HEARTBEAT_YET = "no heartbeat yet"
DEAF = (
    "answers HTTP but not messages: give proxy and node the same --cluster-key-file, and let the "
    "proxy reach the message port (endpoints.zmq of its /server_info)"
)

_ROLES = ("prefill", "decode", "unified")


def _check_role(role: str, allowed: Sequence[str] = _ROLES) -> None:
    if role not in allowed:
        raise InvalidRequestError(
            f"role must be one of {', '.join(allowed)}, not {role!r}", param="role"
        )


class NodePool:
    """Polls ``/server_info``, exchanges heartbeats and holds leases.

    Args:
        itl: seconds between tokens that nodes are asked to keep; 0 leaves it to them.
        elastic: roles of elastic nodes move to where the demand is.

    Callbacks: ``on_message(node, message)`` for everything but heartbeats, and ``on_taken()``
    after those that were there; ``on_lost(node, reason, died)`` when what was sent to an instance
    is lost, and whether it seems to have died; ``on_heartbeat(node)`` when a node has told its
    state; ``on_change()`` when a node became ready or not.
    """

    def __init__(
        self,
        sockets: Sockets,
        *,
        cluster_key: bytes | None = None,
        itl: float = 0.0,
        elastic: bool = False,
        on_message: Callable[[NodeHandle, AnyMessage], None],
        on_taken: Callable[[], None],
        on_lost: Callable[[NodeHandle, str, bool], None],
        on_heartbeat: Callable[[NodeHandle], None],
        on_change: Callable[[], None],
    ) -> None:
        self.nodes: list[NodeHandle] = []
        self._sockets = sockets
        self._itl = itl
        self._lease = DecisionLease(sockets.instance_id, self.nodes)
        self._roles: RoleBalancer | None = None
        if elastic:
            self._roles = RoleBalancer(self.nodes, self._lease, self._order)
        self._on_message = on_message
        self._on_taken = on_taken
        self._on_lost = on_lost
        self._on_heartbeat = on_heartbeat
        self._on_change = on_change
        self._http = NodeHttp(cluster_key)
        self._watchers: dict[NodeHandle, asyncio.Task[None]] = {}
        self._wake: dict[NodeHandle, asyncio.Event] = {}
        self._pulse: asyncio.Task[None] | None = None
        self._loop_watch = LoopWatch()
        self._heartbeats = HeartbeatThread(sockets, self._loop_watch)

    def start(self) -> None:
        self._heartbeats.start()
        self._pulse = asyncio.create_task(self._beat())

    async def close(self) -> None:
        tasks = [*self._watchers.values(), *([self._pulse] if self._pulse else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for node in self.nodes:
            if node.channel is not None:
                node.channel.close()
        self._heartbeats.close()
        await self._http.close()

    def add(self, role: Role, url: str) -> NodeHandle:
        """Begin to use a node; adding one that is there or drains takes it (back) into use.

        Raises InvalidRequestError for a role or URL that makes no sense, and for one too many.
        """
        _check_role(role)
        url = check_node_url(url)
        for node in self.nodes:
            if node.url == url:
                if role not in (node.role, node.added_as):
                    raise InvalidRequestError(
                        f"{url} is in use as {node.role} already; remove it first", param="role"
                    )
                node.added_as, node.draining = role, False
                return node
        if len(self.nodes) >= MAX_WORKERS:
            raise InvalidRequestError(
                f"there are {len(self.nodes)} workers, at most {MAX_WORKERS} may be; "
                "remove one first"
            )
        node = NodeHandle(role, url, self._itl)
        self.nodes.append(node)
        self._wake[node] = asyncio.Event()
        self._watchers[node] = asyncio.create_task(self._watch(node))
        return node

    def find(self, name: str) -> NodeHandle:
        """The node with this URL, ``host:port`` or instance id. Raises NotFoundError."""
        wanted = name.rstrip("/")
        # A node that proved to be an instance goes before one that only says so.
        for node in sorted(self.nodes, key=lambda node: not node.alive):
            known = (node.url, urlsplit(node.url).netloc, node.instance_id)
            if wanted and wanted in known:
                return node
        raise NotFoundError(
            f"there is no worker {brief(name)}; see GET /workers", param="instance_id"
        )

    def set_role(self, node: NodeHandle, role: Role | Literal["auto"]) -> None:
        """Have an elastic node prefer a role from the next request on, or leave that to proxies.
        Raises InvalidRequestError for another node, or a role that makes no sense."""
        _check_role(role, (*_ROLES, "auto"))
        if node.role != role and not node.elastic:
            known = "is not known yet" if node.info is None else "runs without --elastic auto"
            raise InvalidRequestError(
                f"the role of {node.url} stays {node.role}: the node {known}", param="role"
            )
        if role == "auto":
            logger.info("proxies move the role of %s node %s by request", node.role, node.url)
            node.free_role()
        else:
            logger.info("%s node %s is a %s node by request", node.role, node.url, role)
            node.fix_role(role)
        if node.roles is not None:
            self._tell_order(node)

    def _tell_order(self, node: NodeHandle) -> None:
        """Tell an elastic node the last order of an administrator."""
        role = node.role if node.role_is_fixed else None
        node.order_role(self._sockets.instance_id, role, fixed=True)

    def _order(self, node: NodeHandle, role: Role) -> None:
        """Move the role of an elastic node whose lease this proxy has."""
        node.order_role(self._sockets.instance_id, role, fixed=False)

    def drain(self, node: NodeHandle) -> None:
        """Send it nothing new and forget it when it has finished what it has."""
        node.draining = True
        self.release(node)

    def release(self, node: NodeHandle) -> None:
        """Forget a draining node once it is idle."""
        if node.draining and not node.active and node in self._watchers:
            self.nodes.remove(node)
            self._watchers.pop(node).cancel()
            self._wake.pop(node)
            if node.channel is not None:
                node.channel.close()
            if node.alive:
                self._heartbeats.remove(node.instance_id)
            node.alive = node.leaving = False
            for other in self.nodes:
                other.partner_lost(node)
            self._on_change()

    async def post(self, node: NodeHandle, path: str) -> str | None:
        """POST to the administration of a node that proved itself; what went wrong, or None."""
        if not node.alive:
            return node.problem
        try:
            await self._http.post(node.url, path, node.instance_id)
        except NodeHttpError as error:
            return str(error)
        return None

    async def _watch(self, node: NodeHandle) -> None:
        wake = self._wake[node]
        while node in self._watchers:
            try:
                await self._poll(node)
            except Exception:  # whatever a node answers, the others need watching on
                logger.exception("polling %s failed", node.url)
            wake.clear()
            await asyncio.sleep(MIN_POLL_PAUSE)
            try:
                await asyncio.wait_for(wake.wait(), POLL_INTERVAL)
            except TimeoutError:
                continue

    async def _poll(self, node: NodeHandle) -> None:
        try:
            info = await self._http.server_info(node.url)
        except NotListeningError as error:
            silence = time.monotonic() - node.last_heard
            if node.alive and (not node.connected or silence > SILENCE_SECONDS):
                self._lose(node, _GONE, died=True)
            elif not node.alive:
                node.problem = f"cannot connect: {error}"
            return
        except NodeHttpError as error:
            if not node.alive:
                node.problem = f"/server_info: {error}"
            return
        if info.role != node.added_as and not info.elastic:
            node.problem = f"was added as {node.added_as} but is a {info.role} node"
            return
        if info.instance_id != node.instance_id or node.channel is None:
            await self._meet(node, info)
        else:
            node.claimed = info
            if node.alive:
                node.info = info

    def _duplicate_of(self, node: NodeHandle, info: ServerInfo) -> NodeHandle | None:
        """Another node that proved to be this instance, or to have this message port."""
        for other in self.nodes:
            if other is not node and other.alive and other.claimed is not None:
                same_port = other.claimed.endpoints.zmq == info.endpoints.zmq
                if same_port or other.instance_id == info.instance_id:
                    return other
        return None

    def _make_way(self, node: NodeHandle, info: ServerInfo) -> bool:
        """Close channels to a message port that another node is about to open: the two would
        take each other's place there. Each has the port for a while, in which it may prove itself
        and keep it. False if another one's while is not over."""
        for other in self.nodes:
            if other is node or other.channel is None or other.claimed is None:
                continue
            if other.claimed.endpoints.zmq == info.endpoints.zmq:
                if time.monotonic() - other.last_heard < TURN_SECONDS:
                    node.problem = f"{other.url} has the same message port"
                    return False
                other.channel.close()
                other.channel, other.problem = None, f"{node.url} has the same message port"
        return True

    async def _meet(self, node: NodeHandle, info: ServerInfo) -> None:
        """A new instance answers at the URL, so what went to the old one is lost; or one that was
        lost is there again."""
        if node.channel is not None:
            reason = f"it was restarted (now instance {info.instance_id})"
            self._lose(node, reason, died=True)
            if node not in self._watchers:
                return  # it was draining, and the last that it had is lost
        other = self._duplicate_of(node, info)
        if other is not None:
            node.claimed = None
            node.problem = f"is instance {info.instance_id}, which is in use as {other.url}"
            return
        if not self._make_way(node, info):
            return
        node.meets(info)
        try:
            node.channel = self._sockets.open(
                info.endpoints.zmq,
                info.instance_id,
                lambda message: self._receive(node, message),
                self._on_taken,
                lambda: self._lose(node, "messages from it were lost"),
                lambda: self._disconnected(node),
            )
        except zmq.ZMQError as error:
            node.problem = f"cannot connect to {info.endpoints.zmq}: {error}"
            return
        node.last_heard = time.monotonic()
        node.problem = NO_HEARTBEAT_YET
        logger.info("%s node %s at %s", info.role, info.instance_id, node.url)
        # Nothing can be sent before the connection stands, and nothing else says when it does.
        for _ in range(CONNECT_TRIES):
            if node.beat(self._sockets.instance_id):
                return
            await asyncio.sleep(CONNECT_TRY_SECONDS)

    def _disconnected(self, node: NodeHandle) -> None:
        """The connection to a node has ended: see at once whether that was its process."""
        if node.alive and not node.beat(self._sockets.instance_id):
            self._wake[node].set()

    def _receive(self, node: NodeHandle, message: AnyMessage) -> None:
        if message.sender != node.instance_id:
            # Another process answers at this endpoint; /server_info will say which.
            self._wake[node].set()
            return
        if isinstance(message, PrefixEvents):
            node.take_prefixes(message)
            return
        if not isinstance(message, NodeHeartbeat):
            node.last_heard = time.monotonic()
            self._on_message(node, message)
            return
        if not node.alive and node.claimed is not None:
            other = self._duplicate_of(node, node.claimed)
            if other is not None:
                reason = f"instance {node.instance_id} is in use as {other.url}"
                self._lose(node, reason)
                node.problem = reason
                return
        if node.losses is not None and message.losses > node.losses:
            self._lose(
                node, "it gave up its requests: messages were lost, or the proxy stood still"
            )
            return
        if not node.alive and node.claimed is not None:
            self._heartbeats.add(node.instance_id, node.claimed.endpoints.zmq)
        before = node.ready
        node.heard(message)
        if node.lacks_order:
            self._tell_order(node)
        self._on_heartbeat(node)
        if node.ready != before:
            self._on_change()

    async def _beat(self) -> None:
        due = time.monotonic()
        while True:
            self._loop_watch.turned()
            late = time.monotonic() - due
            run_delays = {w.instance_id: w.run_delay for w in self.nodes if w.alive}
            wants_leases = self._roles is not None and self._lease.wanted()
            for node in list(self.nodes):
                node.wants_lease = wants_leases
                try:
                    self._look_after(node, late, run_delays)
                except Exception:  # a fault with one node must not end the others' heartbeats
                    logger.exception("looking after %s failed", node.url)
            # NOTE: after this process stood still, heartbeats first say which proxy has the leases.
            if self._roles is not None and late <= HEARTBEAT_INTERVAL:
                try:
                    self._roles.look(time.monotonic())
                except Exception:  # nor must one with roles
                    logger.exception("looking at roles failed")
            due = time.monotonic() + HEARTBEAT_INTERVAL
            await asyncio.sleep(HEARTBEAT_INTERVAL)

    def _look_after(self, node: NodeHandle, late: float, run_delays: dict[str, float]) -> None:
        """Send a node a heartbeat, and see whether it answers those before.

        Args:
            late: seconds by which this process is late with it.
            run_delays: of all nodes, by instance id.
        """
        # NOTE: this process heard no node while it stood still, so nodes are not blamed.
        if late > HEARTBEAT_INTERVAL:
            node.last_heard += late
        before = node.ready
        node.beat(self._sockets.instance_id, run_delays, self._meetings(node))
        if node.ready != before:
            self._on_change()
        silence = time.monotonic() - node.last_heard
        if node.alive and silence > LEASE_SECONDS:
            self._lose(node, f"no heartbeat for {silence:.1f} s", died=True)
        elif node.alive and (not node.connected or silence > SILENCE_SECONDS):
            self._wake[node].set()
        elif node.problem == NO_HEARTBEAT_YET and silence > LEASE_SECONDS:
            node.problem = DEAF
            logger.warning("%s %s", node.url, DEAF)

    def _meetings(self, node: NodeHandle) -> dict[str, str]:
        """Nodes whose KV this one may receive, by instance id and registry."""
        own = node.info
        if not node.receives or own is None:
            return {}
        # No more of many nodes are compared than are met.
        found = (
            (other.instance_id, other.info.endpoints.bootstrap)
            for other in self.nodes
            if other is not node and other.ready and other.info is not None
            if other.sends
            if other.info.endpoints.bootstrap and other.info.difference(own) is None
        )
        return dict(itertools.islice(found, MAX_MEETINGS))

    async def wait_linked(self) -> None:
        """Return when the decode nodes have made their links to the prefill nodes that are there,
        so that no request pays for one."""
        while True:
            unlinked = [
                node
                for node in self.nodes
                if node.ready
                and node.linked is not None
                and not self._meetings(node).keys() <= set(node.linked)
            ]
            if not unlinked:
                return
            for node in unlinked:
                node.beat(self._sockets.instance_id, meet=self._meetings(node))
            await asyncio.sleep(LINK_POLL_SECONDS)

    def _lose(self, node: NodeHandle, reason: str, *, died: bool = False) -> None:
        """Give up what depends on a node and meet it anew if it answers: by a new channel, which
        tells it to forget what came by the old one.

        Args:
            died: its process seems to have ended or to hang, and it was not asked to.
        """
        died = died and not node.leaving
        if node.channel is not None:
            node.channel.close()
            node.channel, node.losses = None, None
            self._wake[node].set()
        if not node.alive and not node.active:
            return
        logger.warning("lost %s node %s at %s: %s", node.role, node.instance_id, node.url, reason)
        if node.alive:
            self._heartbeats.remove(node.instance_id)
        node.lost(reason)
        for other in self.nodes:
            other.partner_lost(node)
        self._on_lost(node, reason, died)
        self._on_change()
