"""The parent of a proxy of several processes: accepts connections and supervises the children.

It holds everything that must exist once: the port, the list of nodes, the rids chosen by clients,
and the counts of ended children. It serves no requests itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import mmap
import os
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast, get_args

import msgspec

from pd.core.errors import PDError, SetupError, UnavailableError, UsageError
from pd.core.messages import ErrorInfo
from pd.core.node_info import Role
from pd.proxy.dispatch.request_trace import create_trace
from pd.proxy.server import bind_listener, make_url
from pd.proxy.storage.directory import StorageDirectory
from pd.proxy.workers.acceptor import PortAcceptor
from pd.proxy.workers.actions import AddWorker, Outcome, ReadMetrics, RemoveWorker, SetRole
from pd.proxy.workers.claims import Claims
from pd.proxy.workers.hangs import HangWatch
from pd.proxy.workers.ledger import Ledger
from pd.proxy.workers.messages import (
    ClaimRids,
    PerformEverywhere,
    ReleaseRids,
    StartChild,
    Started,
    StartFailed,
    ToParent,
)
from pd.proxy.workers.metric_families import Family, decode_families, drop_gauges, merge_families
from pd.proxy.workers.process import ChildProcess
from pd.util.descriptors import count_spare_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.proxy.config import ProxyConfig
    from pd.proxy.workers.actions import Action

logger = logging.getLogger(__name__)

# We stop waiting for an action after this time. Busy children perform it later.
ACTION_SECONDS = 5.0
# Descriptors of the parent per child.
_FILES_PER_CHILD = 8
# Time for a child to end by itself, in addition to the drain.
STOP_SECONDS = 10.0
# All children perform these actions in the same order, including children started meanwhile.
_CHANGES = AddWorker | RemoveWorker | SetRole
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
# A child that served for this long ended for its own reason, so we replace it at once.
_PROVEN_SECONDS = 10.0


class ProxyProcesses:
    """A proxy of several processes. Runs on the event loop.

    It has the methods of :class:`pd.proxy.server.Proxy` called by :func:`pd.proxy.server.serve`.

    Attributes:
        instance_id: name in the ready line. For nodes each child has its own.
        children: by number; None if the child has ended.
    """

    def __init__(self, config: ProxyConfig) -> None:
        """Check the configuration. Raises UsageError if it is invalid."""
        config.validate()
        self._config = config
        self.instance_id = uuid.uuid4().hex
        self.url = ""
        self._began = time.monotonic()
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self.children: list[ChildProcess | None] = [None] * config.workers
        # One task per child keeps it running, and one more watches for hangs.
        self._keepers: list[asyncio.Task[None]] = []
        self._starting, self._failed = True, cast("StartFailed | None", None)
        self._performing: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._claims = Claims()
        self._directory = StorageDirectory(config.storage_dir)
        # Counts of ended children, as far as they reported them.
        self._counted: list[Family] = []

    async def start(self) -> None:
        """Bind and start the children. Raises SetupError or UsageError, also for a child."""
        config = self._config
        count_spare_files(
            f"a proxy of {config.workers} processes", 0, config.workers * _FILES_PER_CHILD
        )
        self._memory = _make_memory_file()
        self._memory.truncate(Ledger.get_size(config.workers))
        table = mmap.mmap(self._memory.fileno(), 0)
        self._ledger = Ledger(memoryview(table))
        if config.trace_requests is not None:
            create_trace(Path(config.trace_requests))
        listener = bind_listener(config.host, config.port)
        self._config = config = copy.copy(config)
        try:
            config.storage_dir = str(self._directory.open())
        except PDError:
            listener.close()
            raise
        self._address: tuple[str, int] = listener.getsockname()[:2]
        self.url = make_url(*self._address, is_encrypted=config.tls_cert is not None)
        self._acceptor = PortAcceptor(listener, self._list_serving, self._ledger)
        self._keepers = [asyncio.create_task(self._keep_child(n)) for n in range(config.workers)]
        self._keepers.append(
            asyncio.create_task(HangWatch(self._list_present, self._ledger).watch_children())
        )
        while len(self._list_serving()) < config.workers:
            self._changed.clear()
            await self._changed.wait()
            if self._failed is not None:
                await self.stop()
                error = UsageError if self._failed.exit_status == 2 else SetupError
                raise error(self._failed.message)
            if self._stopping.is_set():
                break
        self._starting = False

    async def wait_ready(self, timeout: float) -> bool:
        """Return whether children serve. They have waited for the nodes themselves."""
        return bool(self._list_serving())

    def request_stop(self) -> None:
        """Ask :func:`pd.proxy.server.serve` to drain and end, the second time to end at once."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()
        self._changed.set()

    async def wait_stop_requested(self) -> None:
        """Wait for :meth:`request_stop`."""
        await self._stopping.wait()

    async def wait_hurry_requested(self) -> None:
        """Wait for the second :meth:`request_stop`."""
        await self._hurry.wait()

    async def drain(self, timeout: float | None = None) -> bool:
        """Let the children finish their requests. Return False if they take too long."""
        self._stopping.set()
        children = self._request_stop()
        limit = self._config.drain_timeout + STOP_SECONDS if timeout is None else timeout
        ended = await asyncio.gather(*(child.wait_ended(limit) for child in children))
        return all(ended)

    async def stop(self) -> None:
        """End the remaining children, and close everything."""
        self._stopping.set()
        self._request_stop()
        children = self._request_stop()
        await asyncio.gather(*(child.wait_ended(STOP_SECONDS) for child in children))
        for child in children:
            child.send_kill()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._acceptor.close()
        self._memory.close()
        await asyncio.to_thread(self._directory.close)

    def _request_stop(self) -> list[ChildProcess]:
        """Ask all living children to end. Return them."""
        children = self._list_present()
        for child in children:
            child.request_stop()
        return children

    def _list_present(self) -> list[ChildProcess]:
        return [child for child in self.children if child is not None]

    def _list_serving(self) -> list[ChildProcess]:
        return [child for child in self._list_present() if child.serves]

    # ---- life of a child

    async def _keep_child(self, number: int) -> None:
        """Keep a child running in this place until the proxy stops."""
        loop, pause = asyncio.get_running_loop(), _FIRST_PAUSE
        while not self._stopping.is_set():
            began = loop.time()
            try:
                ended = await self._run_child(number)
            except OSError as error:
                ended = f"cannot be started ({error.strerror or error})"
            if self._starting and self._failed is None:
                text = f"a proxy process {ended} before it served; see its log"
                self._failed = StartFailed(text, SetupError.exit_status)
                self._changed.set()
            if self._stopping.is_set() or self._failed is not None:
                return
            if loop.time() - began > _PROVEN_SECONDS:
                pause = _FIRST_PAUSE
            logger.error("proxy process %d %s; another one takes its place", number, ended)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _run_child(self, number: int) -> str:
        """Run a child until it ends. Return how it ended.

        Raises OSError if the system cannot start another process.
        """
        workers, memory = self._config.workers, self._memory.fileno()
        child = self.children[number] = ChildProcess(number, workers, memory, self._handle_message)
        level = logging.getLogger().getEffectiveLevel()
        try:
            status = await child.run(
                lambda: StartChild(self._config, self._address, level, self._began)
            )
        finally:
            self.children[child.number] = None
            self._acceptor.take_back(child)
            self._ledger.clear_row(child.number)
            self._claims.drop_child(child)
            self._counted = merge_families([self._counted, drop_gauges(child.families)])
            self._acceptor.update_accepting()
            self._changed.set()
        return f"ended with status {status}"

    def _handle_message(
        self, child: ChildProcess, message: ToParent, reply: Callable[[object], None]
    ) -> None:
        match message:
            case Started(instance_id):
                logger.info("proxy process %d is instance %s", child.number, instance_id)
                child.instance_id, child.serves = instance_id, True
                self._acceptor.update_accepting()
                self._changed.set()
            case StartFailed():
                logger.error("proxy process %d cannot start: %s", child.number, message.message)
                if self._starting:
                    self._failed = message
                    self._changed.set()
            case PerformEverywhere(action):
                task = asyncio.create_task(self._perform_action(child, action, reply))
                self._performing.add(task)
                task.add_done_callback(self._performing.discard)
            case ClaimRids(owner, rids):
                reply(self._claims.claim_rids(child, owner, rids))
            case ReleaseRids(owner, rids):
                self._claims.release_rids(child, owner, rids)

    # ---- actions

    async def _perform_action(
        self, asking: ChildProcess, action: Action, reply: Callable[[object], None]
    ) -> None:
        """Let all children perform an action, and send their outcomes to the child that asked.

        Children that are busy or not ready yet perform it later.
        """
        turn = self._changing if isinstance(action, _CHANGES) else contextlib.nullcontext()
        async with turn:
            reply(await self._collect_outcomes(asking, action))

    async def _collect_outcomes(self, asking: ChildProcess, action: Action) -> list[Outcome]:
        """Return the outcomes of the children, starting with the child that asked."""
        waited = [child for child in self._list_serving() if not self._acceptor.is_stuck(child)]
        children = self._list_present()
        told = [c for c in children if c in waited or c.perform_later(action)]
        results = await asyncio.gather(*(c.perform_action(action, ACTION_SECONDS) for c in waited))
        outcomes = {
            child: outcome
            for child, outcome in zip(waited, results, strict=True)
            if outcome is not None
        }
        if isinstance(action, ReadMetrics):
            return [Outcome(self._merge_metrics(outcomes))]
        own = outcomes.pop(asking, None)
        answers = [*([] if own is None else [own]), *outcomes.values()]
        if not answers:
            message = f"no process of the proxy answered within {ACTION_SECONDS:g} s"
            return [Outcome(error=ErrorInfo(UnavailableError.kind, message))]
        if answers[0].error is None and isinstance(action, _CHANGES):
            self._record_change(action, answers[0])
            for child in self.children:
                # This child started with the nodes from before.
                if child is not None and child not in told:
                    child.perform_later(action)
        return answers

    def _merge_metrics(self, outcomes: dict[ChildProcess, Outcome]) -> list[Family]:
        for child, outcome in outcomes.items():
            child.families = decode_families(outcome.value)
        return merge_families([self._counted, *(child.families for child in self._list_serving())])

    def _record_change(self, action: Action, outcome: Outcome) -> None:
        """Record a change of nodes for children we start later. Nodes themselves report changed
        roles."""
        if isinstance(action, AddWorker) and outcome.value is not None:
            entry = _ENTRIES.decode(msgspec.msgpack.encode(outcome.value))
            self._set_nodes(entry.url, action.role)
        elif isinstance(action, RemoveWorker):
            self._set_nodes(action.url, None)

    def _set_nodes(self, url: str, role: str | None) -> None:
        """Add a node in this role to the configuration, or (None) remove it."""
        self._config = config = copy.copy(self._config)
        for name in get_args(Role):
            urls = [known for known in getattr(config, name) if known != url]
            setattr(config, name, [*urls, url] if name == role else urls)


def _make_memory_file() -> BinaryIO:
    """Make an empty file that processes can share.

    It is in memory, because SIGBUS ends a process that writes to a mapped file when the disk is
    full.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("pd-ledger"), "r+b")
    return cast("BinaryIO", tempfile.TemporaryFile())


class _Entry(msgspec.Struct):
    """An added node."""

    url: str


_ENTRIES = msgspec.msgpack.Decoder(_Entry)
