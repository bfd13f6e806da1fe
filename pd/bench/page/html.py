"""The report as HTML: tables, charts as data URLs, and where the numbers come from."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import jinja2

from pd.bench.load.measures import LATENCIES
from pd.bench.page.runs import PROGRAM_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pd.bench.page.charts import Chart
    from pd.bench.page.runs import ProgramsReport, ReportedRun, Sweep

_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
:root { --text: #1c2733; --back: #ffffff; --line: #d5dce3; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --text: #dce3ea; --back: #12181f; --line: #3b4652; --bad: #ff8a80; }
}
body { color: var(--text); background: var(--back); font: 15px/1.5 system-ui, sans-serif;
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block;
  overflow-x: auto; }
td, th { border-bottom: 1px solid var(--line); padding: .2rem .6rem; text-align: right; }
td:first-child, th:first-child { text-align: left; }
code, pre { font-size: .85em; white-space: pre-wrap; overflow-wrap: anywhere; }
.void { color: var(--bad); font-weight: bold; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for run in runs if run.faults %}
<p class="void">{{ run.name }} is void: {{ run.faults | join("; ") }}</p>
{% endfor %}
{% if runs %}
<h2>Runs</h2>
<table>
<tr><th>run</th>{% for name in facts %}<th>{{ name }}</th>{% endfor %}</tr>
{% for run in runs %}
<tr><td>{{ run.name }}</td>{% for value in run.facts %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</table>
<h2>Latencies in milliseconds</h2>
<table>
<tr><th>run, latency</th><th>count</th>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for run in runs %}{% for row in run.latencies %}
<tr><td>{{ run.name }}, {{ row.name }}</td>{% for value in row.cells %}<td>{{ value }}</td>
{% endfor %}</tr>
{% endfor %}{% endfor %}
</table>
{% endif %}
{% for table in programs %}
<h2>Programs: {{ table.name }}</h2>
<table>
<tr>{% for name in program_columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in table.rows %}
<tr>{% for value in row %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endfor %}
{% for chart in charts %}
<h2>{{ chart.title }}</h2>
<p>{{ chart.text }}</p>
<picture>
<source media="(prefers-color-scheme: dark)" srcset="data:image/svg+xml;base64,{{ chart.dark }}">
<img alt="{{ chart.title }}" src="data:image/svg+xml;base64,{{ chart.light }}">
</picture>
{% endfor %}
{% for run in runs if run.server %}
<h2>Server: {{ run.name }}</h2>
<table>
{% for name, value in run.server %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{% endfor %}
</table>
{% endfor %}
<h2>Where it comes from</h2>
{% for source in sources %}
<h3>{{ source.name }}</h3>
<pre>{{ source.command }}</pre>
<p>{{ source.rest }}</p>
{% endfor %}
</body>
</html>
"""
_FACTS = {
    "requests": "requests",
    "completed": "completed",
    "failed": "failed",
    "requests/s": "requests_per_s",
    "output tokens/s": "output_tokens_per_s",
    "tokens/s": "tokens_per_s",
    "cached share": "cached_share",
}


def render_page(
    title: str,
    runs: Sequence[ReportedRun],
    sweeps: Sequence[Sweep],
    charts: Sequence[Chart],
    programs: Sequence[ProgramsReport],
) -> str:
    """Render one self-contained HTML file."""
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        _PAGE
    )
    return template.render(
        title=title,
        columns=_COLUMNS,
        facts=[*_FACTS, "goodput share"],
        runs=[_describe_run(run) for run in runs],
        program_columns=list(PROGRAM_COLUMNS.values()),
        programs=[
            {
                "name": report.name,
                "rows": [
                    [_format_number(row[name]) for name in PROGRAM_COLUMNS] for row in report.rows
                ],
            }
            for report in programs
        ],
        charts=[
            {
                "title": chart.title,
                "text": chart.text,
                "light": _encode_base64(chart.draw_svg("light")),
                "dark": _encode_base64(chart.draw_svg("dark")),
            }
            for chart in charts
        ],
        sources=[
            *(_describe_source(run.name, run.summary) for run in runs),
            *map(_describe_sweep, sweeps),
            *(_describe_source(report.name, report.source) for report in programs),
        ],
    )


def _encode_base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _describe_run(run: ReportedRun) -> dict[str, Any]:
    goodput = run.measures.get("goodput") or {}
    facts = [run.measures.get(name) for name in _FACTS.values()]
    latencies = []
    for name in LATENCIES:
        row = run.measures.get(f"{name}_ms") or {}
        cells = [_format_number(row.get(key)) for key in ("count", *_COLUMNS)]
        latencies.append({"name": name, "cells": cells})
    leaves = _flatten(run.summary.get("server"))
    return {
        "name": run.name,
        "faults": run.faults,
        "facts": [_format_number(value) for value in [*facts, goodput.get("share")]],
        "latencies": latencies,
        "server": [(name, _format_number(value)) for name, value in leaves],
    }


def _format_number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else str(value)


def _flatten(value: object, name: str = "") -> list[tuple[str, object]]:
    """List the leaves of nested objects with their paths."""
    if not isinstance(value, dict):
        return [(name, value)] if name else []
    return [
        leaf
        for key, inside in value.items()
        for leaf in _flatten(inside, f"{name} {key}".strip().replace("_", " "))
    ]


def _describe_source(name: str, summary: Mapping[str, Any]) -> dict[str, str]:
    machine = ", ".join(f"{name} {value}" for name, value in (summary.get("machine") or {}).items())
    rest = f"commit {summary.get('commit')}, {summary.get('date')}; client: {machine}"
    return {"name": name, "command": str(summary.get("command", "")), "rest": rest}


def _describe_sweep(sweep: Sweep) -> dict[str, str]:
    rates = ", ".join(
        f"{name}: {'none of the rates' if rate is None else f'{rate:g} requests/s'}"
        for name, rate in sweep.highest.items()
    )
    return {"name": "sweep", "command": sweep.command, "rest": f"highest rates: {rates}"}
