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
from typing import TYPE_CHECKING

from pd.commands import parser as types
from pd.commands.ready import Ready, announce
from pd.core import config as choices
from pd.core.config import NodeConfig
from pd.core.errors import UsageError
from pd.core.exit import leave_within
from pd.transfer.registry import backend_names, check_backend

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from types import FrameType

    from pd.launch import NodeServer

logger = logging.getLogger(__name__)

ROLES = {
    "prefill": "compute prompts and hand their KV cache to decode nodes",
    "decode": "receive KV caches and generate tokens",
    "unified": "do both on one node (colocated baseline)",
}
_PORTS = {"prefill": 30000, "decode": 30100, "unified": 30200}

# A thread that computes is asked this often, in seconds, to let another run. Transfers and messages
# wait for it, and Python's default of 5 ms is as long as a step.
_SWITCH_INTERVAL = 0.0002

# What it takes to close everything, and much more.
_END_SECONDS = 40.0
# Seconds between looks at whether the node is broken.
_LOOK_INTERVAL = 1.0

_EXAMPLES = """\
examples:
  pd-launch {role} --model ~/models/Qwen3-0.6B
  pd-launch {role} --model ~/models/Qwen3-0.6B --port 0 --kv-cache-tokens 65536
  pd-launch {role} --config {config} --log-level debug

For other hosts to reach it, every process needs the same key:
  openssl rand -hex 32 > cluster.key
  pd-launch {role} --model DIR --host 0.0.0.0 --advertise-host 10.0.0.5 \\
      --cluster-key-file cluster.key

When it serves it prints {{"event": "ready", "role": "{role}", "url": …}} on standard output.
SIGTERM (or Ctrl-C) drains it: what runs is finished. A second one ends it at once.
"""


def add_arguments(parser: argparse.ArgumentParser, role: str) -> None:
    """Flags of one role; names and defaults are the public contract's."""
    parser.usage = "%(prog)s --model DIR [flags]"
    directory = "unified" if role == "unified" else "1p1d"
    parser.epilog = _EXAMPLES.format(role=role, config=f"configs/{directory}/{role}.yaml")
    _add_model(parser)
    _add_network(parser, role)
    _add_memory(parser, role)
    _add_scheduling(parser)
    _add_backends(parser, role)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add(
        "--model",
        required=True,
        metavar="DIR",
        help="directory of a Hugging Face checkpoint, or the id of one in the local cache",
    )
    add(
        "--served-model-name",
        default="",
        metavar="NAME",
        help="name in the API (default: the directory's)",
    )
    add(
        "--device",
        default="auto",
        type=types.device,
        help="auto, cpu, cuda or cuda:N (default: auto, a GPU if there is one)",
    )
    add(
        "--dtype",
        default="auto",
        choices=choices.DTYPES,
        help="default: auto, the checkpoint's on a GPU and float32 on a CPU",
    )
    add(
        "--load-format",
        default="auto",
        choices=choices.LOAD_FORMATS,
        help="dummy: random weights from config.json alone",
    )
    add("--seed", type=int, default=0, help="of dummy weights")
    add(
        "--context-length",
        type=int,
        metavar="N",
        help="limit of prompt and output in tokens (default: the model's)",
    )
    add(
        "--generation-config",
        default="auto",
        choices=choices.GENERATION_CONFIGS,
        help="defaults of sampling for /v1/*: auto, the checkpoint's generation_config.json, or "
        "none of it (default: auto)",
    )
    add(
        "--tp-size",
        type=int,
        default=1,
        metavar="N",
        help="GPUs to shard the model over, a process for each",
    )
    add(
        "--cpu-threads",
        type=int,
        metavar="N",
        help="threads on a CPU (default: the cores, half of them for prefill and decode)",
    )


def _add_network(parser: argparse.ArgumentParser, role: str) -> None:
    add = parser.add_argument_group("network").add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add(
        "--advertise-host",
        default="",
        metavar="HOST",
        help="address that others are told (default: --host, or this machine's if that is 0.0.0.0)",
    )
    add(
        "--port",
        type=types.port,
        default=_PORTS[role],
        help="port of the administration; 0 picks a free one",
    )
    if role == "prefill":
        add(
            "--bootstrap-port",
            type=types.port,
            default=8998,
            metavar="PORT",
            help="port where decode nodes introduce themselves; 0 picks a free one",
        )
    add(
        "--cluster-key-file",
        type=types.path,
        metavar="FILE",
        help="secret that all processes share; needed beyond loopback",
    )
    add(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long SIGTERM waits for running requests",
    )


