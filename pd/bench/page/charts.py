"""Charts of a report, drawn with matplotlib."""

from __future__ import annotations

import io
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib import ticker
from matplotlib.figure import Figure

from pd.bench.load.measures import collect_latencies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from matplotlib.axes import Axes

    from pd.bench.load.records import Record
    from pd.bench.page.runs import ReportedRun, Sweep

_TITLES = {
    "ttft": "time to first token",
    "second_token": "second token after the first",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2e": "end to end",
}
# In the order in which a request passes through them.
_STAGES = ("queue", "bootstrap", "prefill", "transfer", "decode")
# Stages in parallel to others.
_OVERLAPPING = ("bootstrap", "transfer")
_GANTT_REQUESTS = 40
_THEMES = {
    "light": {"text": "#1c2733", "line": "#c9d1d9", "back": "#ffffff"},
    "dark": {"text": "#dce3ea", "line": "#3b4652", "back": "#12181f"},
}
_COLORS = ("#2f6fde", "#e0792b", "#2a9d6f", "#b54fc4", "#c43d4b", "#6b7a8a", "#b39b25")


class Chart(NamedTuple):
    """A chart with a title and a sentence of explanation.

    Attributes:
        draw: draws the chart into a figure.
        size: size of the figure in inches.
    """

    name: str
    title: str
    text: str
    draw: Callable[[Figure], None]
    size: tuple[float, float] = (9.0, 3.6)

    def draw_svg(self, theme: str) -> str:
        """Draw the chart in the theme ``light`` or ``dark``."""
        written = io.StringIO()
        self._save(written, theme, format="svg", metadata={"Date": None})
        return written.getvalue()

    def draw_png(self) -> bytes:
        written = io.BytesIO()
        self._save(written, "light", format="png", dpi=150)
        return written.getvalue()

    def _save(self, file: IO[Any], theme: str, **options: Any) -> None:
        with _use_theme(theme):
            figure = Figure(figsize=self.size, layout="constrained")
            self.draw(figure)
            figure.savefig(file, **options)


def charts_of(runs: Sequence[ReportedRun], sweeps: Sequence[Sweep]) -> list[Chart]:
    """Return all charts with data in these results."""
    charts: list[Chart] = []
    draw: Callable[[Figure], None]
    if runs:
        text = "Share of requests (of gaps, for the inter-token latency) that waited no longer."
        draw = partial(_draw_distributions, runs)
        charts.append(Chart("latencies", "Latencies", text, draw, (9.0, 5.4)))
    if len(runs) > 1:
        text = "Each run is a point; up and to the left is better."
        draw = partial(_draw_throughput, runs)
        charts.append(Chart("throughput", "Throughput against latency", text, draw))
    if sweeps:
        text = (
            "Share of requests that met the objectives, as the median of the runs at each rate. "
            "Dashed lines are the highest rates that keep them."
        )
        draw = partial(_draw_goodput, sweeps)
        charts.append(Chart("goodput", "Goodput against rate", text, draw))
    text = (
        "Where the time of some requests went. Bars of the reservation on the decode node "
        "(bootstrap) and of the transfer are thin, because both overlap with the prefill."
    )
    for run in runs:
        if any(record.stages for record in run.whole):
            title = f"Stages of requests: {run.name}"
            draw = partial(_draw_stages, run)
            charts.append(Chart(f"stages-{run.name}", title, text, draw, (9.0, 5.4)))
    cached = [run for run in runs if any(r.cached_tokens is not None for r in run.whole)]
    if cached:
        text = "Share of all prompt tokens so far, over the run."
        title, draw = "Prompt tokens from the prefix cache", partial(_draw_cache, cached)
        charts.append(Chart("cache", title, text, draw))
    if any(map(_transfer_rates, runs)):
        text = "KV bytes that prefill nodes sent to decode nodes, by their time on the wire."
        draw = partial(_draw_transfers, runs)
        height = 1.2 + 0.4 * sum(len(_transfer_rates(run)) for run in runs)
        charts.append(Chart("transfers", "Transfer rates", text, draw, (7.5, height)))
    return charts


@contextmanager
def _use_theme(name: str) -> Iterator[None]:
    colors = _THEMES[name]
    settings = {
        "text.color": colors["text"],
        "axes.labelcolor": colors["text"],
        "axes.edgecolor": colors["line"],
        "axes.facecolor": colors["back"],
        "figure.facecolor": colors["back"],
        "xtick.color": colors["text"],
        "ytick.color": colors["text"],
        "grid.color": colors["line"],
        "legend.facecolor": colors["back"],
        "legend.edgecolor": colors["line"],
        "axes.prop_cycle": cycler(color=_COLORS),
        "axes.grid": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 9.0,
        # A dollar sign in the name of a run or a model starts no formula.
        "text.parse_math": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "pd",
    }
    # matplotlib's annotations list every valid name.
    with mpl.rc_context(settings):  # type: ignore[arg-type]
        yield


