"""The control service of a deployment: an actor inside Ray that the operator talks to from outside.

``python -m pd.cluster.control DEPLOYMENT RUN ADDRESS PORT KEY_FILE``, a job on the head, starts it
there and prints its port. It serves only an operator who proves the key in that file (ZMQ CURVE),
and proves it, too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import ray
import zmq
import zmq.asyncio
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pd.cluster import orders
from pd.cluster.orders import NODE_ROLES, Process, ProcessState, Reply, Selector
from pd.cluster.supervisor import Supervisor
from pd.core.addresses import format_host
from pd.core.errors import UsageError
from pd.net.cluster_key import KeyPair, derive_control_keypairs, load_cluster_key
from pd.net.curve import admit_only

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

logger = logging.getLogger(__name__)
T = TypeVar("T")

_BEAT_SECONDS, _RETRY_SECONDS, _RESERVE_SECONDS, _UNASKED_SECONDS = 0.5, 2.0, 5.0, 120.0
# We replace a supervisor after so long without an answer. Its process serves meanwhile.
_ANSWER_SECONDS = 20.0
# Proxies stop sending to a node so long before it drains.
_PROXIES_NOTICE_SECONDS = 2.0
_NEVER = float("inf")
_REQUEST = msgspec.json.Decoder(orders.Request)
_STATE = msgspec.json.Decoder(ProcessState)


@dataclasses.dataclass
class Entry:
    """A process of the deployment.

    Attributes:
        host: address of the host on which it may run. We place it nowhere else before it has ended
            or the operator has declared that host lost.
        kill_after: seconds for draining, once the process is to be removed.
        actor: Ray's handle of its supervisor.
        group: Ray's handle of its reservation. It outlives a supervisor, because the process may
            still have the GPUs.
    """

    order: Process
    state: ProcessState
    host: str = ""
    kill_after: float | None = None
    actor: Any = None
    group: Any = None


class ControlService:
    """The actor. Its other actors end with it, but processes serve for the rest of their lease.

    It works on a thread with an event loop of its own. Calls to Ray's head go through
    :func:`call_head`, because they hang while the GCS is stopped, and beats have to go on.
    """

    def __init__(self, deployment: str, keys: KeyPair, operator: bytes, endpoint: str) -> None:
        self._deployment, self._cluster_key, self._is_asked = deployment, "", False
        self._entries: dict[str, Entry] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        context = zmq.Context()
        self._authenticator = admit_only(context, operator)
        socket = context.socket(zmq.ROUTER)
        socket.curve_server, socket.ipv6 = True, "[" in endpoint
        socket.curve_publickey, socket.curve_secretkey = keys
        socket.setsockopt(zmq.MAXMSGSIZE, orders.MAX_MESSAGE_BYTES)
        socket.bind(endpoint)
        self._port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        work = self._serve_requests(zmq.asyncio.Socket(socket))
        threading.Thread(target=asyncio.run, args=(work,), daemon=True).start()

    def get_port(self) -> int:
        """Return the port of the service."""
        return self._port

    async def _serve_requests(self, socket: Any) -> None:
        # The operator may have been interrupted before it learned of us.
        asyncio.get_running_loop().call_later(_UNASKED_SECONDS, self._end_process, True)
        while True:
            self._start_task(self._answer_request(socket, await socket.recv_multipart()))

    def _end_process(self, only_if_unasked: bool) -> None:
        if not (only_if_unasked and self._is_asked):
            # We do not ask Ray to end us, because its head may hang.
            os._exit(0)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- requests of the operator

    async def _answer_request(self, socket: Any, message: list[bytes]) -> None:
        *envelope, content = message
        self._is_asked = True
        try:
            reply = await self._carry_out(_REQUEST.decode(content))
        except Exception as error:  # noqa: BLE001 - the operator has to hear of it, whatever it is
            reply = Reply(error=f"{type(error).__name__}: {error}"[:1000])
        await socket.send_multipart([*envelope, msgspec.json.encode(reply)])

    async def _carry_out(self, request: orders.Request) -> Reply:
        match request:
            case orders.Apply(processes, cluster_key):
                self._add_processes(processes, cluster_key)
            case orders.Remove(names, kill_after):
                for entry in self._entries.values():
                    entry.kill_after = kill_after if entry.order.name in names else entry.kill_after
            case orders.DeclareLost(address):
                await self._declare_lost(address)
            case orders.Read(name, source, offset):
                reading = self._get_actor(name).read_source.remote(source, offset)
                data, is_over = await asyncio.wait_for(reading, _ANSWER_SECONDS)
                return Reply(data=data, is_over=is_over)
            case orders.Send(name, data):
                writing = self._get_actor(name).write_input.remote(data)
                await asyncio.wait_for(writing, _ANSWER_SECONDS)
            case orders.EndService():
                if self._entries:
                    raise ValueError(f"{', '.join(self._entries)} still runs")
                # After the reply has left.
                asyncio.get_running_loop().call_later(1.0, self._end_process, False)
        return Reply(processes=[entry.state for entry in self._entries.values()])

    def _get_actor(self, name: str) -> Any:
        entry = self._entries.get(name)
        if entry is None or entry.actor is None:
            raise ValueError(f"{name} does not run")
        return entry.actor

    def _add_processes(self, processes: list[Process], cluster_key: str) -> None:
        if len(self._entries) + len(processes) > orders.MAX_PROCESSES:
            raise ValueError(f"too many processes (at most {orders.MAX_PROCESSES})")
        taken = [order.name for order in processes if order.name in self._entries]
        if taken:
            raise ValueError(f"{', '.join(taken)} runs already")
        self._cluster_key = cluster_key or self._cluster_key
        for order in processes:
            entry = Entry(order, ProcessState(order.name, order.layout, order.role))
            self._entries[order.name] = entry
            self._start_task(self._keep_running(entry))

    async def _declare_lost(self, address: str) -> None:
        nodes = await call_head(_list_alive_nodes)
        if any(node["NodeManagerAddress"] == address for node in nodes):
            raise ValueError(f"host {address} is a live member of the Ray cluster")
        for entry in self._entries.values():
            if entry.host == address:
                self._discard_actor(entry)
                entry.host = ""

    # ---- keeping processes

    async def _keep_running(self, entry: Entry) -> None:
        """Place a supervisor and beat, until the process has been removed and has ended."""
        while entry.kill_after is None or entry.host:
            try:
                if await self._place_actor(entry):
                    await self._follow_actor(entry)
            except Exception as error:  # noqa: BLE001 - Ray raises many kinds; we try again
                logger.warning("%s: %s", entry.order.name, error)
                last_line = str(error).strip().rpartition("\n")[2]
                entry.state.detail = f"not supervised: {last_line[:200]}"
            if entry.host or entry.kill_after is None:
                await asyncio.sleep(_RETRY_SECONDS)
        self._discard_actor(entry)
        del self._entries[entry.order.name]

    async def _place_actor(self, entry: Entry) -> bool:
        """Make the supervisor's actor, or return False while no host can have it."""
        order, state = entry.order, entry.state
        state.state, state.url, state.uses = "placing", "", []
        selector = Selector(entry.host) if entry.host else order.host
        alive = await call_head(_list_alive_nodes)
        nodes = [node for node in alive if _is_selected(node, selector)]
        if not nodes:
            state.state = "lost" if entry.host else "placing"
            wanted = [selector.node, *map("=".join, selector.labels.items())]
            state.detail = f"no member of the Ray cluster is {' '.join(wanted).strip()}"
            return False
        if entry.group is None and not await self._reserve_host(entry, nodes):
            state.detail = f"waiting for {order.gpus:g} GPUs"
            return False
        actor_class = ray.remote(num_cpus=0, num_gpus=order.gpus, max_concurrency=8)(Supervisor)
        key = "" if order.role == "load" else self._cluster_key
        place = PlacementGroupSchedulingStrategy(entry.group)
        entry.actor = actor_class.options(scheduling_strategy=place).remote(
            self._deployment, msgspec.json.encode(order), key, entry.host
        )
        return True

    async def _reserve_host(self, entry: Entry, nodes: list[dict[str, Any]]) -> bool:
        """Reserve GPUs on one of these Ray nodes, the least used first; False if none has them."""
        hosts, gpus = [other.host for other in self._entries.values()], entry.order.gpus
        for node in sorted(nodes, key=lambda node: hosts.count(node["NodeManagerAddress"])):
            address = str(node["NodeManagerAddress"])
            bundle = {f"node:{address}": 0.001} | ({"GPU": gpus} if gpus else {})
            if node["Resources"].get("GPU", 0) < gpus:
                continue
            group, is_reserved = await call_head(ray.util.placement_group, [bundle]), False
            try:
                is_reserved = await call_head(group.wait, _RESERVE_SECONDS)
            finally:
                if not is_reserved:
                    self._start_task(_free_handle(ray.util.remove_placement_group, group))
            if is_reserved:
                entry.group, entry.host, entry.state.address = group, address, address
                return True
        return False

    def _discard_actor(self, entry: Entry, keep_group: bool = False) -> None:
        """Have Ray kill the supervisor and free its reservation; do not wait for either."""
        if entry.actor is not None:
            self._start_task(_free_handle(ray.kill, entry.actor))
            entry.actor = None
        if entry.group is not None and not keep_group:
            self._start_task(_free_handle(ray.util.remove_placement_group, entry.group))
            entry.group = None

    async def _follow_actor(self, entry: Entry) -> None:
        """Beat as long as the supervisor answers. Return when its process has ended for good."""
        drain_at, has_answered = _NEVER, False
        notice = _PROXIES_NOTICE_SECONDS if entry.order.role in NODE_ROLES else 0.0
        while True:
            if entry.kill_after is not None:
                drain_at = min(drain_at, time.monotonic() + notice)
            grace = entry.kill_after if time.monotonic() >= drain_at else None
            beat = entry.actor.renew_lease.remote(self._list_nodes(entry), grace)
            try:
                content = await asyncio.wait_for(beat, _ANSWER_SECONDS)
            except Exception as error:
                was_started = has_answered or "creation task" not in str(error)
                self._discard_actor(entry, keep_group=was_started)
                entry.host = entry.host if was_started else ""
                raise
            has_answered = True
            state, old = _STATE.decode(content), entry.state
            # A host says how its process is, and nothing about who it is.
            state.name, state.layout, state.role = old.name, old.layout, old.role
            state.address = entry.host
            if urlsplit(state.url).hostname not in (entry.host, entry.order.listen):
                state.url = ""
            entry.state = state
            if state.state == "ended" or (entry.kill_after is not None and state.state == "failed"):
                break
            await asyncio.sleep(_BEAT_SECONDS)
        await asyncio.wait_for(entry.actor.remove_files.remote(), _ANSWER_SECONDS)
        self._discard_actor(entry)
        entry.host = ""

    def _list_nodes(self, entry: Entry) -> list[str]:
        """List the URLs of the nodes for a proxy."""
        if entry.order.role != "proxy":
            return []
        ready = [e for e in self._entries.values() if e.state.state == "ready"]
        own = [e for e in ready if e.order.layout == entry.order.layout and e.kill_after is None]
        return [e.state.url for e in own if e.order.role in NODE_ROLES]


