"""`pd-bench engine`: how fast one node computes, measured inside the engine that serves.

A unified node runs in this process, with its scheduler, pool and sockets. Its client is a process
of its own, as a proxy would be, and sends unrelated random prompts. Answers ignore ends of
sequence, and sampling is greedy unless stated otherwise. We empty the cache before each work. Times
are medians.

- `decode:B`: interval between consecutive steps that decode exactly B sequences and no prompt
- `prefill:N`: from a request's arrival at the node until it knows the first token; one request at
  a time, each with a new prompt
- `cached:N`: the same for a prompt that is cached except for its last page
- `offline:RxIxO`: R prompts of I tokens sent at once for O tokens each, from the first send to
  the last token at the client
- `sampled:B`: `decode:B` at temperature 1
- `filters:B`: `sampled:B` with top-k and top-p
- `penalties:B`: `decode:B` with penalties on one of its requests
- `schema:B`: `sampled:B` with each output under a JSON schema
- `schema-bounded:B`: `schema:B` with minimum and maximum lengths of its strings
- `schema-prefill:N`: `prefill:N` under the schema, which is compiled before
- `spec:B:K`: `decode:B` with K tokens drafted for each sequence and step, which needs
  `--speculative-algorithm`; tokens per second are accepted tokens, as many as a trained model
  would accept with `--simulate-acceptance`
- `verify:B:T`: one forward pass and its sampling over T tokens of each of B sequences, alone and
  without drafts, so `verify:B:1` is a plain step
- `mixed:B:N:P`: the same for one token of each of B sequences and N tokens of a prompt, after P
  computed ones

Works under a schema need a model directory with a tokenizer; `benchmarks/large_vocabulary.py` makes
one for a shape. `pd/bench/engine_roofline.py` defines the roofline.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pd.bench.report import Row, add_output, check_output, format_command, write_report
from pd.bench.shapes import NAMES, SHAPES, model_directory
from pd.core.config import NodeConfig
from pd.core.errors import PDError, UsageError
from pd.util.garbage import freeze_objects
from pd.util.logs import configure_logging

if TYPE_CHECKING:
    from pd.bench.engine_roofline import Roofline
    from pd.bench.engine_work import Bench, Measured, Workload
    from pd.launch import NodeServer

DEFAULT_WORK = ("decode:1,8,32,64,128,256", "prefill:1024,8192,32768", "cached:32768")
REFERENCE = Path(__file__).resolve().parents[2] / "benchmarks" / "reference_vllm.json"
# Settings that result files record, because results depend on them.
_SETTINGS = (
    "dtype",
    "page_size",
    "tp_size",
    "ep_size",
    "chunked_prefill_size",
    "max_running_requests",
    "overlap_schedule",
    "cuda_graph_batch_sizes",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_topk",
    "speculative_adaptive",
)
_COLUMNS = (
    f"{'work':24} {'context':>8} {'median ms':>10} {'p90 ms':>10} {'tokens/s':>10} "
    f"{'roofline':>9} {'share':>6} {'vLLM ms':>9}"
)

EXAMPLES = """\
examples:
  pd-bench engine --model llama-3.1-8b --output engine.json
  pd-bench engine --model llama-3.1-8b --work decode:1,64 offline:512x1024x128
  pd-bench engine --model ~/models/Qwen3-0.6B --device cpu --work decode:4 prefill:256 --context 256
  pd-bench engine --model llama-3.1-8b --work decode:64 --profile trace.json
  pd-bench engine --model llama-3.1-8b --work mixed:16:496:8192 --profile trace.json \\
      --profile-work mixed:16:496:8192
  pd-bench engine --model embedded --device cpu --work decode:1 spec:1:4 \\
      --speculative-algorithm draft --speculative-draft-model pd/assets/embedded-draft
  pd-bench engine --model glm-4.7-flash --work decode:1,32 spec:1:1 spec:32:1 spec:1:3 \\
      --speculative-algorithm mtp

