"""``pd-launch prefill | decode | unified``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from pd.core.config import NodeConfig
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from types import FrameType

logger = logging.getLogger(__name__)

ROLES = {
    "prefill": "compute prompts and hand their KV cache to decode nodes",
    "decode": "receive KV caches and generate tokens",
    "unified": "do both on one node (colocated baseline)",
}
_PORTS = {"prefill": 30000, "decode": 30100, "unified": 30200}


def add_arguments(parser: argparse.ArgumentParser, role: str) -> None:
    """Flags of one role; names and defaults are the public contract's."""
    add = parser.add_argument
    add("--model", required=True, help="directory of a Hugging Face checkpoint")
    add("--served-model-name", default="", help="name in the API (default: the directory's)")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--advertise-host", default="", help="address that others are told (default: --host)")
    add("--port", type=_port, default=_PORTS[role], help="administration port; 0 picks a free one")
    if role == "prefill":
        add("--bootstrap-port", type=_port, default=8998, help="port of the registry; 0: any")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    add("--seed", type=int, default=0, help="of dummy weights")
    add("--tp-size", type=int, default=1, help="GPUs to shard the model over")
    add("--page-size", type=int, default=16, help="tokens per KV page: 1, 2, 4, … 64")
    add("--kv-cache-tokens", type=int, help="size of the KV cache; wins over --mem-fraction")
    add("--mem-fraction", type=float, default=0.85, help="share of the memory to use")
    add("--context-length", type=int, help="limit of prompt and output (default: the model's)")
    add("--max-running-requests", type=int, default=256, help="requests in one batch")
    add("--chunked-prefill-size", type=int, default=8192, help="prompt tokens per step")
    add("--schedule-policy", default="lpm", help="lpm, fcfs, lof, dfs-weight or priority")
    add("--max-overtakes", type=int, default=64, help="how often a request may be overtaken")
    add("--eviction-policy", default="lru", help="lru, lfu, fifo, slru or priority")
    add("--attention-backend", default="auto", help="auto, torch, triton or flashinfer")
    add("--transfer-backend", default="auto", help="auto, tcp, nixl, mooncake, nvlink or fake")
    add("--fake-script", type=Path, help="what goes wrong with --transfer-backend fake")
    add("--kv-digest", action="store_true", help="verify every transfer's content")
    add("--cluster-key-file", type=Path, help="shared secret; needed beyond loopback")
    add("--cpu-threads", type=int, help="threads of a CPU node (default: cores, split nodes half)")
    add("--drain-timeout", type=float, default=30.0, help="seconds that SIGTERM waits for requests")
    if role != "prefill":
        add("--reserved-decode-tokens", type=int, default=512, help="output to reserve for at most")
        add("--retraction-host-memory", type=_bytes, default="4GiB", help="for retracted requests")


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"a port is 0 to 65535, not {text}")
    return int(text)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|K|M|G|T)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"a size is a number of bytes or like 512MiB, not {text}")
    power = ["", "K", "M", "G", "T"].index(found[2].upper())
    return int(float(found[1]) * 1024**power)


def config_from(args: argparse.Namespace) -> NodeConfig:
    """The node's configuration; raises UsageError for values that cannot work."""
    settings = dict(vars(args))
    key_file = settings.pop("cluster_key_file")
    settings["role"] = settings.pop("command")
    for name in ("config", "log_level", "cpu_threads"):
        settings.pop(name)
    settings["model"] = find_model(args.model)
    if key_file is not None:
        from pd.core.cluster_key import load_cluster_key

        settings["cluster_key"] = load_cluster_key(key_file)
    return NodeConfig(**settings)


def find_model(name: str) -> Path:
    """The checkpoint's directory; an id is looked up in the local Hugging Face cache."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"--model {name} has no config.json; give a checkpoint's directory")
        return path
    from pd.models.config import find_checkpoint

    return find_checkpoint(name)


def limit_threads(role: str, threads: int | None) -> None:
    """Processes on shared cores strangle each other when each uses all of them."""
    import torch

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads or (cores if role == "unified" else max(1, cores // 2)))


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; the first drains, the second ends at once."""
    if args.cpu_threads is not None and args.cpu_threads < 1:
        raise UsageError(f"--cpu-threads must be at least 1, not {args.cpu_threads}")
    config = config_from(args)
    from pd.launch import NodeServer

    limit_threads(config.role, args.cpu_threads)
    server = NodeServer(config)
    asked = threading.Semaphore(0)

    def on_signal(number: int, frame: FrameType | None) -> None:
        asked.release()

    try:
        server.start()
        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)
        logger.info("%s node %s listens on %s", config.role, server.instance_id, server.url)
        ready = {
            "event": "ready",
            "role": config.role,
            "url": server.url,
            "instance_id": server.instance_id,
        }
        print(json.dumps(ready), flush=True)
        asked.acquire()
        _drain(server, asked)
    finally:
        server.stop()
    return 0


def _drain(server: object, asked: threading.Semaphore) -> None:
    from pd.launch import NodeServer

    assert isinstance(server, NodeServer)
    logger.info("draining; a second signal ends at once")
    drained = threading.Event()
    worker = threading.Thread(target=lambda: (server.drain(), drained.set()), daemon=True)
    worker.start()
    while not drained.wait(0.05):
        if asked.acquire(blocking=False):
            logger.warning("ended while requests were running")
            break
    sys.stdout.flush()
