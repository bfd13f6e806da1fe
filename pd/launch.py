"""Assembles a node from its parts: engine, sockets, transfer, registry, administration."""

from __future__ import annotations

import logging
import secrets
import time
from ipaddress import ip_address
from typing import TYPE_CHECKING

from pd.bootstrap.registry import Registry
from pd.bootstrap.server import make_bootstrap_app
from pd.core.errors import UsageError
from pd.core.node_info import NodeInfo
from pd.decode_node.node import DecodeNode
from pd.engine.engine import Engine
from pd.node.admin import make_admin_app
from pd.node.http_server import Deferred, HttpServers, bind
from pd.prefill_node.node import PrefillNode
from pd.transfer.factory import make_transfer_manager
from pd.unified_node.node import UnifiedNode

if TYPE_CHECKING:
    from pd.core.config import NodeConfig
    from pd.node.node import Node
    from pd.transfer.base import TransferManager

logger = logging.getLogger(__name__)


class NodeServer:
    """A node with everything around it.

    Sockets are bound at once, so that a port in use is known before a model is loaded; HTTP answers
    503 until :meth:`start` returns.
    """

    node: Node

    def __init__(self, config: NodeConfig) -> None:
        _check_exposure(config)
        self.config = config
        self.instance_id = secrets.token_hex(8)
        self._admin, self._bootstrap = Deferred(), Deferred()
        self._registry: Registry | None = None
        admin_socket = bind(config.host, config.port)
        apps = [(self._admin, admin_socket)]
        self.url = f"http://{_bracketed(config.public_host)}:{admin_socket.getsockname()[1]}"
        self.bootstrap_url = ""
        if config.role == "prefill":
            socket = bind(config.host, config.bootstrap_port)
            port = socket.getsockname()[1]
            self.bootstrap_url = f"http://{_bracketed(config.public_host)}:{port}"
            apps.append((self._bootstrap, socket))
        self._http = HttpServers(apps)

    def start(self) -> None:
        """Load the model and serve; returns when requests are accepted."""
        self._http.start()
        engine = Engine.build(self.config)
        if self.config.role == "unified":
            self.node = UnifiedNode(self.config, engine, self.instance_id)
        else:
            self.node = self._split_node(engine)
        self.node.bootstrap_url = self.bootstrap_url
        self.node.start()
        if self._registry is not None:
            self._registry.set_ready()
        self._admin.app = make_admin_app(self.node)

    def _split_node(self, engine: Engine) -> Node:
        config = self.config
        transfer = make_transfer_manager(
            config.transfer_backend,
            engine.pool,
            self.instance_id,
            config.host,
            advertise_host=config.advertise_host,
            cluster_key=config.cluster_key,
            fake_script=config.fake_script,
        )
        if config.role == "decode":
            decode = DecodeNode(config, engine, self.instance_id, transfer)
            decode.introduce(self._introduction(decode, transfer))
            return decode
        prefill = PrefillNode(config, engine, self.instance_id, transfer)
        self._registry = Registry(
            self._introduction(prefill, transfer),
            connect=prefill.add_peer,
            on_replaced=lambda old: prefill.lose_peer(old, "a new instance took its place"),
        )
        prefill.registry = self._registry
        self._bootstrap.app = make_bootstrap_app(self._registry, cluster_key=config.cluster_key)
        return prefill

    def _introduction(self, node: Node, transfer: TransferManager) -> NodeInfo:
        return NodeInfo(
            instance_id=self.instance_id,
            role=node.role,
            model_id=node.engine.model_id,
            kv=node.engine.layout,
            endpoint=node.endpoint,
            bootstrap=self.bootstrap_url,
            transfer_backend=transfer.name,
            transfer_address=transfer.address(),
        )

    def drain(self) -> bool:
        """Accept nothing more and wait for what runs; False when the time-out passed first."""
        if self._registry is not None:
            self._registry.set_draining()
        self.node.drain()
        deadline = time.monotonic() + self.config.drain_timeout
        while time.monotonic() < deadline:
            with self.node.lock:
                if self.node.idle:
                    return True
            time.sleep(0.05)
        return False

    def stop(self) -> None:
        """End at once."""
        if hasattr(self, "node"):
            self.node.stop()
        self._http.stop()


def _check_exposure(config: NodeConfig) -> None:
    if config.cluster_key is None and not _is_loopback(config.host):
        raise UsageError(
            f"--host {config.host} can be reached from other hosts; give --cluster-key-file FILE "
            "(openssl rand -hex 32 > FILE, the same file for every process) or use 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
