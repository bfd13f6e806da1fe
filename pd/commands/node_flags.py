"""Flags of ``pd-launch prefill | decode | unified``. Their defaults are those of NodeConfig."""

from __future__ import annotations

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
# A program that makes a NodeConfig has a free port by default; a command has a known one.
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

When it serves it prints {{"event": "ready", "role": "{role}", "url": …}} on standard output.
SIGTERM (or Ctrl-C) drains it: what runs is finished. A second one ends it at once.
"""


def add_arguments(parser: argparse.ArgumentParser, role: str) -> None:
    """Add the flags of one role, whose names and defaults are the public contract's."""
    parser.usage = "%(prog)s --model DIR [flags]"
    directory = "unified" if role == "unified" else "1p1d"
    parser.epilog = _EXAMPLES.format(role=role, config=f"configs/{directory}/{role}.yaml")
    flags = ConfigFlags(parser, NodeConfig)
    _add_model(flags)
    _add_computing(flags)
    _add_network(flags, role)
    _add_memory(flags)
    _add_scheduling(flags)
    _add_grammars(flags)
    _add_backends(flags)
    _add_speculation(flags)
    _add_transfer(flags)


def _add_model(flags: ConfigFlags) -> None:
    flags.start_group("model")
    flags.add(
        "--model",
        "directory of a Hugging Face checkpoint, or the id of one in the local cache",
        required=True,
        metavar="DIR",
    )
    flags.add(
        "--served-model-name",
        "name in the API (default: the directory's, or the Hugging Face id)",
        metavar="NAME",
    )
    flags.add(
        "--dtype",
        "default: %(default)s, the checkpoint's on a GPU and float32 on a CPU",
        choices=choices.DTYPES,
    )
    flags.add(
        "--load-format",
        "dummy: random weights from config.json alone",
        choices=choices.LOAD_FORMATS,
    )
    flags.add("--seed", "seed of dummy weights", type=int)
    flags.add(
        "--context-length",
        "limit of prompt and output in tokens (default: the model's)",
        type=int,
        metavar="N",
    )
    flags.add(
        "--generation-config",
        "defaults of sampling for /v1/*: auto, the checkpoint's generation_config.json, or none of "
        "it (default: %(default)s)",
        choices=choices.GENERATION_CONFIGS,
    )


def _add_computing(flags: ConfigFlags) -> None:
    flags.start_group("devices")
    flags.add(
        "--device",
        "auto, cpu, cuda or cuda:N (default: %(default)s, a GPU if there is one)",
        type=types.device,
    )
    flags.add(
        "--tp-size", "GPUs to shard the model over, a process for each", type=int, metavar="N"
    )
    flags.add(
        "--cpu-threads",
        "threads on a CPU (default: the cores, half of them for prefill and decode)",
        type=int,
        metavar="N",
    )


def _add_network(flags: ConfigFlags, role: str) -> None:
    flags.start_group("network")
    flags.add("--host", "address to listen on")
    flags.add(
        "--advertise-host",
        "address that others are told (default: --host, or this machine's if that is 0.0.0.0)",
        metavar="HOST",
    )
    flags.add(
        "--port",
        "port of the administration; 0 picks a free one",
        type=types.port,
        default=_PORTS[role],
    )
    where = "port where nodes introduce themselves that receive KV; 0 picks a free one"
    flags.add(
        "--bootstrap-port",
        where if role == "prefill" else f"with --elastic auto: {where}",
        type=types.port,
        metavar="PORT",
    )
    flags.add(
        "--kv-events-config",
        "publish what enters and leaves the prefix cache, for routers that read vLLM's KV events: "
        '\'{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}\' '
        "(default: nothing is published)",
        type=types.kv_events_config,
        metavar="JSON",
    )
    flags.add(
        "--cluster-key-file",
        "secret that all processes share; needed beyond loopback",
        type=types.path,
        metavar="FILE",
    )
    flags.add(
        "--drain-timeout",
        "how long SIGTERM waits for running requests",
        type=float,
        metavar="SECONDS",
    )


def _add_memory(flags: ConfigFlags) -> None:
    flags.start_group("KV cache")
    flags.add("--page-size", "tokens per page: 1, 2, 4, … 64", type=int, metavar="N")
    flags.add("--kv-cache-tokens", "size; wins over --mem-fraction", type=int, metavar="N")
    flags.add(
        "--mem-fraction",
        "share of the device's memory to use (on a CPU at most 4 GiB)",
        type=float,
        metavar="F",
    )
    flags.add(
        "--eviction-policy",
        "what leaves the prefix cache first",
        choices=choices.EVICTION_POLICIES,
    )
    flags.add(
        "--reserved-decode-tokens",
        "output to keep room for at most, per running request",
        type=int,
        metavar="N",
    )
    flags.add(
        "--retraction-host-memory",
        "host memory for the KV of requests that the pool had no room for",
        type=types.size,
        metavar="SIZE",
    )