def _add_memory(parser: argparse.ArgumentParser, role: str) -> None:
    add = parser.add_argument_group("KV cache").add_argument
    add("--page-size", type=int, default=16, metavar="N", help="tokens per page: 1, 2, 4, … 64")
    add("--kv-cache-tokens", type=int, metavar="N", help="size; wins over --mem-fraction")
    add(
        "--mem-fraction",
        type=float,
        default=0.85,
        metavar="F",
        help="share of the device's memory to use (on a CPU at most 4 GiB)",
    )
    add(
        "--eviction-policy",
        default="lru",
        choices=choices.EVICTION_POLICIES,
        help="what leaves the prefix cache first (default: lru)",
    )
    if role != "prefill":
        add(
            "--reserved-decode-tokens",
            type=int,
            default=512,
            metavar="N",
            help="output to keep room for at most, per running request",
        )
        add(
            "--retraction-host-memory",
            type=types.size,
            default="4GiB",
            metavar="SIZE",
            help="host memory for the KV of requests that the pool had no room for",
        )


def _add_scheduling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("scheduling").add_argument
    add("--max-running-requests", type=int, default=256, metavar="N", help="requests in one batch")
    add(
        "--chunked-prefill-size", type=int, default=8192, metavar="N", help="prompt tokens per step"
    )
    add(
        "--schedule-policy",
        default="lpm",
        choices=choices.SCHEDULE_POLICIES,
        help="which prompt is next: longest cached prefix, first come, longest output, densest "
        "branch of the cache, or highest priority (default: lpm)",
    )
    add(
        "--max-overtakes",
        type=int,
        default=64,
        metavar="N",
        help="how often a waiting request may be overtaken before it goes first",
    )


class _TransferBackends:
    """Names of the transfer backends, those of other packages among them.

    Looked up only for a help text and for a name on the command line: every command builds the
    parsers of all, and the look-up reads what is installed.
    """

    def __iter__(self) -> Iterator[str]:
        return iter(("auto", *backend_names()))

    def __contains__(self, name: object) -> bool:
        return name in tuple(self)


def _add_backends(parser: argparse.ArgumentParser, role: str) -> None:
    add = parser.add_argument_group("backends").add_argument
    add(
        "--attention-backend",
        default="auto",
        choices=choices.ATTENTION_BACKENDS,
        help="default: auto, the best there is here",
    )
    add(
        "--overlap-schedule",
        default="auto",
        choices=choices.OVERLAP_SCHEDULES,
        help="plan the next step while one is computed (default: auto, on GPUs)",
    )
    if role != "prefill":
        add(
            "--cuda-graph-batch-sizes",
            type=types.batch_sizes,
            metavar="N,N,…",
            help="decode batches to capture as CUDA graphs; 0 for none "
            "(default: a ladder up to --max-running-requests)",
        )
    add(
        "--transfer-backend",
        default="auto",
        choices=_TransferBackends(),
        metavar="NAME",
        help="how KV travels between two nodes: %(choices)s; auto offers nvlink, nixl and tcp "
        "as far as they work here without a port that asks nobody for the cluster key, and a pair "
        "uses the first that works for both (default: auto)",
    )
    add(
        "--trust-network",
        action="store_true",
        help="none but this deployment's hosts reach this node: auto may offer nixl between hosts, "
        "whose library lets whoever reaches its ports write to any memory of the node",
    )
    add(
        "--fake-script",
        type=types.path,
        metavar="FILE",
        help="what goes wrong with --transfer-backend fake",
    )
    add("--kv-digest", action="store_true", help="verify every transfer's content")


def config_from(args: argparse.Namespace) -> NodeConfig:
    """The node's configuration; raises UsageError for values that cannot work."""
    settings = dict(vars(args))
    key_file = settings.pop("cluster_key_file")
    settings["role"] = settings.pop("command")
    for name in ("config", "log_level", "cpu_threads"):
        settings.pop(name)
    from pd.models.config import find_checkpoint

    settings["model"] = find_checkpoint(args.model)
    if key_file is not None:
        from pd.core.cluster_key import load_cluster_key

        settings["cluster_key"] = load_cluster_key(key_file)
    settings["advertise_host"] = args.advertise_host or reachable_address(args.host)
    return NodeConfig(**settings)


def reachable_address(host: str) -> str:
    """What to tell others who are to reach a node that listens on ``host``: for a wildcard, the
    address from which this machine reaches the world (nothing is sent to find out)."""
    import socket
    from ipaddress import ip_address

    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    # Addresses set aside for documentation (RFC 5737, RFC 3849): far away, and nobody's.
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
    from pd.models.config import ModelConfig
    from pd.models.generation_config import sampling_defaults

    model = ModelConfig.from_pretrained(config.model)
    sampling_defaults(config.model, config.generation_config)
    if config.context_length is not None and config.context_length > model.context_length:
        raise UsageError(
            f"--context-length {config.context_length} exceeds the model's {model.context_length}"
        )
    model.divided(config.tp_size)
    if config.role != "unified":
        check_backend(config.transfer_backend, config.fake_script, config.device, config.tp_size)


def limit_threads(role: str, threads: int | None) -> None:
    """Processes on shared cores strangle each other when each uses all of them."""
    import torch

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
        sys.setswitchinterval(_SWITCH_INTERVAL)
        server.start()
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
    """Until a signal comes, or (False) the node is broken and has said so to those who wait."""
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
