"""An engine and the proxy in front of it, both of this program."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

from pd.core.errors import SetupError
from pd.offline.engine_process import EngineProcess
from pd.offline.transport import AppTransport
from pd.proxy.config import ProxyConfig
from pd.proxy.server import Proxy

if TYPE_CHECKING:
    from pd.offline.settings import OfflineSettings

# The name of the engine for the proxy.
_URL = "http://engine"
_SOCKET = "engine.sock"
# The engine serves already, so this covers the first heartbeat and loading the tokenizer.
_READY_SECONDS = 60.0
# The length of a Unix socket's path is limited (sun_path).
_MAX_PATH_BYTES = 107
# There is one client, which waits for all of its requests.
_MAX_QUEUE = 1 << 30


class LocalDeployment:
    """Make it with :meth:`start`. Everything runs on one event loop.

    Attributes:
        transport: takes requests.
        engine: the process that computes.
    """

    def __init__(self, engine: EngineProcess, directory: str) -> None:
        self.engine = engine
        self.transport: AppTransport
        self._directory = directory
        self._proxy: Proxy | None = None

    @classmethod
    async def start(cls, settings: OfflineSettings) -> LocalDeployment:
        """Load the model. Raises UsageError or SetupError if that is not possible."""
        directory = _make_directory()
        config = dataclasses.replace(
            settings.node, message_endpoint=f"ipc://{os.path.join(directory, _SOCKET)}"
        )
        deployment = cls(EngineProcess(config, settings.cpu_threads, settings.log_level), directory)
        try:
            await deployment._connect(settings)
        except BaseException:
            deployment.engine.kill()
            await asyncio.shield(deployment.stop())
            raise
        return deployment

    async def stop(self) -> None:
        """End requests that are left, the proxy and the engine."""
        try:
            if self._proxy is not None:
                await self._proxy.stop()
        finally:
            try:
                await self.engine.stop()
            finally:
                shutil.rmtree(self._directory, ignore_errors=True)

    async def _connect(self, settings: OfflineSettings) -> None:
        await self.engine.wait_started()
        proxy = Proxy(ProxyConfig(max_queue=_MAX_QUEUE, **settings.proxy))
        app = await proxy.start_without_port("unified", _URL, self.engine)
        self._proxy = proxy
        self.transport = AppTransport(app, self.engine.ended)
        ready = asyncio.ensure_future(proxy.wait_ready(_READY_SECONDS))
        waits: list[asyncio.Future[Any]] = [ready, self.engine.ended]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            raise SetupError(self.engine.ended.result().message)
        if not ready.result():
            raise SetupError(f"the engine took no requests within {_READY_SECONDS:g} s")


def _make_directory() -> str:
    """Make a directory that only this user can enter, with a path that is short enough."""
    for parent in (None, "/tmp"):
        directory = tempfile.mkdtemp(prefix="pd-", dir=parent)
        if len(os.path.join(directory, _SOCKET).encode()) <= _MAX_PATH_BYTES:
            return directory
        os.rmdir(directory)
    raise SetupError(f"{directory}: too long for a Unix socket; set TMPDIR to a shorter directory")