def _add_scheduling(flags: ConfigFlags) -> None:
    flags.start_group("scheduling")
    flags.add(
        "--elastic",
        "auto: the node can compute prompts and generate tokens, whatever its role, and proxies "
        "decide for each request; off: it does what its role says (default: %(default)s)",
        choices=choices.ELASTIC,
    )
    flags.add("--max-running-requests", "requests in one batch", type=int, metavar="N")
    flags.add("--chunked-prefill-size", "prompt tokens per step", type=int, metavar="N")
    flags.add(
        "--schedule-policy",
        "which prompt is next: longest cached prefix, first come, longest output, densest branch "
        "of the cache, or highest priority",
        choices=choices.SCHEDULE_POLICIES,
    )
    flags.add(
        "--max-overtakes",
        "how often a waiting request may be overtaken before it goes first",
        type=int,
        metavar="N",
    )


def _add_grammars(flags: ConfigFlags) -> None:
    flags.start_group("structured output")
    flags.add(
        "--grammar-backend",
        "what constrains output to schemas and grammars; none refuses such requests",
        choices=choices.GRAMMAR_BACKENDS,
    )
    flags.add(
        "--grammar-cpu-seconds",
        "processor time that compiling one grammar may take",
        type=float,
        metavar="SECONDS",
    )
    flags.add(
        "--grammar-memory",
        "memory that compiling one grammar may take",
        type=types.size,
        metavar="SIZE",
    )
    flags.add(
        "--grammar-cache",
        "memory for compiled grammars that no request uses",
        type=types.size,
        metavar="SIZE",
    )
    flags.add(
        "--grammar-jump-forward",
        "write text that a grammar forces in one step, as the tokenizer would; outputs under a "
        "grammar may have other tokens than without",
    )


def _add_backends(flags: ConfigFlags) -> None:
    flags.start_group("backends")
    flags.add(
        "--attention-backend",
        "default: %(default)s, the best that works here",
        choices=choices.ATTENTION_BACKENDS,
    )
    flags.add(
        "--overlap-schedule",
        "plan the next step while one is computed (default: %(default)s, on GPUs)",
        choices=choices.OVERLAP_SCHEDULES,
    )
    flags.add(
        "--cuda-graph-batch-sizes",
        "decode batches to capture as CUDA graphs; 0 for none "
        "(default: a ladder up to --max-running-requests)",
        type=types.batch_sizes,
        metavar="N,N,…",
    )


def _add_speculation(flags: ConfigFlags) -> None:
    flags.start_group("speculative decoding")
    flags.add(
        "--speculative-algorithm",
        "how tokens are drafted for the model to verify, which leaves the output the same; ngram: "
        "by what followed the last tokens earlier in the same request; draft: by a smaller model; "
        "eagle: by an EAGLE head, also on the prefill nodes",
        choices=choices.SPECULATIVE_ALGORITHMS,
    )
    flags.add(
        "--speculative-draft-model",
        "the smaller model of --speculative-algorithm draft, of the same vocabulary, or the EAGLE "
        "head of --speculative-algorithm eagle (EAGLE-1, 2 or 3)",
        metavar="DIR",
    )
    flags.add(
        "--speculative-num-draft-tokens",
        "tokens drafted for each sequence and step, at most",
        type=int,
        metavar="N",
    )
    flags.add(
        "--speculative-topk",
        "guesses at one place, at most: above 1 an EAGLE head drafts trees of "
        "--speculative-num-draft-tokens tokens, else chains",
        type=int,
        metavar="K",
    )
    flags.add(
        "--speculative-adaptive",
        "draft as many tokens as pay, by each sequence's acceptance and the time of a step, which "
        "is measured at the start",
        choices=choices.SPECULATIVE_ADAPTIVE,
    )
    flags.add(
        "--speculative-ngram-cache",
        "ngram also looks in what this node computed for others with the same cache_salt "
        "(default: %(default)s)",
        choices=choices.SPECULATIVE_NGRAM_CACHES,
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


def _add_transfer(flags: ConfigFlags) -> None:
    flags.start_group("transfer of KV")
    flags.add(
        "--transfer-backend",
        "how KV travels between two nodes: %(choices)s; auto offers nvlink, nixl and tcp as far as "
        "they work here without a port that asks nobody for the cluster key, and a pair uses the "
        "first that works for both",
        choices=_TransferBackends(),
        metavar="NAME",
    )
    flags.add(
        "--trust-network",
        "none but this deployment's hosts reach this node: auto may offer nixl between hosts, "
        "whose library lets whoever reaches its ports write to any memory of the node",
    )
    flags.add(
        "--fake-script",
        "what goes wrong with --transfer-backend fake",
        type=types.path,
        metavar="FILE",
    )
    flags.add("--kv-digest", "verify every transfer's content")
