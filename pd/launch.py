"""Runs a node as a process: opens sockets, loads the model, serves until it drains and stops."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pd.bootstrap.server import make_bootstrap_app
from pd.core.addresses import format_host, is_loopback
from pd.core.errors import UsageError
from pd.net.http_server import DeferredApp, HttpServers, open_listener
from pd.node.admin import make_admin_app
from pd.node.kv_events.publisher import make_publisher
from pd.transfer.registry import check_backend
from pd.util.descriptors import CUDA_FILES, NODE_PEERS, count_spare_files

if TYPE_CHECKING:
    import socket

    from pd.bootstrap.registry import Registry
    from pd.core.config import NodeConfig
    from pd.node.node import Node

logger = logging.getLogger(__name__)

# A computing thread lets others run after so many seconds. Transfers and messages wait for it, and
# Python's default of 5 ms is as long as a step.
_SWITCH_INTERVAL = 0.0002


def check_early(config: NodeConfig) -> None:
    """Reject impossible configurations before we spend seconds on importing torch."""
    from pd.models.config_reader import read_draft_config, read_model_config
    from pd.models.eagle_config import EagleConfig
    from pd.models.generation_config import read_sampling_defaults
    from pd.models.mtp_config import MtpConfig

    model = read_model_config(config.model)
    read_sampling_defaults(config.model, config.generation_config)
    if config.context_length is not None and config.context_length > model.context_length:
        raise UsageError(
            f"--context-length {config.context_length} exceeds the model's {model.context_length}"
        )
    model.split_by_ranks(config.tp_size, config.ep_size)
    if config.speculative_algorithm == "mtp":
        MtpConfig.of_target(config.model, model)
    if config.speculative_draft_model is not None:
        if config.speculative_algorithm == "eagle":
            EagleConfig.from_pretrained(config.speculative_draft_model, model)
        else:
            read_draft_config(config.speculative_draft_model, model)
    if config.hands_off:
        check_backend(config.transfer_backend, config.fake_script, config.device, config.tp_size)


def limit_threads(role: str, threads: int | None) -> None:
    """Limit the processors and the interpreter time of a node's threads.

    Torch would use all cores in each process, so processes on the same cores would slow each other
    down.
    """
    import torch

    sys.setswitchinterval(_SWITCH_INTERVAL)
    available = getattr(os, "sched_getaffinity", None)
    cores = len(available(0)) if available else os.cpu_count() or 1
    torch.set_num_threads(threads or (cores if role == "unified" else max(1, cores // 2)))


class NodeServer:
    """A node with everything around it.

    It binds its sockets at once, so we learn of a port in use before torch is imported and a model
    loaded. HTTP answers 503 until :meth:`start` returns.

    Raises:
        UsageError: the node would be open to other hosts without a cluster key.
        SetupError: a port is in use, or the process may open too few files.
    """

    node: Node

    def __init__(self, config: NodeConfig) -> None:
        _check_exposure(config)
        has_gpu = config.device != "cpu" and Path("/dev/nvidiactl").exists()
        count_spare_files(
            f"a {config.role} node", NODE_PEERS, CUDA_FILES * config.tp_size * has_gpu
        )
        self.config = config
        self.instance_id = secrets.token_hex(8)
        self._admin, self._bootstrap = DeferredApp(), DeferredApp()
        self._registry: Registry | None = None
        admin_socket = open_listener(config.host, config.port)
        apps = [(self._admin, admin_socket)]
        self.url = self._make_url(admin_socket)
        self.bootstrap_url = ""
        if config.hands_off and config.computes_prompts:
            try:
                bootstrap_socket = open_listener(
                    config.host, config.bootstrap_port, "--bootstrap-port"
                )
            except BaseException:
                admin_socket.close()
                raise
            self.bootstrap_url = self._make_url(bootstrap_socket)
            apps.append((self._bootstrap, bootstrap_socket))
        self._http = HttpServers(apps)
        try:
            self._publisher = make_publisher(config)
        except BaseException:
            self._http.stop()
            raise

    def _make_url(self, bound: socket.socket) -> str:
        host = self.config.public_host
        return f"http://{format_host(host)}:{bound.getsockname()[1]}"

    def start(self) -> None:
        """Load the model and serve. Returns when the node accepts requests."""
        self._http.start()
        from pd.assembly import assemble_node

        self.node, self._registry = assemble_node(self.config, self.instance_id, self.bootstrap_url)
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
        """Reject new requests, let proxies move running ones to other nodes if there are any, and
        wait for the rest. Return False after the timeout."""
        self.node.drain(to_end=True, migrate=True)
        deadline = time.monotonic() + self.config.drain_timeout
        drained = self._has_finished()
        while not drained and time.monotonic() < deadline:
            time.sleep(0.05)
            drained = self._has_finished()
        # The registry closes last, because decode nodes of accepted requests may still shake hands.
        if self._registry is not None:
            self._registry.set_draining()
        if not drained:
            left, limit = len(self.node.requests), self.config.drain_timeout
            logger.warning("%d requests did not finish within --drain-timeout %g s", left, limit)
        return drained

    def _has_finished(self) -> bool:
        with self.node.core.events.lock:
            return self.node.finished

    def stop(self) -> None:
        """Stop at once."""
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
