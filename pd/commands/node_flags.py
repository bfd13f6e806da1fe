"""Flags of ``pd-launch prefill | decode | unified``. Their defaults are those of NodeConfig."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pd.commands import parser as types
from pd.commands.flags import ConfigFlags
from pd.core import config as choices
from pd.core.config import NodeConfig
from pd.transfer.registry import backend_names

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

ROLES = {
    "prefill": "compute prompts and hand their KV cache to decode nodes",
    "decode": "receive KV caches and generate tokens",
    "unified": "do both on one node (colocated baseline)",
}
# In a program a NodeConfig picks a free port by default; a command has a fixed one.
_PORTS = {"prefill": 30000, "decode": 30100, "unified": 30200}

_EXAMPLES = """\
examples:
  pd-launch {role} --model ~/models/Qwen3-0.6B
  pd-launch {role} --model ~/models/Qwen3-0.6B --port 0 --kv-cache-tokens 65536
  pd-launch {role} --config {config} --log-level debug

For other hosts to reach it, every process needs the same key:
  openssl rand -hex 32 > cluster.key
  pd-launch {role} --model DIR --host 0.0.0.0 --advertise-host 10.0.0.5 \\
      --cluster-key-file cluster.key

When it serves, it prints {{"event": "ready", "role": "{role}", "url": …}} on standard output.
SIGTERM (or Ctrl-C) drains it: running requests finish. A second one ends it at once.
"""


class _TransferBackends:
    """Names of the transfer backends, including those of other packages.

    We look them up only for a help text and for a name on the command line, because every command
    builds the parsers of all, and the look-up reads all installed packages.
    """

    def __iter__(self) -> Iterator[str]:
        return iter(("auto", *backend_names()))

    def __contains__(self, name: object) -> bool:
        return name in tuple(self)


def add_arguments(parser: argparse.ArgumentParser, role: str) -> None:
    """Add the flags of one role, whose names and defaults are the public contract's."""
    parser.usage = "%(prog)s --model DIR [flags]"
    directory = "unified" if role == "unified" else "1p1d"
    parser.epilog = _EXAMPLES.format(role=role, config=f"configs/{directory}/{role}.yaml")
    flags = ConfigFlags(parser, NodeConfig)
    add, start_group = flags.add_flag, flags.start_group
    add_number = partial(add, type=int, metavar="N")
    add_seconds = partial(add, type=float, metavar="SECONDS")
    add_size = partial(add, type=types.parse_size, metavar="SIZE")
    add_file = partial(add, type=types.parse_path, metavar="FILE")

    start_group("model")
    add(
        "--model",
        "directory of a Hugging Face checkpoint, or the id of one in the local cache",
        required=True,
        metavar="DIR",
    )
    add(
        "--served-model-name",
        "name in the API (default: the directory's, or the Hugging Face id)",
        type=types.parse_model_name,
        metavar="NAME",
    )
    add(
        "--dtype",
        "default: %(default)s, the checkpoint's on a GPU and float32 on a CPU",
        choices=choices.DTYPES,
    )
    add(
        "--load-format",
        "dummy: random weights from config.json alone",
        choices=choices.LOAD_FORMATS,
    )
    add(
        "--quantization",
        "fp8: convert weights to fp8 when they are loaded (default: %(default)s, as the checkpoint "
        "has them)",
        choices=choices.QUANTIZATIONS,
    )
    add("--seed", "seed of dummy weights", type=int)
    add_number("--context-length", "limit of prompt and output in tokens (default: the model's)")
    add(
        "--generation-config",
        "defaults of sampling for /v1/*: auto, the checkpoint's generation_config.json, or none of "
        "it (default: %(default)s)",
        choices=choices.GENERATION_CONFIGS,
    )

    start_group("devices")
    add(
        "--device",
        "auto, cpu, cuda or cuda:N (default: %(default)s, a GPU if there is one)",
        type=types.parse_device,
    )
    add_number("--tp-size", "GPUs to shard the model over, with a process for each")
    add_number("--ep-size", "groups of these GPUs, each with other experts of the model")
    add_number(
        "--cpu-threads",
        "threads on a CPU (default: the cores, half of them for prefill and decode)",
    )

    start_group("network")
    add("--host", "address to listen on", type=types.parse_host)
    add(
        "--advertise-host",
        "address to give to others (default: --host, or this machine's if that is 0.0.0.0)",
        type=types.parse_host,
        metavar="HOST",
    )
    add(
        "--port",
        "port of the administration; 0 picks a free one",
        type=types.parse_port,
        default=_PORTS[role],
    )
    where = "port where nodes that receive KV introduce themselves; 0 picks a free one"
    add(
        "--bootstrap-port",
        where if role == "prefill" else f"with --elastic auto: {where}",
        type=types.parse_port,
        metavar="PORT",
    )
    add(
        "--kv-events-config",
        "publish what enters and leaves the prefix cache, for routers that read vLLM's KV events: "
        '\'{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}\' '
        "(default: nothing is published)",
        type=types.parse_kv_events,
        metavar="JSON",
    )
    add_file("--cluster-key-file", "secret that all processes share; needed beyond loopback")
    add_seconds("--drain-timeout", "how long SIGTERM waits for running requests")

    start_group("KV cache")
    add_number("--page-size", "tokens per page: 1, 2, 4, … 64")
    add(
        "--kv-cache-dtype",
        "fp8_e4m3: keep K and V in fp8, in half the memory of bfloat16 (default: %(default)s, the "
        "model's dtype)",
        choices=choices.KV_CACHE_DTYPES,
    )
    add_number("--kv-cache-tokens", "size; wins over --mem-fraction")
    share = "share of the device's memory to use (on a CPU at most 4 GiB)"
    add("--mem-fraction", share, type=float, metavar="F")
    add(
        "--radix-cache",
        "off: compute every prompt anew, to measure what the prefix cache saves "
        "(default: %(default)s)",
        choices=choices.RADIX_CACHES,
    )
    add(
        "--eviction-policy",
        "which pages leave the prefix cache first",
        choices=choices.EVICTION_POLICIES,
    )
    add_number("--reserved-decode-tokens", "most output to keep room for, per running request")
    add_size(
        "--retraction-host-memory",
        "host memory for the KV of requests that the pool has no room for",
    )

    start_group("scheduling")
    add(
        "--elastic",
        "auto: the node can compute prompts and generate tokens, whatever its role, and proxies "
        "decide for each request; off: it does what its role says (default: %(default)s)",
        choices=choices.ELASTIC,
    )
    add_number("--max-running-requests", "requests in one batch")
    add_number("--chunked-prefill-size", "prompt tokens per step")
    add(
        "--schedule-policy",
        "order of prompts: longest cached prefix, first come, longest output, densest branch "
        "of the cache, highest priority, or none, to compare with",
        choices=choices.SCHEDULE_POLICIES,
    )
    add_number("--max-overtakes", "how often others may overtake a waiting request")

    start_group("structured output")
    add(
        "--grammar-backend",
        "library that constrains output to schemas and grammars; none refuses such requests",
        choices=choices.GRAMMAR_BACKENDS,
    )
    add_seconds("--grammar-cpu-seconds", "processor time that compiling one grammar may take")
    add_size("--grammar-memory", "memory that compiling one grammar may take")
    add_size("--grammar-cache", "memory for compiled grammars that no request uses")
    add(
        "--grammar-jump-forward",
        "write text that a grammar forces in one step, as the tokenizer would; outputs under a "
        "grammar may have other tokens than without",
    )

    start_group("backends")
    add(
        "--attention-backend",
        "default: %(default)s, the best that works here",
        choices=choices.ATTENTION_BACKENDS,
    )
    add(
        "--overlap-schedule",
        "plan the next step while one is computed (default: %(default)s, on GPUs)",
        choices=choices.OVERLAP_SCHEDULES,
    )
    add(
        "--cuda-graph-batch-sizes",
        "decode batches to capture as CUDA graphs; 0 for none "
        "(default: a ladder up to --max-running-requests)",
        type=types.parse_batch_sizes,
        metavar="N,N,…",
    )

    start_group("speculative decoding")
    add(
        "--speculative-algorithm",
        "how to draft tokens for the model to verify, which leaves the output the same; ngram: by "
        "what followed the last tokens earlier in the same request; draft: by a smaller model; "
        "eagle: by an EAGLE head, also on the prefill nodes; mtp: by the layer for drafts in the "
        "model's own checkpoint, also on the prefill nodes",
        choices=choices.SPECULATIVE_ALGORITHMS,
    )
    add(
        "--speculative-draft-model",
        "the smaller model of --speculative-algorithm draft, of the same vocabulary, or the EAGLE "
        "head of --speculative-algorithm eagle (EAGLE-1, 2 or 3)",
        metavar="DIR",
    )
    add_number("--speculative-num-draft-tokens", "most tokens to draft per sequence and step")
    add(
        "--speculative-topk",
        "most guesses at one place: above 1, eagle and mtp draft trees of "
        "--speculative-num-draft-tokens tokens, else chains",
        type=int,
        metavar="K",
    )
    add(
        "--speculative-adaptive",
        "draft as many tokens as pay, by each sequence's acceptance and the time of a step, which "
        "is measured at the start",
        choices=choices.SPECULATIVE_ADAPTIVE,
    )
    add(
        "--speculative-ngram-cache",
        "ngram also looks in what this node computed for others with the same cache_salt "
        "(default: %(default)s)",
        choices=choices.SPECULATIVE_NGRAM_CACHES,
    )

    start_group("transfer of KV")
    add(
        "--transfer-backend",
        "how KV travels between two nodes: %(choices)s; auto offers nvlink, nixl and tcp if they "
        "work here without an unauthenticated port, and a pair uses the first that works for both",
        choices=_TransferBackends(),
        metavar="NAME",
    )
    add(
        "--trust-network",
        "only this deployment's hosts reach this node: auto may offer nixl between hosts, whose "
        "library lets anyone who reaches its ports write to any memory of the node",
    )
    add_file("--fake-script", "script of the faults of --transfer-backend fake")
    add("--kv-digest", "verify every transfer's content")
