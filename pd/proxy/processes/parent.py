"""The parent of a proxy of several processes: accepts connections and looks after the children.

It holds what must be one: the port, the list of nodes, names of requests that clients chose, and
what ended children had counted. It serves no request itself.
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

from pd.core.errors import SetupError, UnavailableError, UsageError
from pd.core.messages import ErrorInfo
from pd.core.node_info import Role
from pd.proxy.actions import AddWorker, Outcome, ReadMetrics, RemoveWorker, SetRole
from pd.proxy.ledger import Ledger
from pd.proxy.metric_families import Family, counted, families_from, merge
from pd.proxy.processes.acceptor import PortAcceptor
from pd.proxy.processes.claims import Claims
from pd.proxy.processes.hangs import HangWatch
from pd.proxy.processes.messages import (
    ClaimRids,
    PerformEverywhere,
    ReleaseRids,
    StartChild,
    Started,
    StartFailed,
    ToParent,
)
from pd.proxy.processes.process import ChildProcess
from pd.proxy.request_trace import create_trace
from pd.proxy.server import bind_listener, url_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.proxy.actions import Action
    from pd.proxy.config import ProxyConfig

logger = logging.getLogger(__name__)

# An action is over when so much time has passed; children that are busy perform it later.
ACTION_SECONDS = 5.0
# What a child has, beyond the time of the drain, to end by itself.
STOP_SECONDS = 10.0
# Actions that all children perform in the same order, and those that start meanwhile, too.
_CHANGES = AddWorker | RemoveWorker | SetRole
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
# A child that served for so long ended for a reason of its own, so its successor starts at once.
_PROVEN_SECONDS = 10.0


class ProxyProcesses:
    """A proxy of several processes, with the methods of :class:`pd.proxy.server.Proxy` that
    :func:`pd.proxy.server.serve` calls. Everything runs on the event loop.

    Attributes:
        instance_id: its name in the ready line. Towards nodes each child has its own.
        children: by number; None where one has ended.
    """

    def __init__(self, config: ProxyConfig) -> None:
        """Raises UsageError for a configuration that cannot work."""
        config.validate()
        self._config = config
        self.instance_id = uuid.uuid4().hex
        self.url = ""
        self._began = time.monotonic()
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self.children: list[ChildProcess | None] = [None] * config.workers
        # Each child has a task that keeps it, and one watches for those that hang.
        self._keepers: list[asyncio.Task[None]] = []
        self._starting, self._failed = True, cast("StartFailed | None", None)
        self._performing: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._claims = Claims()
        # What children that have ended counted, as far as they were asked.
        self._counted: list[Family] = []

    async def start(self) -> None:
        """Bind and start the children. Raises SetupError or UsageError, of a child too."""
        config = self._config
        self._memory = _memory_file()
        self._memory.truncate(Ledger.size(config.workers))
        table = mmap.mmap(self._memory.fileno(), 0)
        self._ledger = Ledger(memoryview(table))
        if config.trace_requests is not None:
            create_trace(Path(config.trace_requests))
        listener = bind_listener(config.host, config.port)
        self._address: tuple[str, int] = listener.getsockname()[:2]
        self.url = url_of(*self._address, is_encrypted=config.tls_cert is not None)
        self._acceptor = PortAcceptor(listener, self._serving, self._ledger)
        self._keepers = [asyncio.create_task(self._keep(n)) for n in range(config.workers)]
        self._keepers.append(asyncio.create_task(HangWatch(self._present, self._ledger).run()))
        while len(self._serving()) < config.workers:
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
        """Whether children serve; they have waited for the nodes themselves."""
        return bool(self._serving())

    def request_stop(self) -> None:
        """Ask :func:`pd.proxy.server.serve` to drain and end, the second time to end at once."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()
        self._changed.set()

    async def stop_requested(self) -> None:
        """Wait for :meth:`request_stop`."""
        await self._stopping.wait()

    async def hurry_requested(self) -> None:
        """Wait for the second :meth:`request_stop`."""
        await self._hurry.wait()

    async def drain(self, timeout: float | None = None) -> bool:
        """Have the children finish what they have; False if they took too long."""
        self._stopping.set()
        children = self._request_stop()
        limit = self._config.drain_timeout + STOP_SECONDS if timeout is None else timeout
        ended = await asyncio.gather(*(child.wait_ended(limit) for child in children))
        return all(ended)

    async def stop(self) -> None:
        """End the children that are left, and close everything."""
        self._stopping.set()
        self._request_stop()
        children = self._request_stop()
        await asyncio.gather(*(child.wait_ended(STOP_SECONDS) for child in children))
        for child in children:
            child.kill()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._acceptor.close()
        self._memory.close()

    def _request_stop(self) -> list[ChildProcess]:
        """Request the end of all children that are there; returns them."""
        children = self._present()
        for child in children:
            child.request_stop()
        return children

    def _present(self) -> list[ChildProcess]:
        return [child for child in self.children if child is not None]

    def _serving(self) -> list[ChildProcess]:
        return [child for child in self._present() if child.serves]

    # ---- life of a child

    async def _keep(self, number: int) -> None:
        """Have a child in this place until the proxy stops."""
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
        """Start a child and wait for its end; returns how it ended. Raises OSError where the system
        has no room for another process."""
        workers, memory = self._config.workers, self._memory.fileno()
        child = self.children[number] = ChildProcess(number, workers, memory, self._handle)
        level = logging.getLogger().getEffectiveLevel()
        try:
            status = await child.run(
                lambda: StartChild(self._config, self._address, level, self._began)
            )
        finally:
            self._forget(child)
        return f"ended with status {status}"

    def _forget(self, child: ChildProcess) -> None:
        """Keep nothing of a child that has ended but what it counted."""
        self.children[child.number] = None
        self._acceptor.take_back(child)
        self._ledger.clear(child.number)
        self._claims.drop(child)
        self._counted = merge([self._counted, counted(child.families)])
        self._acceptor.update()
        self._changed.set()

    def _handle(
        self, child: ChildProcess, message: ToParent, reply: Callable[[object], None]
    ) -> None:
        match message:
            case Started(instance_id):
                logger.info("proxy process %d is instance %s", child.number, instance_id)
                child.instance_id, child.serves = instance_id, True
                self._acceptor.update()
                self._changed.set()
            case StartFailed():
                logger.error("proxy process %d cannot start: %s", child.number, message.message)
                if self._starting:
                    self._failed = message
                    self._changed.set()
            case PerformEverywhere(action):
                task = asyncio.create_task(self._perform(child, action, reply))
                self._performing.add(task)
                task.add_done_callback(self._performing.discard)
            case ClaimRids(owner, rids):
                reply(self._claims.claim(child, owner, rids))
            case ReleaseRids(owner, rids):
                self._claims.release(child, owner, rids)

    # ---- actions

    async def _perform(
        self, asking: ChildProcess, action: Action, reply: Callable[[object], None]
    ) -> None:
        """Have all children perform an action, and send the one that asked what they say. Children
        that are busy or not ready yet perform it later."""
        turn = self._changing if isinstance(action, _CHANGES) else contextlib.nullcontext()
        async with turn:
            reply(await self._outcomes(asking, action))

    async def _outcomes(self, asking: ChildProcess, action: Action) -> list[Outcome]:
        """Return the children's outcomes; that of the child which asked comes first."""
        waited = [child for child in self._serving() if not self._acceptor.is_stuck(child)]
        children = self._present()
        told = [c for c in children if c in waited or c.perform_later(action)]
        found = await asyncio.gather(*(c.perform(action, ACTION_SECONDS) for c in waited))
        outcomes = {
            child: outcome
            for child, outcome in zip(waited, found, strict=True)
            if outcome is not None
        }
        if isinstance(action, ReadMetrics):
            return [Outcome(self._merge_metrics(outcomes))]
        own = outcomes.pop(asking, None)
        said = [*([] if own is None else [own]), *outcomes.values()]
        if not said:
            message = f"no process of the proxy answered within {ACTION_SECONDS:g} s"
            return [Outcome(error=ErrorInfo(UnavailableError.kind, message))]
        if said[0].error is None and isinstance(action, _CHANGES):
            self._record(action, said[0])
            for child in self.children:
                # It began with the nodes that were known before.
                if child is not None and child not in told:
                    child.perform_later(action)
        return said

    def _merge_metrics(self, outcomes: dict[ChildProcess, Outcome]) -> list[Family]:
        for child, outcome in outcomes.items():
            child.families = families_from(outcome.value)
        return merge([self._counted, *(child.families for child in self._serving())])

    def _record(self, action: Action, outcome: Outcome) -> None:
        """Note which nodes children are given that are started from now on. Nodes tell their roles
        themselves where these have changed."""
        if isinstance(action, AddWorker) and outcome.value is not None:
            entry = _ENTRIES.decode(msgspec.msgpack.encode(outcome.value))
            self._set_nodes(entry.url, action.role)
        elif isinstance(action, RemoveWorker):
            self._set_nodes(action.url, None)

    def _set_nodes(self, url: str, role: str | None) -> None:
        """Have a node in this role in the configuration, or (None) not at all."""
        self._config = config = copy.copy(self._config)
        for name in get_args(Role):
            urls = [known for known in getattr(config, name) if known != url]
            setattr(config, name, [*urls, url] if name == role else urls)


def _memory_file() -> BinaryIO:
    """An empty file that processes can share. It lies in memory, since whoever writes to a mapped
    file for which the disk has no room is ended by SIGBUS."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("pd-ledger"), "r+b")
    return cast("BinaryIO", tempfile.TemporaryFile())


class _Entry(msgspec.Struct):
    """A node that was added."""

    url: str


_ENTRIES = msgspec.msgpack.Decoder(_Entry)
