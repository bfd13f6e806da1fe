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

from pd.core.addresses import bind_socket, format_host, is_loopback
from pd.core.errors import NotFoundError, PDError, SetupError, UnavailableError
from pd.net.connection_limits import ConnectionLimits
from pd.net.connections import GuardedServer
from pd.proxy.api.admin_api import AdminAPI
from pd.proxy.api.batches_api import BatchesAPI
from pd.proxy.api.compat_api import CompatAPI
from pd.proxy.api.files_api import FilesAPI
from pd.proxy.api.responses_api import ResponsesAPI
from pd.proxy.api.service import Service
from pd.proxy.app import make_app
from pd.proxy.batches.runner import BatchRunner
from pd.proxy.batches.sender import BatchSender
from pd.proxy.dispatch.admission import Admission
from pd.proxy.dispatch.dispatcher import Dispatcher
from pd.proxy.dispatch.logprob_memory import LogprobMemory
from pd.proxy.dispatch.proxy_metrics import Metrics
from pd.proxy.dispatch.request_trace import RequestTrace, create_trace
from pd.proxy.http.access import UPLOAD_PATH, Access
from pd.proxy.http.background import Background
from pd.proxy.http.bodies import Bodies
from pd.proxy.nodes.channel import Sockets
from pd.proxy.nodes.discovery.discovery import Discovery
from pd.proxy.nodes.discovery.flag import parse_sources
from pd.proxy.nodes.events import NodesChanged
from pd.proxy.nodes.pool import NodePool
from pd.proxy.routing.policies import make_policy
from pd.proxy.routing.routing import Router
from pd.proxy.storage.batches import BatchStore
from pd.proxy.storage.database import Database
from pd.proxy.storage.directory import StorageDirectory
from pd.proxy.storage.files import MAX_FILE_BYTES, FileStore
from pd.proxy.storage.responses import ResponseStore
from pd.proxy.text.tokenizer import TextModels
from pd.proxy.workers.actions import Performer
from pd.proxy.workers.ledger import Ledger
from pd.proxy.workers.loop import new_loop
from pd.util.descriptors import FILES_PER_PEER, count_spare_files, raise_file_limit
from pd.util.garbage import freeze_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from pd.core.node_info import Role
    from pd.net.connections import ConnectionSource
    from pd.proxy.config import ProxyConfig
    from pd.proxy.nodes.events import NodeEvent
    from pd.proxy.nodes.node_http import NodeAccess
    from pd.proxy.workers.shared import Shared

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Time that the ready line waits for nodes.
READY_GRACE_SECONDS = 3.0
BACKLOG = 2048
# Room for the parts of a form around its file.
MAX_FORM_BYTES = 1 << 20
# We keep idle connections longer than common clients and load balancers do, because we must not
# close one being reused.
LIMITS = ConnectionLimits(
    keep_alive_seconds=75, long_bodies={UPLOAD_PATH: MAX_FILE_BYTES + MAX_FORM_BYTES}
)
# Kernel memory per client. It is small, because we want to notice an unresponsive client instead of
# buffering for it.
SEND_BUFFER_BYTES = 256 << 10
# A client that acknowledges nothing for this long is gone.
UNREAD_TIMEOUT_MS = 60_000


