"""All nodes: polls them, exchanges heartbeats, and notices when they die or return."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import zmq

from pd.core.addresses import check_node_url
from pd.core.brief import short_repr
from pd.core.errors import InvalidRequestError, NotFoundError
from pd.core.messages import (
    HEARTBEAT_INTERVAL,
    LEASE_SECONDS,
    MAX_MEETINGS,
    AnyMessage,
    NodeHeartbeat,
    PrefixEvents,
)
from pd.core.release import describe_mismatch
from pd.proxy.nodes.events import (
    HeartbeatReceived,
    MessageReceived,
    MessagesRead,
    NodeLost,
    NodesChanged,
)
from pd.proxy.nodes.heartbeats import HeartbeatThread, LoopWatch
from pd.proxy.nodes.node_handle import NO_HEARTBEAT_YET, NodeHandle, ServerInfo
from pd.proxy.nodes.node_http import (
    NodeHttp,
    NodeHttpError,
    NotListeningError,
    OtherReleaseError,
)
from pd.proxy.nodes.node_refresh import NodeRefresh
from pd.proxy.nodes.role_lease import DecisionLease
from pd.proxy.nodes.roles import RoleBalancer
from pd.util.descriptors import file_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Literal

    from pd.core.node_info import Role
    from pd.proxy.nodes.channel import Sockets
    from pd.proxy.nodes.events import NodeEvent
    from pd.proxy.nodes.node_http import NodeAccess

logger = logging.getLogger(__name__)

POLL_INTERVAL = 1.0
# How long an unproven node keeps others from the message port it names.
TURN_SECONDS = 2.5
# A node costs a poll and four heartbeats a second, and three sockets.
MAX_WORKERS = 256
# A refused connection proves a death only together with silence or refused messages, because the
# HTTP side of a node may restart.
SILENCE_SECONDS = 1.0
CONNECT_TRIES = 50
CONNECT_TRY_SECONDS = 0.01
LINK_POLL_SECONDS = 0.05
MIN_POLL_PAUSE = 0.05

_GONE = "its port refuses connections and its heartbeats stopped"
DEAF = (
    "answers HTTP but not messages: give proxy and node the same --cluster-key-file, and let the "
    "proxy reach the message port (endpoints.zmq of its /server_info)"
)

_ROLES = ("prefill", "decode", "unified")
_READ = MessagesRead()


def _check_role(role: str, allowed: Sequence[str] = _ROLES) -> None:
    if role not in allowed:
        raise InvalidRequestError(
            f"role must be one of {', '.join(allowed)}, not {role!r}", param="role"
        )


class NodePool:
    """Polls ``/server_info``, exchanges heartbeats and holds leases.

    The listener of :meth:`start` gets the events of all nodes, see :mod:`pd.proxy.nodes.events`.

    Args:
        itl: seconds between tokens we ask nodes to keep; 0 leaves it to them.
        elastic: move the roles of elastic nodes to where the demand is.
        most_nodes: number of nodes for which the process has descriptors.
        access: asks nodes for their descriptions; by default over HTTP.
    """

    def __init__(
        self,
        sockets: Sockets,
        *,
        cluster_key: bytes | None = None,
        itl: float = 0.0,
        elastic: bool = False,
        most_nodes: int = MAX_WORKERS,
        access: NodeAccess | None = None,
    ) -> None:
        self.nodes: list[NodeHandle] = []
        self._most_nodes = most_nodes
        self._sockets = sockets
        self._itl = itl
        self._lease = DecisionLease(sockets.instance_id, self.nodes)
        self._roles: RoleBalancer | None = None
        if elastic:
            self._roles = RoleBalancer(self.nodes, self._lease, self._order_role)
        self._emit: Callable[[NodeEvent], None]
        self._http: NodeAccess = NodeHttp(cluster_key) if access is None else access
        self.node_refresh = NodeRefresh(self.nodes, sockets.instance_id, self._poll_node)
        self._watchers: dict[NodeHandle, asyncio.Task[None]] = {}
        self._wake_events: dict[NodeHandle, asyncio.Event] = {}
        self._pulse: asyncio.Task[None] | None = None
        self._loop_watch = LoopWatch()
        self._heartbeats = HeartbeatThread(sockets, self._loop_watch)

    def start(self, listener: Callable[[NodeEvent], None]) -> None:
        """Start to exchange heartbeats. ``listener`` gets all events, on the event loop."""
        self._emit = listener
        self._heartbeats.start()
        self._pulse = asyncio.create_task(self._send_heartbeats())

    async def close(self) -> None:
        tasks = [*self._watchers.values(), *([self._pulse] if self._pulse else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.node_refresh.close()
        for node in self.nodes:
            if node.channel is not None:
                node.channel.close()
        self._heartbeats.close()
        await self._http.close()

    def add_node(self, role: Role, url: str) -> NodeHandle:
        """Start to use a node. Adding a known or draining node uses it again.

        Raises InvalidRequestError for an invalid role or URL, and for too many nodes.
        """
        _check_role(role)
        url = check_node_url(url)
        for node in self.nodes:
            if node.url == url:
                if role not in (node.role, node.added_as):
                    raise InvalidRequestError(
                        f"{url} is in use as {node.role} already; remove it first", param="role"
                    )
                node.added_as, node.is_draining = role, False
                return node
        if len(self.nodes) >= MAX_WORKERS:
            raise InvalidRequestError(
                f"too many workers: {len(self.nodes)} (at most {MAX_WORKERS}); remove one first"
            )
        if len(self.nodes) >= self._most_nodes:
            raise InvalidRequestError(
                f"there are {len(self.nodes)} workers, and the proxy may not open enough files for "
                f"another (limit of 'ulimit -n': {file_limit()}); start it with a higher limit"
            )
        node = NodeHandle(role, url, self._itl)
        self.nodes.append(node)
        self._wake_events[node] = asyncio.Event()
        self._watchers[node] = asyncio.create_task(self._watch_node(node))
        return node

    def find_node(self, name: str) -> NodeHandle:
        """Find the node with this URL, ``host:port`` or instance id. Raises NotFoundError."""
        wanted = name.rstrip("/")
        # Proven instances come before claimed ones.
        for node in sorted(self.nodes, key=lambda node: not node.is_alive):
            known = (node.url, urlsplit(node.url).netloc, node.instance_id)
            if wanted and wanted in known:
                return node
        raise NotFoundError(
            f"there is no worker {short_repr(name)}; see GET /workers", param="instance_id"
        )

    def set_role(self, node: NodeHandle, role: Role | Literal["auto"]) -> None:
        """Make an elastic node prefer a role from the next request on, or leave that to proxies.

        Raises InvalidRequestError for other nodes and for invalid roles.
        """
        _check_role(role, (*_ROLES, "auto"))
        if node.role != role and not node.is_elastic:
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
        """Send an elastic node the administrator's last order."""
        role = node.role if node.role_is_fixed else None
        node.order_role(self._sockets.instance_id, role, fixed=True)

    def _order_role(self, node: NodeHandle, role: Role) -> None:
        """Move the role of an elastic node leased by this proxy."""
        node.order_role(self._sockets.instance_id, role, fixed=False)

    def drain_node(self, node: NodeHandle) -> None:
        """Send a node nothing new, and forget it after its last request."""
        node.is_draining = True
        self.release_node(node)

    def release_node(self, node: NodeHandle) -> None:
        """Forget a draining node if it is idle."""
        if node.is_draining and not node.active and node in self._watchers:
            self.nodes.remove(node)
            self._watchers.pop(node).cancel()
            self._wake_events.pop(node)
            if node.channel is not None:
                node.channel.close()
            if node.is_alive:
                self._heartbeats.drop_lease(node.instance_id)
            node.is_alive = node.is_leaving = False
            for other in self.nodes:
                other.forget_partner(node)
            self._emit(NodesChanged())

    async def post_to_node(self, node: NodeHandle, path: str) -> str | None:
        """POST to the administration of a proven node. Return an error message or None."""
        if not node.is_alive:
            return node.problem
        try:
            await self._http.post_admin(node.url, path, node.instance_id)
        except NodeHttpError as error:
            return str(error)
        return None

    async def fetch_server_info(self, url: str) -> ServerInfo:
        """Fetch the description of a node at any address. Raises NodeHttpError, also without proof
        of the cluster key."""
        return await self._http.fetch_server_info(url)

    async def _watch_node(self, node: NodeHandle) -> None:
        wake = self._wake_events[node]
        while node in self._watchers:
            try:
                await self._poll_node(node)
            except Exception:  # whatever a node answers, we must keep watching it
                logger.exception("cannot poll %s", node.url)
            wake.clear()
            await asyncio.sleep(MIN_POLL_PAUSE)
            try:
                await asyncio.wait_for(wake.wait(), POLL_INTERVAL)
            except TimeoutError:
                continue

    async def _poll_node(self, node: NodeHandle) -> None:
        try:
            info = await self._http.fetch_server_info(node.url)
        except NotListeningError as error:
            silence = time.monotonic() - node.last_heard
            if node.is_alive and (not node.is_connected or silence > SILENCE_SECONDS):
                self._lose_node(node, _GONE, died=True)
            elif not node.is_alive:
                node.problem = f"cannot connect: {error}"
            return
        except OtherReleaseError as error:
            problem = str(error)
            if node.is_alive or node.channel is not None:
                # It ran our release before.
                self._lose_node(node, problem, died=True)
            if node.problem != problem:
                logger.warning("%s is not used: %s", node.url, problem)
            node.problem = problem
            return
        except NodeHttpError as error:
            if not node.is_alive:
                node.problem = f"/server_info: {error}"
            return
        node.proved_role = None
        if info.role != node.added_as and not info.elastic:
            node.proved_role = info.role
            node.problem = f"was added as {node.added_as} but is a {info.role} node"
            return
        if info.instance_id != node.instance_id or node.channel is None:
            await self._meet_instance(node, info)
        else:
            node.update_info(info)

    def _duplicate_of(self, node: NodeHandle, info: ServerInfo) -> NodeHandle | None:
        """Find another proven node with this instance id or message port."""
        for other in self.nodes:
            if other is not node and other.is_alive and other.claimed is not None:
                same_port = other.claimed.endpoints.zmq == info.endpoints.zmq
                if same_port or other.instance_id == info.instance_id:
                    return other
        return None

    def _make_way(self, node: NodeHandle, info: ServerInfo) -> bool:
        """Close other channels to a message port before we open one, because the two would replace
        each other.

        Each node keeps the port for a while to prove itself. Return False during the turn of
        another node.
        """
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

    async def _meet_instance(self, node: NodeHandle, info: ServerInfo) -> None:
        """Open a channel to an instance that is new at the URL, or was lost. Requests of the old
        instance are lost."""
        if node.channel is not None:
            reason = f"it was restarted (now instance {info.instance_id})"
            self._lose_node(node, reason, died=True)
            if node not in self._watchers:
                return  # it was draining, and its last request is lost
        other = self._duplicate_of(node, info)
        if other is not None:
            node.claimed = None
            node.problem = f"is instance {info.instance_id}, which is in use as {other.url}"
            return
        if not self._make_way(node, info):
            return
        node.meet_instance(info)
        try:
            node.channel = self._sockets.open_channel(
                info.endpoints.zmq,
                info.instance_id,
                lambda message: self._receive_message(node, message),
                lambda: self._emit(_READ),
                lambda: self._lose_node(node, "messages from it were lost"),
                lambda: self._check_disconnected(node),
            )
        except zmq.ZMQError as error:
            node.problem = f"cannot connect to {info.endpoints.zmq}: {error}"
            return
        node.last_heard = time.monotonic()
        node.problem = NO_HEARTBEAT_YET
        logger.info("%s node %s at %s", info.role, info.instance_id, node.url)
        # We cannot send before we are connected, and no event tells us when we are.
        for _ in range(CONNECT_TRIES):
            if node.send_heartbeat(self._sockets.instance_id):
                return
            await asyncio.sleep(CONNECT_TRY_SECONDS)

    def _check_disconnected(self, node: NodeHandle) -> None:
        """Check at once whether the process of a node ended, because its connection did."""
        if node.is_alive and not node.send_heartbeat(self._sockets.instance_id):
            self._wake_events[node].set()

    def _receive_message(self, node: NodeHandle, message: AnyMessage) -> None:
        if message.sender != node.instance_id:
            # Another process answers at this endpoint. /server_info will tell us which.
            self._wake_events[node].set()
            return
        if isinstance(message, PrefixEvents):
            node.take_prefixes(message)
            return
        if isinstance(message, NodeHeartbeat) and isinstance(message.release, str):
            problem = describe_mismatch(message.release)
            if problem:
                node.problem = problem
                return
        if not isinstance(message, NodeHeartbeat):
            node.last_heard = time.monotonic()
            self._emit(MessageReceived(node, message))
            return
        if not node.is_alive and node.claimed is not None:
            other = self._duplicate_of(node, node.claimed)
            if other is not None:
                reason = f"instance {node.instance_id} is in use as {other.url}"
                self._lose_node(node, reason)
                node.problem = reason
                return
        if node.losses is not None and message.losses > node.losses:
            self._lose_node(
                node, "it gave up its requests: messages were lost, or the proxy stalled"
            )
            return
        if not node.is_alive and node.claimed is not None:
            self._heartbeats.keep_lease(node.instance_id, node.claimed.endpoints.zmq)
        before = node.is_ready
        node.take_heartbeat(message)
        if node.lacks_order:
            self._tell_order(node)
        self._emit(HeartbeatReceived(node))
        if node.is_ready != before:
            self._emit(NodesChanged())

    async def _send_heartbeats(self) -> None:
        due = time.monotonic()
        while True:
            self._loop_watch.note_turn()
            late = time.monotonic() - due
            run_delays = {w.instance_id: w.run_delay for w in self.nodes if w.is_alive}
            wants_leases = self._roles is not None and self._lease.is_wanted()
            for node in list(self.nodes):
                node.wants_lease = wants_leases
                try:
                    self._check_node(node, late, run_delays)
                except Exception:  # a fault with one node must not end the others' heartbeats
                    logger.exception("cannot check %s", node.url)
            # NOTE: after a stall of this process, we first need heartbeats to learn which proxy has
            # the leases.
            if self._roles is not None and late <= HEARTBEAT_INTERVAL:
                try:
                    self._roles.rebalance_roles(time.monotonic())
                except Exception:  # a fault with roles must not end heartbeats
                    logger.exception("cannot balance roles")
            due = time.monotonic() + HEARTBEAT_INTERVAL
            await asyncio.sleep(HEARTBEAT_INTERVAL)

    def _check_node(self, node: NodeHandle, late: float, run_delays: dict[str, float]) -> None:
        """Send a node a heartbeat, and check whether it answered earlier ones.

        Args:
            late: delay of this process in seconds.
            run_delays: run delays of all nodes, by instance id.
        """
        # NOTE: a stalled process receives no heartbeats, so we do not blame the nodes.
        if late > HEARTBEAT_INTERVAL:
            node.last_heard += late
        before = node.is_ready
        node.send_heartbeat(self._sockets.instance_id, run_delays, self._list_meetings(node))
        if node.is_ready != before:
            self._emit(NodesChanged())
        silence = time.monotonic() - node.last_heard
        if node.is_alive and silence > LEASE_SECONDS:
            self._lose_node(node, f"no heartbeat for {silence:.1f} s", died=True)
        elif node.is_alive and (not node.is_connected or silence > SILENCE_SECONDS):
            self._wake_events[node].set()
        elif node.problem == NO_HEARTBEAT_YET and silence > LEASE_SECONDS:
            node.problem = DEAF
            logger.warning("%s %s", node.url, DEAF)

    def _list_meetings(self, node: NodeHandle) -> dict[str, str]:
        """List nodes that may send KV to this one: instance id and registry."""
        own = node.info
        if not node.can_receive or own is None:
            return {}
        # The generator stops comparing at the limit.
        registries = (
            (other.instance_id, other.info.endpoints.bootstrap)
            for other in self.nodes
            if other is not node and other.is_ready and other.info is not None
            if other.can_send
            if other.info.endpoints.bootstrap and other.fits_with(node)
        )
        return dict(itertools.islice(registries, MAX_MEETINGS))

    async def wait_linked(self) -> None:
        """Wait until the decode nodes have links to all prefill nodes, so that no request pays for
        one."""
        while True:
            unlinked = [
                node
                for node in self.nodes
                if node.is_ready
                and node.linked_nodes is not None
                and not self._list_meetings(node).keys() <= set(node.linked_nodes)
            ]
            if not unlinked:
                return
            for node in unlinked:
                node.send_heartbeat(self._sockets.instance_id, meet=self._list_meetings(node))
            await asyncio.sleep(LINK_POLL_SECONDS)

    def _lose_node(self, node: NodeHandle, reason: str, *, died: bool = False) -> None:
        """Give up everything that depends on a node.

        If it answers, we meet it again over a new channel. The channel tells it to forget the
        requests of the old one.

        Args:
            died: the process seems to have ended or to hang, and nobody asked it to end.
        """
        died = died and not node.is_leaving
        if node.channel is not None:
            node.channel.close()
            node.channel, node.losses = None, None
            self._wake_events[node].set()
        if not node.is_alive and not node.active:
            return
        logger.warning("lost %s node %s at %s: %s", node.role, node.instance_id, node.url, reason)
        if node.is_alive:
            self._heartbeats.drop_lease(node.instance_id)
        node.mark_lost(reason)
        for other in self.nodes:
            other.forget_partner(node)
        self._emit(NodeLost(node, reason, died))
        self._emit(NodesChanged())
