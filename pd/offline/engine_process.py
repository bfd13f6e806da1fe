"""The engine process, as its program sees it."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import subprocess
import threading
from typing import TYPE_CHECKING

import msgspec

from pd.core.errors import (
    NodeFailedError,
    PDError,
    SetupError,
    UnsupportedModelError,
    UsageError,
)
from pd.offline.engine_protocol import (
    EndEngine,
    EngineRefused,
    EngineStarted,
    FlushCache,
    StartEngine,
    report_decoder,
)
from pd.proxy.nodes.node_handle import Endpoints, ServerInfo
from pd.proxy.nodes.node_http import NodeHttpError, NotListeningError
from pd.util.children import module_command

if TYPE_CHECKING:
    from pd.core.config import NodeConfig
    from pd.offline.engine_protocol import Order, Report

_STOP_SECONDS = 10.0
_REFUSALS: dict[str, type[PDError]] = {
    cls.__name__: cls for cls in (UsageError, SetupError, UnsupportedModelError)
}


class _SocketEndpoints(Endpoints):
    """Addresses of an engine, which has no port."""

    zmq: str


class EngineInfo(ServerInfo):
    """The description of an engine."""

    endpoints: _SocketEndpoints


_info_decoder = msgspec.json.Decoder(EngineInfo)


class EngineProcess:
    """Starts and ends an engine, and administrates it for the proxy of this program.

    It has its own session, so Ctrl-C reaches only this program. If the program ends in any way, so
    does the engine. The event loop's thread calls all methods but :meth:`kill`.

    Attributes:
        ended: gets the error for requests when the process has ended by itself.
        info: its description, once started.
    """

    info: EngineInfo

    def __init__(self, config: NodeConfig, cpu_threads: int | None, log_level: str) -> None:
        """Start the process. :meth:`wait_started` waits for it."""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[PDError] = self._loop.create_future()
        self._reports: asyncio.Queue[Report | None] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._flushing = asyncio.Lock()
        self._process = subprocess.Popen(
            module_command("pd.offline.engine_main"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._reader = threading.Thread(
            target=self._read_reports, name="engine-reports", daemon=True
        )
        self._reader.start()
        self._give_order(StartEngine(pickle.dumps(config), cpu_threads, log_level))

    async def wait_started(self) -> None:
        """Wait until it takes requests. Raises UsageError or SetupError if it cannot."""
        report = await self._reports.get()
        if isinstance(report, EngineRefused):
            raise _REFUSALS.get(report.kind, SetupError)(report.message)
        if not isinstance(report, EngineStarted):
            raise SetupError(f"{self._describe_end()} while it started; see its messages above")
        self.info = _info_decoder.decode(msgspec.json.encode(report.info))

    async def stop(self) -> None:
        """Have it end, and wait for that. We need no new thread, because the program may be ending,
        too."""
        self.ended.cancel()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._give_order(EndEngine())
        with contextlib.suppress(BrokenPipeError):  # it has ended before it read everything
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self._gone.wait()
        except TimeoutError:
            self._process.kill()
            await self._gone.wait()
        self._reader.join()
        self._process.stdout.close()

    def kill(self) -> None:
        """End it at once. Any thread may call this."""
        self._process.kill()

    # ---- as pd.proxy.nodes.node_http.NodeAccess

    async def close(self) -> None:
        """Nothing to close. :meth:`stop` ends the process."""

    async def fetch_server_info(self, url: str) -> ServerInfo:
        if self._process.poll() is not None:
            raise NotListeningError(self._describe_end())
        return self.info

    async def post_admin(self, url: str, path: str, instance_id: str) -> None:
        if path != "/flush_cache":
            raise NodeHttpError(f"an engine in a program has no {path}")
        async with self._flushing:
            self._give_order(FlushCache())
            if await self._reports.get() is None:
                raise NotListeningError(self._describe_end())

    def _give_order(self, order: Order) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # it has ended, and the next report says so

    def _read_reports(self) -> None:
        """Pass reports to the event loop until the process ends. Runs on a thread of its own."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._loop.call_soon_threadsafe(self._reports.put_nowait, report_decoder.decode(line))
        self._process.wait()
        self._loop.call_soon_threadsafe(self._note_end)

    def _note_end(self) -> None:
        self._gone.set()
        self._reports.put_nowait(None)
        if not self.ended.done():
            self.ended.set_result(
                NodeFailedError(
                    f"{self._describe_end()}; see its messages above, and make a new LLM"
                )
            )

    def _describe_end(self) -> str:
        return f"the engine process ended with status {self._process.returncode}"
