"""`pd-bench report`: one HTML file about runs of `pd-bench serve`, sweeps and programs.

The page is self-contained and follows the reader's light or dark theme. It has tables of all
measures, latency distributions, throughput against latency, goodput against rate, stages of some
requests, hits of the prefix cache, transfer rates, ablations of programs, commands and machines.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pd.bench.report import check_output
from pd.core.errors import SetupError, UsageError

if TYPE_CHECKING:
    import argparse

    from pd.bench.page.runs import ProgramsReport, ReportedRun, Sweep

EXAMPLES = """\
examples:
  pd-bench report out --output report.html
  pd-bench report split=out/split unified=out/unified sweep.json --output report.html --png charts
  pd-bench report programs.json --output programs.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add(
        "results",
        nargs="+",
        metavar="[NAME=]PATH",
        help="directories of pd-bench serve --output-dir, and files of pd-bench sweep and programs",
    )
    add("--output", type=Path, required=True, metavar="FILE", help="the page")
    add("--title", default="pd-bench", help="title of the page")
    add("--png", type=Path, metavar="DIR", help="also write each chart as a PNG here")


def run(args: argparse.Namespace) -> int:
    """Read results, draw charts and write the page."""
    try:
        from pd.bench.page.charts import charts_of
        from pd.bench.page.program_charts import list_program_charts
    except ModuleNotFoundError as error:
        raise SetupError(
            f"pd-bench report needs {error.name}: pip install 'pd-serve[report]'"
        ) from None
    from pd.bench.page.html import render_page

    check_output(args.output)
    runs, sweeps, programs = read_results(args.results)
    charts = [*charts_of(runs, sweeps), *list_program_charts(programs)]
    page = render_page(args.title, runs, sweeps, charts, programs)
    args.output.write_text(page, encoding="utf-8")
    print(
        f"wrote {args.output}: {len(runs)} runs, {len(sweeps)} sweeps, {len(programs)} files of "
        f"programs, {len(charts)} charts"
    )
    if args.png is not None:
        args.png.mkdir(parents=True, exist_ok=True)
        for number, chart in enumerate(charts):
            # Anyone can choose the name of a run, so it must not reach a path unfiltered.
            name = "".join(c if c.isalnum() or c in "-_" else "_" for c in chart.name)
            (args.png / f"{number:02}-{name}.png").write_bytes(chart.draw_png())
    return 0


def read_results(
    given: list[str],
) -> tuple[list[ReportedRun], list[Sweep], list[ProgramsReport]]:
    """Read runs, sweeps and programs, each ``PATH`` or ``NAME=PATH``. Raises UsageError."""
    from pd.bench.page.runs import Sweep, read_rows, read_run

    runs: list[ReportedRun] = []
    sweeps: list[Sweep] = []
    programs: list[ProgramsReport] = []
    for text in given:
        name, equals, rest = text.partition("=")
        path = Path(rest if equals and not Path(text).exists() else text)
        if path.is_dir():
            runs.append(read_run(path, name if str(path) == rest else path.name or str(path)))
            continue
        report = read_rows(path, name if str(path) == rest else path.stem)
        if isinstance(report, Sweep):
            sweeps.append(report)
        else:
            programs.append(report)
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two runs are called {name}; give them names: NAME=PATH")
    return runs, sweeps, programs