class Proxy:
    """One proxy process. Call ``start``, then ``drain`` and ``stop``, all on one event loop.

    Attributes:
        instance_id: name of this process for nodes, new with every start.
        url: address of its listener, once started.
        performer: performs actions in this process, once started.
    """

    def __init__(self, config: ProxyConfig, shared: Shared | None = None) -> None:
        """``shared``: resources of one of several processes. Raises UsageError for an invalid
        configuration."""
        config.validate()
        self.config = config
        self.instance_id = uuid.uuid4().hex
        self.url = ""
        self.performer: Performer
        self._app: FastAPI
        self._shared = shared
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._became_ready = asyncio.Event()
        self._prepared: set[str] = set()  # models with a requested tokenizer
        self._preparing: set[asyncio.Task[None]] = set()
        self._differences: set[str] = set()
        self._discovery: Discovery | None = None
        self._serving: asyncio.Task[None] | None = None
        # The parent of several processes keeps the directory.
        self._directory = None if shared else StorageDirectory(config.storage_dir)
        self._database: Database | None = None
        self._files: FileStore | None = None
        self._batches: BatchRunner

    async def start_without_port(self, role: Role, url: str, node_access: NodeAccess) -> ASGIApp:
        """Watch one node, and return the application for a caller in this process.

        The answers are those of a proxy with a port. End it with :meth:`stop`.

        Args:
            url: name of the node for ``node_access``.
        """
        text_models = await self._load_text_models()
        self._build(text_models, on_loopback=True, most_nodes=1, node_access=node_access)
        self._pool.start(self._handle_event)
        self._pool.add_node(role, url)
        return self._app

    async def start(self) -> None:
        """Bind, begin to watch the nodes, serve.

        Raises SetupError if the port is in use, or if the system lacks resources such as
        descriptors.
        """
        config, shared = self.config, self._shared
        nodes: dict[Role, list[str]] = {
            "prefill": config.prefill,
            "decode": config.decode,
            "unified": config.unified,
        }
        num_nodes = sum(map(len, nodes.values()))
        spare = count_spare_files(f"a proxy of {num_nodes} nodes", num_nodes)
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
            text_models = await self._load_text_models()
            # Half of the descriptors is for clients, the other half for nodes that join later.
            self._build(
                text_models,
                on_loopback=is_loopback(address[0]),
                most_nodes=num_nodes + spare // 2 // FILES_PER_PEER,
            )
        except PDError:
            source.close()
            raise
        self.url = make_url(*address, is_encrypted=certificate is not None)
        self._pool.start(self._handle_event)
        self._batches.start()
        for role, urls in nodes.items():
            for url in urls:
                self._pool.add_node(role, url)
        if config.discover:
            has_key = config.cluster_key is not None
            sources = parse_sources(config.discover, has_key=has_key)
            self._discovery = Discovery(sources, self._pool, has_key=has_key)
            self._discovery.start()
        settings = uvicorn.Config(
            self._app,
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=1,
        )
        limits = LIMITS if shared is None else LIMITS.divide_among(shared.count)
        limits = limits.fit_files(spare // 2)
        tls = None if certificate is None else certificate.get_context
        self._server = GuardedServer(settings, limits, tls, has_owners=True)
        self._serving = asyncio.create_task(self._server.serve_from(source))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)
        if not self._server.started and (error := self._serving.exception()) is not None:
            raise SetupError(f"cannot serve {self.url}: {error}") from error

    async def _load_text_models(self) -> TextModels:
        """Load the configured tokenizer, if there is one. Raises UsageError."""
        config = self.config
        text_models = TextModels(
            config.tokenizer,
            split_special_tokens=config.split_special_tokens,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
        await text_models.load(None)
        return text_models

    def _build(
        self,
        text_models: TextModels,
        *,
        on_loopback: bool,
        most_nodes: int,
        node_access: NodeAccess | None = None,
    ) -> None:
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
            most_nodes=most_nodes,
            access=node_access,
        )
        policy, predictor = make_policy(config.policy), config.make_predictor()
        self._router = Router(policy, self._pool.nodes, predictor)
        self._dispatcher = Dispatcher(
            self.instance_id,
            self._router,
            metrics,
            Admission(config.max_queue, Ledger() if shared is None else shared.ledger),
            LogprobMemory(1 if shared is None else shared.count),
            request_timeout=config.request_timeout,
            max_failovers=config.max_failovers if config.failover == "on" else 0,
            failover_wait=config.failover_wait,
            node_refresh=self._pool.node_refresh,
            on_released=self._pool.release_node,
            trace=self._trace,
        )
        self._background = Background()
        self._database = database = Database(self._open_directory())
        self._service = service = Service(
            self._router,
            self._dispatcher,
            text_models,
            config.served_model_name,
            config.stream_interval,
            self._background,
            Bodies(self._background, 1 if shared is None else shared.count),
            self._pool.node_refresh,
            claims=None if shared is None else shared.claims,
        )
        self.performer = Performer(self._pool, self._dispatcher, metrics)
        everywhere = self.performer.perform_alone if shared is None else shared.everywhere
        access = Access(
            config.all_keys,
            key_required=config.key_required,
            cors_origins=config.cors_origins,
            on_loopback=on_loopback,
            host=config.host,
        )
        admin = AdminAPI(service, self._router, self._pool, self._dispatcher, everywhere, access)
        compat = CompatAPI(service, self._router, self._dispatcher, everywhere, config.tokenizer)
        store = ResponseStore(database, config.storage_mb << 20)
        responses = ResponsesAPI(service, store, self._background)
        self._files = files = FileStore(database, config.files_mb << 20)
        batches = BatchStore(database, config.files_mb << 20)
        self._app = make_app(
            service,
            self._router,
            admin,
            compat,
            responses,
            FilesAPI(files),
            BatchesAPI(batches, self._wake_batches),
            metrics,
            access,
            config.cors_origins,
        )
        sender = BatchSender(self._app, self._router, self._dispatcher.admission)
        self._batches = BatchRunner(
            database, batches, files, sender, access, metrics, config.batch_concurrency
        )

    def _wake_batches(self) -> None:
        self._batches.wake()

    def _open_directory(self) -> Path:
        """Return the directory of the storage. Raises SetupError."""
        if self._directory is not None:
            return self._directory.open()
        assert self.config.storage_dir is not None
        return Path(self.config.storage_dir)

    async def wait_ready(self, timeout: float) -> bool:
        """Wait for the nodes and the links between them, for at most ``timeout`` seconds. Returns
        whether they can serve. Without nodes, returns at once."""
        if not self._pool.nodes and self._discovery is None:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._became_ready.wait()
                await self._pool.wait_linked()
        return self._router.can_serve()

    @property
    def connections(self) -> int:
        """Number of open connections of clients."""
        return self._server.connections

    def request_stop(self) -> None:
        """Ask :func:`serve` to drain and end, the second time to end at once. Call it on the event
        loop's thread."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    async def wait_stop_requested(self) -> None:
        """Wait for :meth:`request_stop`."""
        await self._stopping.wait()

    async def wait_hurry_requested(self) -> None:
        """Wait for the second :meth:`request_stop`."""
        await self._hurry.wait()

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for the others. Returns False if they took too long."""
        self._dispatcher.admission.is_closed = True
        limit = self.config.drain_timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(limit):
                # Batches first, because they write the results of the last requests.
                await self._batches.drain()
                await self._dispatcher.wait_idle()
        except TimeoutError:
            logger.warning("%d requests did not finish in time", len(self._dispatcher.jobs))
            return False
        return True

    async def stop(self) -> None:
        """Fail the remaining requests, tell the nodes, and close everything."""
        self._dispatcher.admission.is_closed = True
        await self._batches.stop()
        self._dispatcher.shut_down()
        for task in self._preparing:
            task.cancel()
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
        if self._discovery is not None:
            await self._discovery.close()
        await self._pool.close()
        self._sockets.close()
        self._background.close()
        # On this thread, because nothing can begin on another one while a program ends.
        self._close_storage()
        if self._trace is not None:
            await asyncio.to_thread(self._trace.close)

    def _close_storage(self) -> None:
        if self._files is not None:
            self._files.close()
        if self._database is not None:
            self._database.close()
        if self._directory is not None:
            self._directory.close()

    def _handle_event(self, event: NodeEvent) -> None:
        self._dispatcher.handle_event(event)
        if isinstance(event, NodesChanged):
            self._check_models()

    def _check_models(self) -> None:
        """Prepare new models, and warn of incompatible nodes."""
        new = set(self._router.list_models()) - self._prepared
        if self._router.can_serve() and new:
            self._prepared |= new
            task = asyncio.create_task(self._prepare(new))
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)
        # We log a difference when it is new, so also at the start.
        found = set(self._router.find_differences())
        for difference in found - self._differences:
            logger.warning("nodes cannot work together: %s", difference)
        unlike = set(self._router.find_answer_differences())
        for difference in unlike - found - self._differences:
            logger.warning("nodes of one model name that answer differently: %s", difference)
        self._differences = found | unlike

    async def _prepare(self, models: set[str]) -> None:
        """Load tokenizers early, because a missing one should show at the start."""
        for model in models:
            try:
                await self._text_models.load(self._router.get_limits(model).model_path)
            except (NotFoundError, UnavailableError):
                continue
            except Exception:  # its requests fail with the error, and we serve other models
                logger.exception("cannot load the tokenizer of %s", model)
        self._became_ready.set()