All flags of pd-launch unified configure the node; its network flags have no effect here.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a unified node and of the measurement."""
    from pd.commands import node_flags

    node_flags.add_arguments(parser, "unified")
    parser.usage = "%(prog)s --model NAME|DIR [flags]"
    parser.epilog = EXAMPLES
    parser.set_defaults(port=0)
    group = parser.add_argument_group(
        "measurement",
        f"--model also takes a name: {', '.join(NAMES)} (dummy weights except for the last)",
    )
    add = group.add_argument
    add(
        "--work",
        nargs="+",
        action="extend",
        metavar="WORK",
        help="decode:B,… (or sampled, filters, penalties, schema, schema-bounded) prefill:N,… "
        "(or schema-prefill) cached:N,… offline:RxIxO spec:B:K verify:B:T mixed:B:N:P "
        f"(default: {' '.join(DEFAULT_WORK)})",
    )
    add("work_without_flag", nargs="*", type=_refuse_stray, metavar="WORK", help=argparse.SUPPRESS)
    add("--context", type=int, default=1024, help="tokens attended to in decode, on average")
    add("--steps", type=int, default=100, help="decode steps to measure")
    add("--repeats", type=int, default=5, help="timed prompts of each length")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="limit of one work")
    add(
        "--simulate-acceptance",
        type=float,
        metavar="LENGTH",
        help="spec: accept drafts at random, so that a step yields LENGTH tokens per sequence on "
        "average, because dummy weights accept nothing",
    )
    add("--profile", type=Path, metavar="FILE", help="write a trace of some GPU steps to FILE")
    add(
        "--profile-work",
        default="decode:64",
        metavar="WORK",
        help="steps to trace: decode:B (or sampled, filters, penalties, schema), spec:B:K, "
        "verify:B:T or mixed:B:N:P (default: decode:64)",
    )
    add_output(group)


def _refuse_stray(text: str) -> str:
    """Reject a stray argument."""
    hint = f"give works as --work {text}" if ":" in text else "everything is a flag"
    raise argparse.ArgumentTypeError(f"unexpected {text!r}: {hint}")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write. Return 1 if a work failed; we still measure the others.

    ``args`` also has the whole ``command_line``.
    """
    from pd.bench.engine_work import parse_work

    configure_logging(logging.WARNING)
    logging.getLogger("pd").setLevel("INFO")
    config = make_config(args)
    for name in ("context", "steps", "repeats"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} must be at least 1, not {getattr(args, name)}")
    works = parse_work(args.work or list(DEFAULT_WORK), args.context)
    profiled = _parse_profile_work(args)
    check_output(args.output)
    check_output(args.profile, "--profile")
    server, bench = _start_node(args, config)
    try:
        failed = _measure_works(args, works, server, bench)
        if args.profile is not None:
            from pd.bench.engine_profile import profile_steps

            command = format_command(args.command_line)
            shown = profile_steps(bench, profiled, args.profile, command)
            print(f"{args.profile}: {shown}; summarize it with scripts/gpu_idle.py", flush=True)
        return int(failed > 0)
    finally:
        bench.close()
        server.stop()


def make_config(args: argparse.Namespace) -> NodeConfig:
    """Make the node's configuration. Raises UsageError for impossible values."""
    from pd.models.checkpoint import find_checkpoint

    known = {field.name for field in dataclasses.fields(NodeConfig)} & set(vars(args))
    settings = {name: getattr(args, name) for name in known}
    if args.model in SHAPES:
        settings["load_format"] = "dummy"
    settings["model"] = find_checkpoint(model_directory(args.model))
    if args.speculative_draft_model is not None:
        draft = find_checkpoint(model_directory(args.speculative_draft_model))
        settings["speculative_draft_model"] = draft
    return NodeConfig(role="unified", **settings)


def _parse_profile_work(args: argparse.Namespace) -> Workload:
    """Parse ``--profile-work``. Raise UsageError unless the work consists of steps."""
    from pd.bench.engine_work import parse_work

    works = parse_work([args.profile_work], args.context)
    if len(works) != 1 or works[0].kind not in ("decode", "spec", "verify", "mixed"):
        raise UsageError(
            f"--profile-work {args.profile_work}: give decode:B, spec:B:K, verify:B:T or "
            "mixed:B:N:P"
        )
    return works[0]


def _start_node(args: argparse.Namespace, config: NodeConfig) -> tuple[NodeServer, Bench]:
    from pd.bench.engine_profile import load_profiler
    from pd.bench.engine_work import Bench
    from pd.launch import NodeServer, limit_threads

    if args.profile is not None:
        load_profiler()
    limit_threads("unified", args.cpu_threads)
    server = NodeServer(config)
    try:
        server.start()
        freeze_objects()
        bench = Bench(
            server,
            steps=args.steps,
            repeats=args.repeats,
            timeout=args.timeout,
            seed=args.seed,
            acceptance=args.simulate_acceptance,
        )
    except BaseException:
        server.stop()
        raise
    return server, bench


