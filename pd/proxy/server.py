"""The proxy as a process: start, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import uvicorn

from pd.core.addresses import bind, in_url
from pd.core.connections import ConnectionLimits, GuardedServer, raise_file_limit
from pd.core.errors import NotFoundError, PDError, SetupError, UnavailableError
from pd.core.garbage import freeze_objects
from pd.core.local_requests import is_loopback
from pd.proxy.access import Access
from pd.proxy.actions import Performer
from pd.proxy.admin_api import AdminAPI
from pd.proxy.admission import Admission
from pd.proxy.app import make_app
from pd.proxy.background import Background
from pd.proxy.bodies import Bodies
from pd.proxy.channel import Sockets
from pd.proxy.compat_api import CompatAPI
from pd.proxy.dispatcher import Dispatcher
from pd.proxy.ledger import Ledger
from pd.proxy.loop import new_loop
from pd.proxy.metrics import Metrics
from pd.proxy.policies import make_policy
from pd.proxy.pool import NodePool
from pd.proxy.request_trace import RequestTrace, create_trace
from pd.proxy.routing import Router
from pd.proxy.service import Service
from pd.proxy.tokenizer import TextModels

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from pd.core.connections import ConnectionSource
    from pd.core.messages import AnyMessage
    from pd.core.node_info import Role
    from pd.proxy.config import ProxyConfig
    from pd.proxy.node_handle import NodeHandle
    from pd.proxy.shared import Shared

logger = logging.getLogger(__name__)
T = TypeVar("T")

# So long the ready line waits for nodes that are already up; without them it comes then.
READY_GRACE_SECONDS = 3.0
BACKLOG = 2048
# Idle connections are kept for longer than common clients and balancers keep theirs, so that the
# proxy does not cut one that is reused.
LIMITS = ConnectionLimits(keep_alive_seconds=75)
# Kernel memory per client, so that one that does not read is noticed instead of buffered for.
SEND_BUFFER_BYTES = 256 << 10
# A client that acknowledges nothing for so long is gone.
UNREAD_TIMEOUT_MS = 60_000


class Proxy:
    """One proxy process. ``start``, then ``drain`` and ``stop``, all on one event loop.

    Attributes:
        instance_id: its name towards the nodes, new with every start.
        url: where it listens, once started.
        performer: performs actions on this process, once it has started.
    """

    def __init__(self, config: ProxyConfig, shared: Shared | None = None) -> None:
        """``shared``: of one of several processes. Raises UsageError for a configuration that
        cannot work."""
        config.validate()
        self.config = config
        self.instance_id = uuid.uuid4().hex
        self.url = ""
        self.performer: Performer
        self._shared = shared
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._became_ready = asyncio.Event()
        self._prepared: set[str] = set()  # models whose tokenizer was asked for
        self._preparing: set[asyncio.Task[None]] = set()
        self._differences: set[str] = set()

    async def start(self) -> None:
        """Bind, begin to watch the nodes, serve. Raises SetupError if the port is in use, or if the
        system lacks what serving it needs, such as descriptors."""
        config, shared = self.config, self._shared
        certificate = config.make_certificate()
        source: ConnectionSource
        if shared is None:
            if config.trace_requests is not None:
                create_trace(Path(config.trace_requests))
            source = listener = bind_listener(config.host, config.port)
            address = listener.getsockname()[:2]
        else:
            source, address = shared.connections, shared.address
        try:
            text_models = TextModels(
                config.tokenizer,
                split_special_tokens=config.split_special_tokens,
                tool_call_parser=config.tool_call_parser,
                reasoning_parser=config.reasoning_parser,
            )
            await text_models.get(None)
            self._build(text_models, on_loopback=is_loopback(address[0]))
        except PDError:
            source.close()
            raise
        self.url = url_of(*address, is_encrypted=certificate is not None)
        self._pool.start()
        nodes: dict[Role, list[str]] = {
            "prefill": config.prefill,
            "decode": config.decode,
            "unified": config.unified,
        }
        for role, urls in nodes.items():
            for url in urls:
                self._pool.add(role, url)
        settings = uvicorn.Config(
            self._app,
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=1,
        )
        limits = LIMITS if shared is None else LIMITS.share(shared.count)
        tls = None if certificate is None else certificate.context
        self._server = GuardedServer(settings, limits, tls)
        self._serving = asyncio.create_task(self._server.serve_from(source))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)
        if not self._server.started and (error := self._serving.exception()) is not None:
            raise SetupError(f"cannot serve {self.url}: {error}") from error

    def _build(self, text_models: TextModels, *, on_loopback: bool) -> None:
        config, shared = self.config, self._shared
        self._text_models = text_models
        metrics = Metrics()
        self._trace: RequestTrace | None = None
        if config.trace_requests is not None:
            began = time.monotonic() if shared is None else shared.began
            self._trace = RequestTrace(Path(config.trace_requests), began)
        self._sockets = Sockets(self.instance_id, config.cluster_key)
        self._pool = NodePool(
            self._sockets,
            cluster_key=config.cluster_key,
            itl=config.itl,
            elastic=config.elastic == "auto",
            on_message=self._on_message,
            on_taken=self._on_taken,
            on_lost=self._on_lost,
            on_heartbeat=self._on_heartbeat,
            on_change=self._on_change,
        )
        policy, predictor = make_policy(config.policy), config.make_predictor()
        self._router = Router(policy, self._pool.nodes, predictor)
        self._dispatcher = Dispatcher(
            self.instance_id,
            self._router,
            metrics,
            Admission(config.max_queue, Ledger() if shared is None else shared.ledger),
            request_timeout=config.request_timeout,
            max_failovers=config.max_failovers if config.failover == "on" else 0,
            failover_wait=config.failover_wait,
            on_released=self._pool.release,
            trace=self._trace,
        )
        self._background = Background()
        self._service = service = Service(
            self._router,
            self._dispatcher,
            text_models,
            config.served_model_name,
            config.stream_interval,
            self._background,
            Bodies(self._background, 1 if shared is None else shared.count),
            claims=None if shared is None else shared.claims,
        )
        self.performer = Performer(self._pool, self._dispatcher, metrics)
        everywhere = self.performer.alone if shared is None else shared.everywhere
        access = Access(
            config.all_keys,
            key_required=config.key_required,
            cors_origins=config.cors_origins,
            on_loopback=on_loopback,
            host=config.host,
        )
        admin = AdminAPI(service, self._router, self._pool, self._dispatcher, everywhere, access)
        compat = CompatAPI(service, self._router, self._dispatcher, everywhere, config.tokenizer)
        self._app = make_app(service, admin, compat, metrics, access, config.cors_origins)

    async def wait_ready(self, timeout: float) -> bool:
        """Whether the nodes can serve, waiting at most ``timeout`` seconds for them (none: not) and
        for the links between them."""
        if not self._pool.nodes:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._became_ready.wait()
                await self._pool.wait_linked()
        return self._router.ready()

    @property
    def connections(self) -> int:
        """Connections of clients at present."""
        return self._server.connections

    def request_stop(self) -> None:
        """Ask :func:`serve` to drain and end, and the second time to end at once (from the event
        loop's thread)."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    async def stop_requested(self) -> None:
        """Wait for :meth:`request_stop`."""
        await self._stopping.wait()

    async def hurry_requested(self) -> None:
        """Wait for the second :meth:`request_stop`."""
        await self._hurry.wait()

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for those under way; False if they took too long."""
        self._dispatcher.admission.is_closed = True
        limit = self.config.drain_timeout if timeout is None else timeout
        try:
            await asyncio.wait_for(self._dispatcher.idle(), limit)
        except TimeoutError:
            logger.warning("%d requests did not finish in time", len(self._dispatcher.jobs))
            return False
        return True

    async def stop(self) -> None:
        """End what is left (clients get an error), tell the nodes, close everything."""
        self._dispatcher.admission.is_closed = True
        self._dispatcher.shut_down()
        self._server.should_exit = True
        for task in self._preparing:
            task.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        await self._pool.close()
        self._sockets.close()
        self._background.close()
        if self._trace is not None:
            await asyncio.to_thread(self._trace.close)

    def _on_message(self, node: NodeHandle, message: AnyMessage) -> None:
        self._dispatcher.receive(node, message)

    def _on_taken(self) -> None:
        self._dispatcher.deliver()

    def _on_lost(self, node: NodeHandle, reason: str, died: bool) -> None:
        self._dispatcher.node_lost(node, reason, died=died)

    def _on_heartbeat(self, node: NodeHandle) -> None:
        self._dispatcher.heard_from(node)

    def _on_change(self) -> None:
        self._dispatcher.nodes_changed()
        new = set(self._router.models()) - self._prepared
        if self._router.ready() and new:
            self._prepared |= new
            task = asyncio.create_task(self._prepare(new))
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)
        # A difference is logged when it is first seen, so also when a proxy starts.
        found = set(self._router.differences())
        for difference in found - self._differences:
            logger.warning("nodes that cannot work together: %s", difference)
        self._differences = found

    async def _prepare(self, models: set[str]) -> None:
        """Load tokenizers before they are needed: one that is missing is known at the start."""
        for model in models:
            try:
                await self._text_models.get(self._router.limits(model).model_path)
            except (NotFoundError, UnavailableError):
                continue
            except Exception:  # its requests say so, too; those of other models are served
                logger.exception("cannot load the tokenizer of %s", model)
        self._became_ready.set()


class Served(Protocol):
    """A proxy of one process or of several, as :func:`serve` runs it."""

    url: str
    instance_id: str

    async def start(self) -> None: ...

    async def wait_ready(self, timeout: float) -> bool: ...

    def request_stop(self) -> None: ...

    async def stop_requested(self) -> None: ...

    async def hurry_requested(self) -> None: ...

    async def drain(self) -> bool: ...

    async def stop(self) -> None: ...


async def serve(proxy: Served, on_ready: Callable[[str, str], None]) -> None:
    """Run a proxy until :meth:`Proxy.request_stop`, then drain; a second one ends it at once.

    Args:
        on_ready: called with URL and instance id once it listens; the nodes get a few seconds to
            be there too.

    Raises:
        UsageError, SetupError: it cannot start; the message says what to do.
    """
    raise_file_limit()
    await proxy.start()
    try:
        ended = await _first(proxy.wait_ready(READY_GRACE_SECONDS), proxy.stop_requested())
        if not ended[1]:
            freeze_objects()
            on_ready(proxy.url, proxy.instance_id)
            await proxy.stop_requested()
        await _first(proxy.drain(), proxy.hurry_requested())
    finally:
        await proxy.stop()


def stop_on_signals(proxy: Served) -> None:
    """Let SIGTERM and SIGINT request the proxy's stop, where this is the main thread."""
    if threading.current_thread() is threading.main_thread():
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, proxy.request_stop)


