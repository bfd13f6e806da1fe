"""A node as a process: sockets first, then the model, then requests until it drains and stops."""

from __future__ import annotations

import logging
import secrets
import time
from typing import TYPE_CHECKING

from pd.bootstrap.server import make_bootstrap_app
from pd.core.addresses import in_url
from pd.core.errors import UsageError
from pd.core.local_requests import is_loopback
from pd.node.admin import make_admin_app
from pd.node.http_server import Deferred, HttpServers, listen
from pd.node.kv_events.publisher import make_publisher

if TYPE_CHECKING:
    import socket

    from pd.bootstrap.registry import Registry
    from pd.core.config import NodeConfig
    from pd.node.node import Node

logger = logging.getLogger(__name__)


class NodeServer:
    """A node with everything around it.

    Sockets are bound at once, so that a port in use is known before torch is imported and a model
    loaded; HTTP answers 503 until :meth:`start` returns.

    Raises:
        UsageError: the node would be open to other hosts without a cluster key.
        SetupError: a port is in use.
    """

    node: Node

    def __init__(self, config: NodeConfig) -> None:
        _check_exposure(config)
        self.config = config
        self.instance_id = secrets.token_hex(8)
        self._admin, self._bootstrap = Deferred(), Deferred()
        self._registry: Registry | None = None
        admin_socket = listen(config.host, config.port)
        apps = [(self._admin, admin_socket)]
        self.url = self._url(admin_socket)
        self.bootstrap_url = ""
        if config.hands_off and config.computes_prompts:
            try:
                bootstrap_socket = listen(config.host, config.bootstrap_port, "--bootstrap-port")
            except BaseException:
                admin_socket.close()
                raise
            self.bootstrap_url = self._url(bootstrap_socket)
            apps.append((self._bootstrap, bootstrap_socket))
        self._http = HttpServers(apps)
        try:
            self._publisher = make_publisher(config)
        except BaseException:
            self._http.stop()
            raise

    def _url(self, bound: socket.socket) -> str:
        host = self.config.public_host
        return f"http://{in_url(host)}:{bound.getsockname()[1]}"

    def start(self) -> None:
        """Load the model and serve; returns when requests are accepted."""
        self._http.start()
        from pd.assembly import assemble

        self.node, self._registry = assemble(self.config, self.instance_id, self.bootstrap_url)
        if self._registry is not None:
            self._bootstrap.app = make_bootstrap_app(
                self._registry, cluster_key=self.config.cluster_key
            )
        if self._publisher is not None:
            self.node.publish_kv_events(self._publisher)
        self.node.start()
        if self._registry is not None:
            self._registry.set_ready()
        self._admin.app = make_admin_app(self.node)

    def drain(self) -> bool:
        """Accept nothing more, have proxies move what runs to other nodes where there are any, and
        wait for the rest; False when the time-out passed first."""
        self.node.drain(to_end=True, migrate=True)
        deadline = time.monotonic() + self.config.drain_timeout
        drained = self._has_finished()
        while not drained and time.monotonic() < deadline:
            time.sleep(0.05)
            drained = self._has_finished()
        # The registry closes last: decode nodes of accepted requests may still have to shake hands.
        if self._registry is not None:
            self._registry.set_draining()
        if not drained:
            left, limit = len(self.node.rooms), self.config.drain_timeout
            logger.warning("%d requests did not finish within --drain-timeout %g s", left, limit)
        return drained

    def _has_finished(self) -> bool:
        with self.node.core.events.lock:
            return self.node.finished

    def stop(self) -> None:
        """End at once."""
        if hasattr(self, "node"):
            self.node.stop()
            self.node.engine.close()
        if self._publisher is not None:
            self._publisher.close()
        self._http.stop()


def _check_exposure(config: NodeConfig) -> None:
    if config.kv_events_config.is_on:
        config.kv_events_config.check_exposure(has_key=config.cluster_key is not None)
    if config.cluster_key is None and not is_loopback(config.host):
        raise UsageError(
            f"--host {config.host} can be reached from other hosts; give --cluster-key-file FILE "
            "(openssl rand -hex 32 > FILE, the same file for every process) or use 127.0.0.1"
        )
