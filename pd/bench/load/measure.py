"""One run under load against one server: from its settings to its result."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pd.bench.load.client_checks import client_complaints, client_facts
from pd.bench.load.draw import draw_sessions, draw_warm_up
from pd.bench.load.endpoints import find_endpoint
from pd.bench.load.goodput import count_good
from pd.bench.load.measures import summarize_records
from pd.bench.load.plan import Plan
from pd.bench.load.probe import ServerProbe
from pd.bench.load.processes import LoadProcesses
from pd.bench.load.progress import ProgressLine
from pd.bench.load.server_metrics import metrics_between, read_metrics
from pd.core.errors import PDError, SetupError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.bench.load.client import LoadClient
    from pd.bench.load.goodput import Goodput
    from pd.bench.load.processes import Run
    from pd.bench.load.records import Record
    from pd.bench.load.settings import LoadSettings
    from pd.bench.load.workload import Session


# Note for a run against pd whose answers have no stages.
_WITHOUT_STAGES = (
    "answers of this endpoint do not say how long their stages took, so reports have no chart of "
    "them; pd says so with --endpoint /generate"
)


class _NothingSentError(PDError):
    """The user interrupted the run before its first request."""

    exit_status = 130


@dataclass
class LoadResult:
    """Records and measures of a run.

    Attributes:
        complaints: reasons why the run does not count; empty if it does.
        notes: remarks about the dataset and the server, such as the number of dropped rows.
        server: growth of the server's own metrics during the run; empty if it is not pd.
        interrupted, failure: see :class:`~pd.bench.load.processes.Run`.
    """

    start_time: float
    records: list[Record]
    measures: dict[str, Any]
    goodput: Goodput | None
    notes: dict[str, Any]
    client: dict[str, Any] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    server: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    failure: PDError | None = None


@dataclass(frozen=True)
class ProbedServer:
    """A probed server, with settings adapted to it."""

    settings: LoadSettings
    client: LoadClient
    probe: ServerProbe
    notes: dict[str, Any]


def probe_server(settings: LoadSettings, client: LoadClient) -> ProbedServer:
    """Ask a server for its model, its context and its supported fields.

    Raises SetupError or UsageError if the run is impossible.
    """
    probe = ServerProbe(settings.target, settings.endpoint, client.fetch)
    model, context = probe.find_model(settings.sampling.model)
    sampling = dataclasses.replace(settings.sampling, model=model)
    wanted, dataset = settings.options, settings.dataset
    # We cannot choose the form of a file's lines, and a server without token ids may suit them.
    tokens = not dataset.as_text and dataset.name != "jsonl"
    options = probe.find_options(sampling, wanted, tokens=tokens)
    settings = dataclasses.replace(
        settings,
        sampling=sampling,
        options=options,
        dataset=dataclasses.replace(dataset, context=context),
    )
    if dataset.name == "multi-turn" and not dataset.as_text and not options.token_ids:
        raise UsageError(
            "multi-turn needs the token ids of answers, which this server does not send: use "
            "--prompts-as text"
        )
    notes: dict[str, Any] = {"model": model, "context": context}
    refused = [name for name, value in vars(wanted).items() if value and not getattr(options, name)]
    if refused:
        notes["fields_the_server_refuses"] = refused
    return ProbedServer(settings, client, probe, notes)


def measure_server(server: ProbedServer) -> LoadResult:
    """Draw, send and evaluate. Raises PDError without anything to evaluate."""
    settings = server.settings
    sessions, notes = draw_sessions(
        settings.dataset,
        settings.arrivals,
        seed=settings.seed,
        closed_loop=settings.closed_loop,
        cancel_rate=settings.cancel_rate,
        cancel_delay=settings.cancel_delay,
    )
    warm_up: list[Session] = []
    if settings.warmup:
        warm_up, warm_up_notes = draw_warm_up(
            settings.dataset, settings.warmup, seed=settings.seed, measured=len(sessions)
        )
        notes |= warm_up_notes
    api = find_endpoint(settings.endpoint)
    for session in (*sessions, *warm_up):
        # This raises UsageError for a prompt of the wrong kind.
        api.make_body(
            session.turns[0].prompt, session.turns[0], settings.sampling, settings.options
        )
    schema = next((turn.schema for s in sessions for turn in s.turns if turn.schema), None)
    if schema is not None:
        server.probe.check_schema(settings.sampling, settings.options, schema)
    fetch, base_url = server.client.fetch, server.probe.base_url
    before = read_metrics(fetch, base_url)
    run = _run_load(server, sessions, warm_up)
    if run.warm_up_error is not None:
        notes["warm_up_error"] = run.warm_up_error
    if not run.records:
        raise make_no_records_error(run)
    if run.silent:
        notes["records_missing_from"] = run.silent
    growth = metrics_between(before, read_metrics(fetch, base_url))
    notes["requests_planned"] = sum(len(session.turns) for session in sessions)
    return evaluate_run(settings, run, server.notes | notes, growth)


def make_no_records_error(run: Run) -> PDError:
    """Make the error for a run without records."""
    if run.failure is not None:
        return run.failure
    if run.silent:
        return SetupError(f"no records came from load process {', '.join(run.silent)}")
    return _NothingSentError("the run ended before a request was sent")


def _run_load(server: ProbedServer, sessions: Sequence[Session], warm_up: Sequence[Session]) -> Run:
    settings = server.settings
    plan = Plan(
        process="",
        target=settings.target,
        endpoint=settings.endpoint,
        sampling=settings.sampling,
        options=settings.options,
        max_concurrency=settings.max_concurrency,
        timeout=settings.timeout,
        name=f"bench-{secrets.token_hex(4)}",
        keep_texts=settings.keep_texts,
    )
    line = ProgressLine(sum(len(session.turns) for session in sessions))
    with LoadProcesses(server.client) as processes:
        try:
            return processes.run(plan, sessions, warm_up, line.show_progress)
        finally:
            line.close()


def evaluate_run(
    settings: LoadSettings, run: Run, notes: dict[str, Any], server: dict[str, Any]
) -> LoadResult:
    """Compute the measures of a run, and decide whether it counts."""
    goodput = None
    if settings.objectives is not None:
        goodput = count_good(run.records, settings.objectives)
    client, measures = client_facts(run), summarize_records(run.records, goodput, settings.gpus)
    if server and measures["completed"] and "stages_ms" not in measures:
        notes = notes | {"stages": _WITHOUT_STAGES}
    return LoadResult(
        start_time=run.start_time,
        records=run.records,
        client=client,
        complaints=client_complaints(client, settings.limits),
        measures=measures,
        goodput=goodput,
        notes=notes,
        server=server,
        interrupted=run.interrupted,
        failure=run.failure,
    )