class Served(Protocol):
    """A proxy of one process or of several, as :func:`serve` runs it."""

    url: str
    instance_id: str

    async def start(self) -> None: ...

    async def wait_ready(self, timeout: float) -> bool: ...

    def request_stop(self) -> None: ...

    async def wait_stop_requested(self) -> None: ...

    async def wait_hurry_requested(self) -> None: ...

    async def drain(self) -> bool: ...

    async def stop(self) -> None: ...


async def serve(proxy: Served, on_ready: Callable[[str, str], None]) -> None:
    """Run a proxy until :meth:`Proxy.request_stop`, then drain. A second request ends it at once.

    Args:
        on_ready: called with URL and instance id once the proxy listens. Nodes get a few seconds to
            be ready before.

    Raises:
        UsageError, SetupError: the proxy cannot start. The message says what to do.
    """
    raise_file_limit()
    await proxy.start()
    try:
        ended = await _wait_first(
            proxy.wait_ready(READY_GRACE_SECONDS), proxy.wait_stop_requested()
        )
        if not ended[1]:
            freeze_objects()
            on_ready(proxy.url, proxy.instance_id)
            await proxy.wait_stop_requested()
        await _wait_first(proxy.drain(), proxy.wait_hurry_requested())
    finally:
        await proxy.stop()


def stop_on_signals(proxy: Served) -> None:
    """Let SIGTERM and SIGINT request the stop, if this is the main thread."""
    if threading.current_thread() is threading.main_thread():
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, proxy.request_stop)


async def _wait_first(*waits: Coroutine[Any, Any, object]) -> list[bool]:
    """Wait for the first of several and cancel the others. Returns for each whether it ended."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    ended = [task.done() for task in tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return ended


def make_url(host: str, port: int, *, is_encrypted: bool = False) -> str:
    """Return the URL of a server at this IP address."""
    scheme = "https" if is_encrypted else "http"
    return f"{scheme}://{format_host(host)}:{port}"


def bind_listener(host: str, port: int) -> socket.socket:
    """Bind the socket of a proxy. Raises SetupError."""
    listener = bind_socket(host, port)
    # Connections inherit both.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_TIMEOUT_MS)
    return listener


class ProxyThread:
    """A proxy on its own thread and event loop, for tests and the demo.

    ``make``: makes the proxy from its configuration.
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
        """Start, and wait for the nodes (0: do not wait). Raises as :meth:`Proxy.start` does."""
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
        """Run a coroutine on the loop of :attr:`proxy` and wait for the result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
