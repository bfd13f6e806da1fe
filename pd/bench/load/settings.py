"""Settings of a run under load, from the flags of the command line."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pd.bench.load.arrivals import Arrivals
from pd.bench.load.client_checks import ClientLimits
from pd.bench.load.datasets.spec import DatasetSpec, TraceSpec
from pd.bench.load.endpoints import Chat, Options, Sampling, find_endpoint
from pd.bench.load.goodput import Objectives
from pd.bench.load.target import EndpointAddress
from pd.core.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

# Datasets whose answers end on their own.
_OWN_ENDS = ("jsonl", "structured")


@dataclass(frozen=True)
class LoadSettings:
    """The settings of a run.

    Attributes:
        arrivals: how sessions arrive; None: as the dataset says, else as soon as possible.
        burstiness: burstiness of ``arrivals``, also for a rate that is set later.
        max_concurrency: sessions at a time over all processes; None for no limit.
        options: fields of requests, if the server accepts them.
        processes: load processes on each host.
        hosts: hosts of the load processes; empty for this machine.
        gpus: number of GPUs of the server, for rates per GPU; None if unknown, 0 for a CPU. Neither
            has rates.
        keep_texts: whether records have the texts of answers.
    """

    url: str
    target: EndpointAddress
    endpoint: str
    sampling: Sampling
    options: Options
    dataset: DatasetSpec
    arrivals: Arrivals | None
    burstiness: float
    max_concurrency: int | None
    cancel_rate: float
    cancel_delay: float
    warmup: int
    seed: int
    timeout: float
    processes: int
    hosts: tuple[str, ...]
    limits: ClientLimits
    objectives: Objectives | None
    gpus: int | None
    keep_texts: bool

    @property
    def closed_loop(self) -> bool:
        """Whether sessions follow each other instead of a schedule."""
        return self.max_concurrency is not None and self.arrivals is None

    def at_rate(self, rate: float, seed: int) -> LoadSettings:
        """Return the same run at another rate and with another seed."""
        return replace(self, arrivals=Arrivals(rate, self.burstiness), seed=seed)


def load_settings(
    args: argparse.Namespace, url: str, hosts: Sequence[str], gpus: int | None = None
) -> LoadSettings:
    """Make the settings of a run against one server, with load processes on these hosts.

    ``gpus`` is the server's number of GPUs, unless ``--gpus`` says otherwise. Raises UsageError for
    an impossible run.
    """
    api = find_endpoint(args.endpoint)
    _check_numbers(args, max(1, len(hosts)))
    try:
        extra = json.loads(args.extra_body or "{}")
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise UsageError(f"--extra-body must be a JSON object, not {args.extra_body}")
    ignore_eos = args.ignore_eos
    if ignore_eos is None:
        ignore_eos = args.dataset_name not in _OWN_ENDS
    return LoadSettings(
        url=url,
        target=EndpointAddress.parse(url, api.path, api_key_of(args)),
        endpoint=api.path,
        sampling=Sampling(args.model, args.temperature, extra),
        options=Options(ignore_eos=bool(ignore_eos)),
        dataset=_make_dataset(args, chat=isinstance(api, Chat)),
        arrivals=_make_arrivals(args),
        burstiness=_find_burstiness(args),
        max_concurrency=args.max_concurrency,
        cancel_rate=args.cancel_rate,
        cancel_delay=args.cancel_delay,
        warmup=args.warmup,
        seed=args.seed,
        timeout=args.request_timeout,
        processes=args.processes,
        hosts=tuple(hosts),
        limits=ClientLimits(args.max_client_lag_ms / 1e3, args.max_client_cpu),
        objectives=Objectives.parse(" ".join(args.goodput)) if args.goodput else None,
        gpus=gpus if args.gpus is None else args.gpus,
        # Only pd-bench serve has these flags.
        keep_texts=getattr(args, "save_result", None) is not None and args.save_detailed,
    )


def api_key_of(args: argparse.Namespace) -> str | None:
    """Return the key of the requests, or None. Raises UsageError if a header cannot hold it."""
    key: str | None = args.api_key or os.environ.get("OPENAI_API_KEY") or None
    if key is not None and not key.isprintable():
        raise UsageError("the API key must be printable characters in one line")
    return key


def _check_numbers(args: argparse.Namespace, num_hosts: int) -> None:
    least: dict[str, float] = {
        "processes": 1,
        "max_concurrency": args.processes * num_hosts,
        "gpus": 1,
        "warmup": 0,
        "seed": 0,
        "cancel_rate": 0,
        "cancel_delay": 0,
        "temperature": 0,
        "think_time": 0,
        "trace_time_scale": 0,
    }
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and not smallest <= value < float("inf"):
            why = ": every load process needs a place" if name == "max_concurrency" else ""
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} must be at least {smallest:g}, not {value:g}{why}")
    if args.layout and not args.cluster:
        raise UsageError("--layout names a layout of a deployment: give its file with --cluster")
    if args.cancel_rate > 1:
        raise UsageError(f"--cancel-rate is a share from 0 to 1, not {args.cancel_rate:g}")
    if not 0 < args.request_timeout < float("inf"):
        raise UsageError(f"--request-timeout must be above 0, not {args.request_timeout:g}")


def _make_dataset(args: argparse.Namespace, *, chat: bool) -> DatasetSpec:
    as_text = args.prompts_as == "text" or (args.prompts_as is None and chat)
    if chat and not as_text:
        raise UsageError("--prompts-as tokens does not go with a chat: its messages are text")
    trace = TraceSpec(
        length_scale=args.trace_length_scale,
        output_scale=args.trace_output_scale,
        time_scale=args.trace_time_scale,
        window=_parse_window(args.trace_window),
        arrivals=args.trace_arrivals,
        too_long=args.trace_too_long,
    )
    return DatasetSpec(
        name=args.dataset_name,
        path=args.dataset_path,
        count=args.num_prompts,
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        range_ratio=args.random_range_ratio,
        num_prefixes=args.num_prefixes,
        prefix_len=args.prefix_len,
        turns=args.turns,
        turn_len=args.turn_input_len,
        think_time=args.think_time,
        trace=trace,
        as_text=as_text,
        vocab_size=args.vocab_size,
    )


def _parse_window(text: str) -> tuple[float, float]:
    begin, colon, end = text.partition(":")
    try:
        window = float(begin or 0), float(end or "inf")
    except ValueError:
        window = 0.0, 0.0
    if not colon or not 0 <= window[0] < window[1]:
        raise UsageError(f"--trace-window is START:END in seconds, such as 60:360, not {text}")
    return window


def _make_arrivals(args: argparse.Namespace) -> Arrivals | None:
    """Return how requests arrive; None if no flag says so."""
    ramp = (args.ramp_up_start_rps, args.ramp_up_end_rps)
    if args.ramp_up_strategy is not None:
        if None in ramp or args.request_rate is not None:
            raise UsageError(
                "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, and no "
                "--request-rate"
            )
        return Arrivals(float("inf"), _find_burstiness(args), args.ramp_up_strategy, *ramp)
    if ramp != (None, None):
        raise UsageError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
    if args.request_rate is None or args.request_rate == float("inf"):
        return None
    return Arrivals(args.request_rate, _find_burstiness(args))


def _find_burstiness(args: argparse.Namespace) -> float:
    if args.arrival == "constant":
        return float("inf")
    burstiness: float = args.burstiness
    return burstiness