def _draw_distributions(runs: Sequence[ReportedRun], figure: Figure) -> None:
    """Draw cumulative distributions, one panel per latency."""
    shown = ("ttft", "itl", "tpot", "e2e")
    axes = figure.subplots(2, 2).flatten()
    for axis, name in zip(axes, shown, strict=True):
        for run in runs:
            values = np.sort(np.array(collect_latencies(run.whole)[name])) * 1e3
            if len(values):
                shares = np.arange(1, len(values) + 1) / len(values)
                axis.step(values, shares, where="post", label=run.name)
        axis.set_title(_TITLES[name], fontsize=9)
        axis.set_xlabel("ms")
        if any(line.get_xdata().min() > 0 for line in axis.get_lines()):
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            axis.xaxis.set_minor_locator(ticker.NullLocator())
        axis.set_ylim(0, 1.01)
    _add_legend(axes[0])


def _draw_throughput(runs: Sequence[ReportedRun], figure: Figure) -> None:
    left, right = figure.subplots(1, 2)
    for axis, latency, which in ((left, "ttft", "p90"), (right, "itl", "p99")):
        for run in runs:
            ms, tokens = run.get_percentile(latency, which), run.measures.get("output_tokens_per_s")
            if ms is not None and tokens is not None:
                axis.plot([ms], [tokens], "o", label=run.name)
        axis.set_xlabel(f"{_TITLES[latency]}, {which}, ms")
        axis.set_ylabel("output tokens/s")
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
    _add_legend(left)


def _draw_goodput(sweeps: Sequence[Sweep], figure: Figure) -> None:
    axis = figure.subplots()
    for sweep in sweeps:
        for name in sweep.deployments:
            rows = [row for row in sweep.rows if row["deployment"] == name]
            rates = sorted({float(row["rate"]) for row in rows})
            shares = [
                median(float(row["share"]) for row in rows if float(row["rate"]) == rate)
                for rate in rates
            ]
            (line,) = axis.plot(rates, shares, "o-", label=name)
            highest = sweep.highest.get(name)
            if highest is not None:
                axis.axvline(highest, linestyle="--", color=line.get_color(), linewidth=1)
    axis.set_xlabel("requests/s")
    axis.set_ylabel("share within objectives")
    axis.set_ylim(0, 1.02)
    axis.set_xlim(left=0)
    _add_legend(axis)


def _draw_stages(run: ReportedRun, figure: Figure) -> None:
    axis = figure.subplots()
    known = [record for record in run.whole if record.stages]
    step = max(1, -(-len(known) // _GANTT_REQUESTS))
    for place, record in enumerate(known[::step]):
        for stage, (begin, seconds) in _stage_bars(record).items():
            axis.barh(
                place,
                seconds * 1e3,
                left=begin * 1e3,
                color=_COLORS[_STAGES.index(stage)],
                height=0.3 if stage in _OVERLAPPING else 0.8,
                label=stage if place == 0 else None,
                zorder=3 if stage in _OVERLAPPING else 2,
            )
        if record.ttft is not None:
            axis.plot([record.ttft * 1e3], [place], "|", color="#8a96a3", markersize=8, zorder=4)
    axis.set_xlabel("ms after sending; a mark is the first token")
    axis.set_ylabel(f"every {step}. request" if step > 1 else "request")
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    _add_legend(axis)


def _stage_bars(record: Record) -> dict[str, tuple[float, float]]:
    """Return begin and length of each stage, in seconds after sending.

    Stages before the first token count from the left, later ones back from the last token.
    """
    seconds = {stage: float((record.stages or {}).get(stage) or 0.0) for stage in _STAGES}
    decoding = (record.e2e or sum(seconds.values())) - seconds["decode"]
    return {
        "queue": (0.0, seconds["queue"]),
        "bootstrap": (0.0, seconds["bootstrap"]),
        "prefill": (seconds["queue"], seconds["prefill"]),
        "transfer": (decoding - seconds["transfer"], seconds["transfer"]),
        "decode": (decoding, seconds["decode"]),
    }


def _draw_cache(runs: Sequence[ReportedRun], figure: Figure) -> None:
    axis = figure.subplots()
    for run in runs:
        known = [r for r in run.whole if r.cached_tokens is not None and r.prompt_tokens]
        cached = np.cumsum([r.cached_tokens or 0 for r in known])
        prompts = np.cumsum([r.prompt_tokens or 0 for r in known])
        axis.plot([r.sent for r in known], cached / np.maximum(prompts, 1), label=run.name)
    axis.set_xlabel("seconds after the start")
    axis.set_ylabel("share")
    axis.set_ylim(0, 1.02)
    _add_legend(axis)


def _transfer_rates(run: ReportedRun) -> dict[str, float]:
    """Return gigabytes per second by backend, as far as the nodes reported them."""
    transfers = (run.summary.get("server") or {}).get("transfers") or {}
    rates = {backend: row.get("gigabytes_per_s") for backend, row in transfers.items()}
    return {backend: float(rate) for backend, rate in rates.items() if rate}


def _draw_transfers(runs: Sequence[ReportedRun], figure: Figure) -> None:
    axis = figure.subplots()
    rates = {
        f"{run.name}, {backend}": rate
        for run in runs
        for backend, rate in _transfer_rates(run).items()
    }
    bars = axis.barh(list(rates), list(rates.values()), color=_COLORS[0])
    axis.bar_label(bars, fmt="%.3g", padding=3)
    axis.set_xlabel("GB/s")
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")


def _add_legend(axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        axis.legend(handles, labels, fontsize=8)
