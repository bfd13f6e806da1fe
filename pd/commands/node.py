"""``pd-launch prefill | decode | unified``."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pd.commands.ready import Ready, announce
from pd.core.config import NodeConfig
from pd.core.errors import UsageError
from pd.core.exit import leave_within
from pd.core.garbage import freeze_objects
from pd.transfer.registry import check_backend

if TYPE_CHECKING:
    import argparse
    from types import FrameType

    from pd.launch import NodeServer

logger = logging.getLogger(__name__)


# Interval in seconds at which a computing thread is asked to let another run. Transfers and
# messages wait for it, and Python's default of 5 ms is as long as a step.
_SWITCH_INTERVAL = 0.0002

# What it takes to close everything, and much more.
_END_SECONDS = 40.0
# Seconds between looks at whether the node is broken.
_LOOK_INTERVAL = 1.0


def config_from(args: argparse.Namespace) -> NodeConfig:
    """The node's configuration; raises UsageError for values that cannot work."""
    settings = dict(vars(args))
    key_file = settings.pop("cluster_key_file")
    settings["role"] = settings.pop("command")
    for name in ("config", "log_level", "cpu_threads"):
        settings.pop(name)
    from pd.models.config import find_checkpoint

    settings["model"] = find_checkpoint(args.model)
    if not args.served_model_name and not Path(args.model).expanduser().is_dir():
        settings["served_model_name"] = str(args.model)  # an id of the Hugging Face cache
    if args.speculative_draft_model is not None:
        settings["speculative_draft_model"] = find_checkpoint(args.speculative_draft_model)
    if key_file is not None:
        from pd.core.cluster_key import load_cluster_key

        settings["cluster_key"] = load_cluster_key(key_file)
    settings["advertise_host"] = args.advertise_host or reachable_address(args.host)
    return NodeConfig(**settings)


def reachable_address(host: str) -> str:
    """Address at which others reach a node that listens on ``host``: for a wildcard, the
    address from which this machine reaches the world (nothing is sent to find out)."""
    import socket
    from ipaddress import ip_address

    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    # Addresses set aside for documentation (RFC 5737, RFC 3849), which no host has.
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


def check_early(config: NodeConfig) -> None:
    """Refuse what can be known to fail without importing torch, which takes seconds."""
    from pd.models.config import ModelConfig, draft_config
    from pd.models.eagle_config import EagleConfig
    from pd.models.generation_config import sampling_defaults

    model = ModelConfig.from_pretrained(config.model)
    sampling_defaults(config.model, config.generation_config)
    if config.context_length is not None and config.context_length > model.context_length:
        raise UsageError(
            f"--context-length {config.context_length} exceeds the model's {model.context_length}"
        )
    model.divided(config.tp_size)
    if config.speculative_draft_model is not None:
        if config.speculative_algorithm == "eagle":
            EagleConfig.from_pretrained(config.speculative_draft_model, model)
        else:
            draft_config(config.speculative_draft_model, model)
    if config.hands_off:
        check_backend(config.transfer_backend, config.fake_script, config.device, config.tp_size)


def limit_threads(role: str, threads: int | None) -> None:
    """Set how the threads of a node's process share the processors and the interpreter. Processes
    that share cores slow each other down when torch uses all of them in each."""
    import torch

    sys.setswitchinterval(_SWITCH_INTERVAL)
    available = getattr(os, "sched_getaffinity", None)
    cores = len(available(0)) if available else os.cpu_count() or 1
    torch.set_num_threads(threads or (cores if role == "unified" else max(1, cores // 2)))


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; the first drains, the second ends at once."""
    if args.cpu_threads is not None and args.cpu_threads < 1:
        raise UsageError(f"--cpu-threads must be at least 1, not {args.cpu_threads}")
    config = config_from(args)
    check_early(config)
    from pd.core.connections import raise_file_limit
    from pd.launch import NodeServer

    raise_file_limit()
    server = NodeServer(config)
    # Unlike a semaphore, this queue may be filled by a handler that interrupts its reader.
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
        announce(Ready(config.role, server.url, server.instance_id))
        if not _wait(server, signals):
            logger.critical("nothing can be computed any more: this process ends, start it again")
            return 1
        _drain(server, signals)
    finally:
        leave_within(_END_SECONDS, 1)
        server.stop()
    return 0


def _wait(server: NodeServer, signals: queue.SimpleQueue[int]) -> bool:
    """Wait for a signal. Returns False when the node is broken instead, and its clients have been
    answered."""
    while True:
        with contextlib.suppress(queue.Empty):
            signals.get(timeout=_LOOK_INTERVAL)
            return True
        if server.node.broken:
            time.sleep(_LOOK_INTERVAL)
            return False


def _drain(server: NodeServer, signals: queue.SimpleQueue[int]) -> None:
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
