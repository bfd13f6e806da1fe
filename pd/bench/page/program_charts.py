"""Charts of `pd-bench programs`, in the form of Figure 8 of SGLang's paper."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pd.bench.page.charts import Chart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from pd.bench.page.runs import ProgramsReport


def list_program_charts(reports: Sequence[ProgramsReport]) -> list[Chart]:
    """Return all charts of result files of programs."""
    charts = []
    for report in reports:
        for layout in report.layouts:
            ample = report.select_rows(layout, small_pool=False)
            text = "Programs per second, as a multiple of those with everything on."
            draw = partial(_draw_bars, ample, "programs_per_s", True)
            title = f"Ablations: {report.name}, {layout}"
            charts.append(Chart(f"ablations-{report.name}-{layout}", title, text, draw))
            text = "Hit rates. A line is the best that an unlimited cache gives these requests."
            draw = partial(_draw_bars, ample, "hit_rate", False)
            title = f"Prompt tokens from the cache: {report.name}, {layout}"
            charts.append(Chart(f"hits-{report.name}-{layout}", title, text, draw))
            small = report.select_rows(layout, small_pool=True)
            if small:
                text = "Hit rates where the pool holds only a part of the distinct tokens."
                draw = partial(_draw_bars, small, "hit_rate", False)
                title = f"A small pool: {report.name}, {layout}"
                charts.append(Chart(f"small-pool-{report.name}-{layout}", title, text, draw))
    return charts


def _draw_bars(
    rows: Sequence[dict[str, Any]], measure: str, is_relative: bool, figure: Figure
) -> None:
    """Draw a group of bars for each workload, and a bar for each ablation in it.

    Args:
        is_relative: divide by the workload's first ablation; otherwise show the best hit rate.
    """
    axis = figure.subplots()
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    ablations = list(dict.fromkeys(row["ablation"] for row in rows))
    width = 0.8 / len(ablations)
    first = {row["workload"]: row[measure] for row in reversed(rows)}
    for number, ablation in enumerate(ablations):
        chosen = [row for row in rows if row["ablation"] == ablation]
        places = [
            workloads.index(row["workload"]) + (number - (len(ablations) - 1) / 2) * width
            for row in chosen
        ]
        values = [row[measure] / (first[row["workload"]] if is_relative else 1) for row in chosen]
        axis.bar(places, values, width * 0.9, label=ablation)
        if not is_relative:
            best = [row["best_hit_rate"] for row in chosen]
            left, right = ([place + side * width / 2 for place in places] for side in (-1, 1))
            axis.hlines(best, left, right, linewidth=1.2, color=axis.xaxis.label.get_color())
    axis.set_xticks(range(len(workloads)), workloads)
    axis.set_ylabel("of everything on" if is_relative else "share of prompt tokens")
    axis.grid(visible=False, axis="x")
    axis.set_axisbelow(True)
    axis.legend(fontsize=8, ncols=4)
    axis.set_ylim(0, 1.25 * axis.get_ylim()[1])
