"""All workers: which are there, which died, and which came back."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import zmq

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
from pd.core.node_url import check_node_url
from pd.proxy.heartbeats import HeartbeatThread, LoopWatch
from pd.proxy.node_http import NodeHttp, NodeHttpError, NotListeningError
from pd.proxy.role_lease import DecisionLease
from pd.proxy.roles import RoleBalancer
from pd.proxy.worker import ServerInfo, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Literal

    from pd.core.node_info import Role
    from pd.proxy.channel import Sockets

logger = logging.getLogger(__name__)

POLL_INTERVAL = 1.0
# How long a node that has not proved itself keeps others from the message port that it names.
TURN_SECONDS = 2.5
# A worker costs a poll a second, four heartbeats a second and three sockets.
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


class WorkerPool:
    """Polls ``/server_info``, exchanges heartbeats and holds leases.

    Args:
        itl: seconds between tokens that nodes are asked to keep; 0 leaves it to them.
        elastic: roles of elastic nodes move to where the demand is.

    Callbacks: ``on_message(worker, message)`` for everything but heartbeats, and ``on_taken()``
    after those that were there; ``on_lost(worker, reason, died)`` when what was sent to an instance
    is lost, and whether it seems to have died; ``on_heartbeat(worker)`` when a worker has told its
    state; ``on_change()`` when a worker became ready or not.
    """

    def __init__(
        self,
        sockets: Sockets,
        *,
        cluster_key: bytes | None = None,
        itl: float = 0.0,
        elastic: bool = False,
        on_message: Callable[[Worker, AnyMessage], None],
        on_taken: Callable[[], None],
        on_lost: Callable[[Worker, str, bool], None],
        on_heartbeat: Callable[[Worker], None],
        on_change: Callable[[], None],
    ) -> None:
        self.workers: list[Worker] = []
        self._sockets = sockets
        self._itl = itl
        self._lease = DecisionLease(sockets.instance_id, self.workers)
        self._roles: RoleBalancer | None = None
        if elastic:
            self._roles = RoleBalancer(self.workers, self._lease, self._order)
        self._on_message = on_message
        self._on_taken = on_taken
        self._on_lost = on_lost
        self._on_heartbeat = on_heartbeat
        self._on_change = on_change
        self._http = NodeHttp(cluster_key)
        self._watchers: dict[Worker, asyncio.Task[None]] = {}
        self._wake: dict[Worker, asyncio.Event] = {}
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
        for worker in self.workers:
            if worker.channel is not None:
                worker.channel.close()
        self._heartbeats.close()
        await self._http.close()

    def add(self, role: Role, url: str) -> Worker:
        """Begin to use a node; adding one that is there or drains takes it (back) into use.

        Raises InvalidRequestError for a role or URL that makes no sense, and for one too many.
        """
        _check_role(role)
        url = check_node_url(url)
        for worker in self.workers:
            if worker.url == url:
                if role not in (worker.role, worker.added_as):
                    raise InvalidRequestError(
                        f"{url} is in use as {worker.role} already; remove it first", param="role"
                    )
                worker.added_as, worker.draining = role, False
                return worker
        if len(self.workers) >= MAX_WORKERS:
            raise InvalidRequestError(
                f"there are {len(self.workers)} workers, at most {MAX_WORKERS} may be; "
                "remove one first"
            )
        worker = Worker(role, url, self._itl)
        self.workers.append(worker)
        self._wake[worker] = asyncio.Event()
        self._watchers[worker] = asyncio.create_task(self._watch(worker))
        return worker

    def find(self, name: str) -> Worker:
        """The worker with this URL, ``host:port`` or instance id. Raises NotFoundError."""
        wanted = name.rstrip("/")
        # A worker that proved to be an instance goes before one that only says so.
        for worker in sorted(self.workers, key=lambda worker: not worker.alive):
            known = (worker.url, urlsplit(worker.url).netloc, worker.instance_id)
            if wanted and wanted in known:
                return worker
        raise NotFoundError(
            f"there is no worker {brief(name)}; see GET /workers", param="instance_id"
        )

    def set_role(self, worker: Worker, role: Role | Literal["auto"]) -> None:
        """Have an elastic node prefer a role from the next request on, or leave that to proxies.
        Raises InvalidRequestError for another node, or a role that makes no sense."""
        _check_role(role, (*_ROLES, "auto"))
        if worker.role != role and not worker.elastic:
            known = "is not known yet" if worker.info is None else "runs without --elastic auto"
            raise InvalidRequestError(
                f"the role of {worker.url} stays {worker.role}: the node {known}", param="role"
            )
        if role == "auto":
            logger.info("proxies move the role of %s node %s by request", worker.role, worker.url)
            worker.free_role()
        else:
            logger.info("%s node %s is a %s node by request", worker.role, worker.url, role)
            worker.fix_role(role)
        if worker.roles is not None:
            self._tell_order(worker)

    def _tell_order(self, worker: Worker) -> None:
        """Tell an elastic node the last order of an administrator."""
        role = worker.role if worker.role_is_fixed else None
        worker.order_role(self._sockets.instance_id, role, fixed=True)

    def _order(self, worker: Worker, role: Role) -> None:
        """Move the role of an elastic node whose lease this proxy has."""
        worker.order_role(self._sockets.instance_id, role, fixed=False)

    def drain(self, worker: Worker) -> None:
        """Send it nothing new and forget it when it has finished what it has."""
        worker.draining = True
        self.release(worker)

    def release(self, worker: Worker) -> None:
        """Forget a draining worker once it is idle."""
        if worker.draining and not worker.active and worker in self._watchers:
            self.workers.remove(worker)
            self._watchers.pop(worker).cancel()
            self._wake.pop(worker)
            if worker.channel is not None:
                worker.channel.close()
            if worker.alive:
                self._heartbeats.remove(worker.instance_id)
            worker.alive = worker.leaving = False
            for other in self.workers:
                other.partner_lost(worker)
            self._on_change()

    async def post(self, worker: Worker, path: str) -> str | None:
        """POST to the administration of a node that proved itself; what went wrong, or None."""
        if not worker.alive:
            return worker.problem
        try:
            await self._http.post(worker.url, path, worker.instance_id)
        except NodeHttpError as error:
            return str(error)
        return None

    async def _watch(self, worker: Worker) -> None:
        while True:
            try:
                await self._poll(worker)
            except Exception:  # whatever a node answers, the others need watching on
                logger.exception("polling %s failed", worker.url)
            wake = self._wake[worker]
            wake.clear()
            await asyncio.sleep(MIN_POLL_PAUSE)
            try:
                await asyncio.wait_for(wake.wait(), POLL_INTERVAL)
            except TimeoutError:
                continue

    async def _poll(self, worker: Worker) -> None:
        try:
            info = await self._http.server_info(worker.url)
        except NotListeningError as error:
            silence = time.monotonic() - worker.last_heard
            if worker.alive and (not worker.connected or silence > SILENCE_SECONDS):
                self._lose(worker, _GONE, died=True)
            elif not worker.alive:
                worker.problem = f"cannot connect: {error}"
            return
        except NodeHttpError as error:
            if not worker.alive:
                worker.problem = f"/server_info: {error}"
            return
        if info.role != worker.added_as and not info.elastic:
            worker.problem = f"was added as {worker.added_as} but is a {info.role} node"
            return
        if info.instance_id != worker.instance_id or worker.channel is None:
            await self._meet(worker, info)
        else:
            worker.claimed = info
            if worker.alive:
                worker.info = info

    def _duplicate_of(self, worker: Worker, info: ServerInfo) -> Worker | None:
        """Another worker that proved to be this instance, or to have this message port."""
        for other in self.workers:
            if other is not worker and other.alive and other.claimed is not None:
                same_port = other.claimed.endpoints.zmq == info.endpoints.zmq
                if same_port or other.instance_id == info.instance_id:
                    return other
        return None

    def _make_way(self, worker: Worker, info: ServerInfo) -> bool:
        """Close channels to a message port that another worker is about to open: the two would
        take each other's place there. Each has the port for a while, in which it may prove itself
        and keep it. False if another one's while is not over."""
        for other in self.workers:
            if other is worker or other.channel is None or other.claimed is None:
                continue
            if other.claimed.endpoints.zmq == info.endpoints.zmq:
                if time.monotonic() - other.last_heard < TURN_SECONDS:
                    worker.problem = f"{other.url} has the same message port"
                    return False
                other.channel.close()
                other.channel, other.problem = None, f"{worker.url} has the same message port"
        return True

    async def _meet(self, worker: Worker, info: ServerInfo) -> None:
        """A new instance answers at the URL, so what went to the old one is lost; or one that was
        lost is there again."""
        if worker.channel is not None:
            reason = f"it was restarted (now instance {info.instance_id})"
            self._lose(worker, reason, died=True)
        other = self._duplicate_of(worker, info)
        if other is not None:
            worker.claimed = None
            worker.problem = f"is instance {info.instance_id}, which is in use as {other.url}"
            return
        if not self._make_way(worker, info):
            return
        worker.meets(info)
        try:
            worker.channel = self._sockets.open(
                info.endpoints.zmq,
                info.instance_id,
                lambda message: self._receive(worker, message),
                self._on_taken,
                lambda: self._lose(worker, "messages from it were lost"),
                lambda: self._disconnected(worker),
            )
        except zmq.ZMQError as error:
            worker.problem = f"cannot connect to {info.endpoints.zmq}: {error}"
            return
        worker.last_heard = time.monotonic()
        worker.problem = NO_HEARTBEAT_YET
        logger.info("%s node %s at %s", info.role, info.instance_id, worker.url)
        # Nothing can be sent before the connection stands, and nothing else says when it does.
        for _ in range(CONNECT_TRIES):
            if worker.beat(self._sockets.instance_id):
                return
            await asyncio.sleep(CONNECT_TRY_SECONDS)

    def _disconnected(self, worker: Worker) -> None:
        """The connection to a node has ended: see at once whether that was its process."""
        if worker.alive and not worker.beat(self._sockets.instance_id):
            self._wake[worker].set()

    def _receive(self, worker: Worker, message: AnyMessage) -> None:
        if message.sender != worker.instance_id:
            # Another process answers at this endpoint; /server_info will say which.
            self._wake[worker].set()
            return
        if isinstance(message, PrefixEvents):
            worker.take_prefixes(message)
            return
        if not isinstance(message, NodeHeartbeat):
            worker.last_heard = time.monotonic()
            self._on_message(worker, message)
            return
        if not worker.alive and worker.claimed is not None:
            other = self._duplicate_of(worker, worker.claimed)
            if other is not None:
                reason = f"instance {worker.instance_id} is in use as {other.url}"
                self._lose(worker, reason)
                worker.problem = reason
                return
        if worker.losses is not None and message.losses > worker.losses:
            self._lose(
                worker, "it gave up its requests: messages were lost, or the proxy stood still"
            )
            return
        if not worker.alive and worker.claimed is not None:
            self._heartbeats.add(worker.instance_id, worker.claimed.endpoints.zmq)
        before = worker.ready
        worker.heard(message)
        if worker.lacks_order:
            self._tell_order(worker)
        self._on_heartbeat(worker)
        if worker.ready != before:
            self._on_change()

    async def _beat(self) -> None:
        due = time.monotonic()
        while True:
            self._loop_watch.turned()
            late = time.monotonic() - due
            run_delays = {w.instance_id: w.run_delay for w in self.workers if w.alive}
            wants_leases = self._roles is not None and self._lease.wanted()
            for worker in list(self.workers):
                worker.wants_lease = wants_leases
                try:
                    self._look_after(worker, late, run_delays)
                except Exception:  # a fault with one node must not end the others' heartbeats
                    logger.exception("looking after %s failed", worker.url)
            # NOTE: after this process stood still, heartbeats first say which proxy has the leases.
            if self._roles is not None and late <= HEARTBEAT_INTERVAL:
                try:
                    self._roles.look(time.monotonic())
                except Exception:  # nor must one with roles
                    logger.exception("looking at roles failed")
            due = time.monotonic() + HEARTBEAT_INTERVAL
            await asyncio.sleep(HEARTBEAT_INTERVAL)

    def _look_after(self, worker: Worker, late: float, run_delays: dict[str, float]) -> None:
        """Send a node a heartbeat, and see whether it answers those before.

        Args:
            late: seconds by which this process is late with it.
            run_delays: of all nodes, by instance id.
        """
        # NOTE: this process heard no node while it stood still, so nodes are not blamed.
        if late > HEARTBEAT_INTERVAL:
            worker.last_heard += late
        before = worker.ready
        worker.beat(self._sockets.instance_id, run_delays, self._meetings(worker))
        if worker.ready != before:
            self._on_change()
        silence = time.monotonic() - worker.last_heard
        if worker.alive and silence > LEASE_SECONDS:
            self._lose(worker, f"no heartbeat for {silence:.1f} s", died=True)
        elif worker.alive and (not worker.connected or silence > SILENCE_SECONDS):
            self._wake[worker].set()
        elif worker.problem == NO_HEARTBEAT_YET and silence > LEASE_SECONDS:
            worker.problem = DEAF
            logger.warning("%s %s", worker.url, DEAF)

    def _meetings(self, worker: Worker) -> dict[str, str]:
        """Nodes whose KV this one may receive, by instance id and registry."""
        own = worker.info
        if not worker.receives or own is None:
            return {}
        # No more of many nodes are compared than are met.
        found = (
            (other.instance_id, other.info.endpoints.bootstrap)
            for other in self.workers
            if other is not worker and other.ready and other.info is not None
            if other.sends
            if other.info.endpoints.bootstrap and other.info.difference(own) is None
        )
        return dict(itertools.islice(found, MAX_MEETINGS))

    async def wait_linked(self) -> None:
        """Return when the decode nodes have made their links to the prefill nodes that are there,
        so that no request pays for one."""
        while True:
            unlinked = [
                worker
                for worker in self.workers
                if worker.ready
                and worker.linked is not None
                and not self._meetings(worker).keys() <= set(worker.linked)
            ]
            if not unlinked:
                return
            for worker in unlinked:
                worker.beat(self._sockets.instance_id, meet=self._meetings(worker))
            await asyncio.sleep(LINK_POLL_SECONDS)

    def _lose(self, worker: Worker, reason: str, *, died: bool = False) -> None:
        """Give up what depends on a worker and meet it anew if it answers: by a new channel, which
        tells it to forget what came by the old one.

        Args:
            died: its process seems to have ended or to hang, and it was not asked to.
        """
        died = died and not worker.leaving
        if worker.channel is not None:
            worker.channel.close()
            worker.channel, worker.losses = None, None
            self._wake[worker].set()
        if not worker.alive and not worker.active:
            return
        logger.warning(
            "lost %s node %s at %s: %s", worker.role, worker.instance_id, worker.url, reason
        )
        if worker.alive:
            self._heartbeats.remove(worker.instance_id)
        worker.lost(reason)
        for other in self.workers:
            other.partner_lost(worker)
        self._on_lost(worker, reason, died)
        self._on_change()