async def _first(*waits: Coroutine[Any, Any, object]) -> list[bool]:
    """Wait for one of several and give the others up; returns which of them ended."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    ended = [task.done() for task in tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return ended


def url_of(host: str, port: int, *, is_encrypted: bool = False) -> str:
    """The URL of a server at this IP address."""
    scheme = "https" if is_encrypted else "http"
    return f"{scheme}://{in_url(host)}:{port}"


def bind_listener(host: str, port: int) -> socket.socket:
    """The bound socket of a proxy. Raises SetupError in one line."""
    listener = bind(host, port)
    # Connections inherit both.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_TIMEOUT_MS)
    return listener


class ProxyThread:
    """A proxy on a thread with an event loop of its own, for tests and the demo.

    ``make``: makes it of its configuration.
    """

    def __init__(self, config: ProxyConfig, make: Callable[[ProxyConfig], Proxy] = Proxy) -> None:
        self._config = config
        self._make = make
        self._loop = new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self.proxy: Proxy | None = None

    @property
    def url(self) -> str:
        assert self.proxy is not None
        return self.proxy.url

    def start(self, wait_ready: float = 10.0) -> ProxyThread:
        """Start and wait for the nodes (0: do not wait). Raises what :meth:`Proxy.start` raises."""
        self._thread.start()
        self.run(self._start(wait_ready))
        return self

    def stop(self, drain: float = 0.0) -> None:
        if self.proxy is not None:
            if drain:
                self.run(self.proxy.drain(drain))
            self.run(self.proxy.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> ProxyThread:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _start(self, wait_ready: float) -> None:
        proxy = self._make(self._config)
        await proxy.start()
        self.proxy = proxy
        if wait_ready:
            await proxy.wait_ready(wait_ready)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something of :attr:`proxy` on its loop and wait for the result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
