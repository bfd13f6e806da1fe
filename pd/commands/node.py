"""``pd-launch prefill | decode | unified``."""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pd.commands.ready import Ready, announce_ready
from pd.core.config import NodeConfig
from pd.core.errors import UsageError
from pd.util.exit import exit_within
from pd.util.garbage import freeze_objects
from pd.util.libraries import NODE_LIBRARIES, check_libraries

if TYPE_CHECKING:
    import argparse
    from types import FrameType

    from pd.launch import NodeServer

logger = logging.getLogger(__name__)


# Closing everything takes much less.
_END_SECONDS = 40.0
# Seconds between checks whether the node is broken.
_CHECK_INTERVAL = 1.0


def make_config(args: argparse.Namespace) -> NodeConfig:
    """Make the node's configuration. Raises UsageError for impossible values."""
    settings = dict(vars(args))
    key_file = settings.pop("cluster_key_file")
    settings["role"] = settings.pop("command")
    for name in ("config", "log_level", "cpu_threads"):
        settings.pop(name)
    from pd.models.checkpoint import find_checkpoint

    settings["model"] = find_checkpoint(args.model)
    if args.served_model_name is None:
        is_directory = Path(args.model).expanduser().is_dir()
        # Otherwise the model is an id in the Hugging Face cache.
        settings["served_model_name"] = "" if is_directory else str(args.model)
    if args.speculative_draft_model is not None:
        settings["speculative_draft_model"] = find_checkpoint(args.speculative_draft_model)
    if key_file is not None:
        from pd.net.cluster_key import load_cluster_key

        settings["cluster_key"] = load_cluster_key(key_file)
    settings["advertise_host"] = args.advertise_host or reachable_address(args.host)
    return NodeConfig(**settings)


def reachable_address(host: str) -> str:
    """Return the address at which others reach a node that listens on ``host``.

    For a wildcard it is the address of this machine's default route, found without sending
    anything.
    """
    import socket
    from ipaddress import ip_address

    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    # Addresses reserved for documentation (RFC 5737, RFC 3849). No host has them.
    family, far = socket.AF_INET, "192.0.2.1"
    if address.version == 6:
        family, far = socket.AF_INET6, "2001:db8::1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 9))
        except OSError:
            return "127.0.0.1" if address.version == 4 else "::1"
        own: str = probe.getsockname()[0]
        return own


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. The first one drains, the second one ends at once."""
    if args.cpu_threads is not None and args.cpu_threads < 1:
        raise UsageError(f"--cpu-threads must be at least 1, not {args.cpu_threads}")
    check_libraries(NODE_LIBRARIES)
    config = make_config(args)
    from pd.launch import NodeServer, check_early, limit_threads
    from pd.util.descriptors import raise_file_limit

    check_early(config)
    raise_file_limit()
    server = NodeServer(config)
    # Unlike a semaphore, a handler may safely fill this queue while it interrupts the reader.
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()

    def on_signal(number: int, frame: FrameType | None) -> None:
        signals.put(number)

    logger.info("loading %s from %s", config.model_name, config.model.resolve())
    try:
        limit_threads(config.role, args.cpu_threads)
        server.start()
        freeze_objects()
        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)
        logger.info("%s node %s listens on %s", config.role, server.instance_id, server.url)
        announce_ready(Ready(config.role, server.url, server.instance_id))
        if not _wait_for_signal(server, signals):
            logger.critical(
                "the node cannot compute any more, so this process ends: start it again"
            )
            return 1
        _drain_node(server, signals)
    finally:
        exit_within(_END_SECONDS, 1)
        server.stop()
    return 0


def _wait_for_signal(server: NodeServer, signals: queue.SimpleQueue[int]) -> bool:
    """Wait for a signal. Return False if the node is broken instead and has told its clients."""
    while True:
        with contextlib.suppress(queue.Empty):
            signals.get(timeout=_CHECK_INTERVAL)
            return True
        if server.node.broken:
            time.sleep(_CHECK_INTERVAL)
            return False


def _drain_node(server: NodeServer, signals: queue.SimpleQueue[int]) -> None:
    logger.info("draining; a second signal ends at once")
    drained = threading.Event()

    def drain() -> None:
        server.drain()
        drained.set()

    threading.Thread(target=drain, name="drain", daemon=True).start()
    while not drained.wait(0.05):
        if not signals.empty():
            logger.warning("ended while requests were running")
            return