def _measure_works(
    args: argparse.Namespace, works: list[Workload], server: NodeServer, bench: Bench
) -> int:
    """Return how many works failed."""
    roofline = _find_roofline(server)
    reference = _load_reference(args, server)
    rows: list[Row] = []
    failed = 0
    print(_COLUMNS, flush=True)
    for work in works:
        try:
            measured = bench.measure(work)
        except PDError as error:
            failed += 1
            print(f"pd-bench engine: {work}: {error.message}", file=sys.stderr, flush=True)
            continue
        batch = server.node.core.config.max_running_requests
        least = None if roofline is None else _least_seconds(roofline, work, measured, batch)
        row: Row = {
            "work": str(work),
            "context": None if measured.context is None else round(measured.context),
            "repeats": len(measured.seconds),
            "median_ms": round(measured.median * 1e3, 3),
            "p90_ms": round(measured.p90 * 1e3, 3),
            "tokens_per_s": round(measured.num_tokens / measured.median, 1),
            "acceptance_length": measured.acceptance,
            "roofline_ms": None if least is None else round(least * 1e3, 3),
            "share_of_roofline_rate": None if least is None else least / measured.median,
            "vllm_ms": reference.get(str(work)),
        }
        rows.append(row)
        print(_format_row(row), flush=True)
        if args.output is not None:
            _write_results(args, rows, server)
    return failed


def _least_seconds(
    roofline: Roofline, work: Workload, measured: Measured, batch: int
) -> float | None:
    """Return the roofline's seconds; None for works outside its model, such as drafts."""
    if work.kind == "decode":
        assert measured.context is not None
        return roofline.decode_seconds(work.count, measured.context)
    if work.kind in ("spec", "verify", "mixed"):
        return None
    if work.kind == "offline":
        return roofline.offline_seconds(work.count, work.num_in, work.num_out, batch)
    return roofline.prefill_seconds(work.num_in, measured.cached)


def _find_roofline(server: NodeServer) -> Roofline | None:
    """Return the device's roofline; None if we have not measured its ceilings."""
    from pd.bench.engine_roofline import CEILINGS, Roofline

    engine = server.node.engine
    pool = engine.pool
    if pool.device.type != "cuda":
        return None
    import torch

    ceiling = CEILINGS.get(torch.cuda.get_device_name(pool.device))
    if ceiling is None or pool.dtype.itemsize != 2:
        return None
    gpus = server.node.core.config.tp_size
    kv_width = pool.get_keys(0).element_size()
    return Roofline(engine.model_config, pool.dtype.itemsize, ceiling, gpus, kv_width)


def _load_reference(args: argparse.Namespace, server: NodeServer) -> dict[str, float]:
    """Return vLLM's milliseconds by work, if it was measured with these settings."""
    device = server.node.engine.pool.device
    if not REFERENCE.is_file() or device.type != "cuda":
        return {}
    import torch

    known = json.loads(REFERENCE.read_text())
    here = {
        "model": args.model,
        "gpu": torch.cuda.get_device_name(device),
        "dtype": server.node.engine.layout.model.dtype,
        "tp_size": server.node.core.config.tp_size,
        "context": args.context,
    }
    is_comparable = all(known[name] == value for name, value in here.items())
    return known["milliseconds"] if is_comparable else {}


def _format_row(row: Row) -> str:
    def cell(name: str, width: int, form: str) -> str:
        value = row[name]
        return f"{'' if value is None else format(value, form):>{width}}"

    return (
        f"{row['work']:24} {cell('context', 8, 'd')} {cell('median_ms', 10, '.3f')} "
        f"{cell('p90_ms', 10, '.3f')} {cell('tokens_per_s', 10, '.1f')} "
        f"{cell('roofline_ms', 9, '.2f')} {cell('share_of_roofline_rate', 6, '.0%')} "
        f"{cell('vllm_ms', 9, '.2f')}"
    )


def _write_results(args: argparse.Namespace, rows: list[Row], server: NodeServer) -> None:
    node, config = server.node, server.node.core.config
    settings: Row = {name: getattr(config, name) for name in _SETTINGS if hasattr(config, name)}
    settings |= {
        "model": args.model,
        "dtype": node.engine.layout.model.dtype,
        "attention_backend": node.engine.attention_backend,
        "kv_cache_tokens": node.core.memory.num_pages * config.page_size,
        "steps": args.steps,
    }
    command = format_command(args.command_line)
    write_report(args.output, command, rows, measured=["pd"], settings=settings)