async def call_head(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function of Ray's head on another thread. Raises TimeoutError.

    There are few threads, and hanging calls keep them. So later calls wait in vain instead of
    adding threads, and all of them go on when the head does.
    """
    try:
        return await asyncio.wait_for(asyncio.to_thread(function, *arguments), _ANSWER_SECONDS)
    except TimeoutError:
        raise TimeoutError(f"Ray's head does not answer for {_ANSWER_SECONDS:g} s") from None


async def _free_handle(function: Callable[[Any], object], handle: Any) -> None:
    """Have Ray free an actor or a placement group."""
    try:
        await call_head(function, handle)
    except Exception as error:  # noqa: BLE001 - Ray frees it when we end
        logger.warning("%s: %s", function.__name__, error)


def _list_alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _is_selected(node: dict[str, Any], selector: Selector) -> bool:
    names = (node["NodeManagerAddress"], node["NodeManagerHostname"], node.get("NodeName"))
    is_named = not selector.node or selector.node in names
    return is_named and selector.labels.items() <= (node.get("Labels") or {}).items()


def main() -> int:
    """Start the control service in the Ray cluster of RAY_ADDRESS."""
    deployment, run, address, port, key_file = sys.argv[1:]
    try:
        own, operators = derive_control_keypairs(load_cluster_key(Path(key_file)), run)
    except UsageError as error:
        sys.exit(f"head: {error.message}; copy a key there and name it in ray.key_file")
    ray.init(namespace=f"pd-{deployment}", log_to_driver=False, logging_level=logging.WARNING)
    endpoint = f"tcp://{format_host(address)}:{port if port != '0' else '*'}"
    on_head = ray.remote(num_cpus=0, resources={"node:__internal_head__": 0.001})(ControlService)
    named = on_head.options(name="control", lifetime="detached")
    actor = named.remote(deployment, own, operators[0], endpoint)
    print(f"control service on port {ray.get(actor.get_port.remote())}")
    return 0


if __name__ == "__main__":
    # By the module's own name, so Ray imports the classes instead of copying them.
    sys.exit(importlib.import_module("pd.cluster.control").main())
