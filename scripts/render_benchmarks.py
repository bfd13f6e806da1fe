"""Write docs/benchmarks.md and the pages below docs/benchmarks/ from benchmarks/results/*.json.

A result file names the ``command`` that made it, the ``commit``, ``date`` and ``machine`` (and
``settings`` and a ``note``, if any), and has ``results``: a list of rows. The docstring of the
command's program explains the numbers. A file of the same name that ends in ``.md`` may interpret
them. It writes numbers as fields like ``{unified[tpot_p50_ms]:.1f}``: the row whose first column is
``unified``, and the column.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
# Programs that have moved since their commands were recorded.
MOVED = {
    "scripts/evaluate_model.py": "training/evaluate_model.py",
}


class Topic(NamedTuple):
    """A page. ``names``: its result files begin with one of these."""

    title: str
    names: tuple[str, ...]


TOPICS = {
    "engine": Topic("One node: steps and prompts", ("engine_", "gpu_idle", "versions_engine")),
    "mixed-steps": Topic("Steps with prompts next to answers", ("mixed_",)),
    "kernels": Topic("Kernels", ("all_reduce", "attention", "kernels")),
    "transfer": Topic("Moving KV between nodes", ("transfer_", "versions_transfer")),
    "transfer-parts": Topic(
        "Moving KV: its parts, and damage",
        ("damage_rate", "kv_copy", "nixl_", "nvlink_", "sending"),
    ),
    "split": Topic("Split and unified nodes on GPUs", ("split_gpu", "split_h100")),
    "split-load": Topic(
        "Split nodes on GPUs: elastic roles, and long prompts",
        ("split_elastic", "split_fixed", "split_long"),
    ),
    "serving": Topic(
        "Serving on a CPU, and many streams", ("cpu_serving", "embedded_split", "streams_of_nodes")
    ),
    "traces": Topic(
        "Layouts on traces, and elastic nodes",
        ("prefix_predictions", "role_change", "trace_", "virtual_layouts"),
    ),
    "failover": Topic("Failover and churn", ("churn", "failover")),
    "speculation": Topic("Speculative decoding", ("acceptance", "draft_prompt", "speculation")),
    "structured-output": Topic("Structured output", ("grammar_", "json_schema", "jump_forward")),
    "proxy": Topic("The proxy", ("proxy", "tokenized_batches")),
    "cache": Topic("The prefix cache", ("radix", "prefix_lease", "programs", "prompt_order")),
}


class Highlight(NamedTuple):
    """A table of the summary: some columns of some rows of one result file."""

    question: str
    name: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[object, ...]] = MappingProxyType({})


HIGHLIGHTS = [
    Highlight(
        "How fast is one GPU?",
        "engine_gpu",
        ("work", "median_ms", "tokens_per_s", "roofline_ms", "vllm_ms"),
    ),
    Highlight(
        "How fast does KV travel between two GPUs?",
        "transfer_gpu",
        ("backend", "gb_s", "ceiling", "ceiling_gb_s"),
    ),
    Highlight(
        "What does a hand-off cost a request?",
        "split_gpu",
        ("system", "work", "metric", "p50_ms", "p99_ms"),
        {
            "system": ("prefill node alone", "split, nvlink", "unified"),
            "work": ("unloaded:1024", "unloaded:32768"),
            "metric": ("first token", "second token after the first"),
        },
    ),
    Highlight(
        "Which layout keeps its objectives on a real trace?",
        "trace_layouts_gpu",
        ("layout", "time_scale", "goodput_share", "ttft_p90_ms", "itl_p99_ms"),
    ),
    Highlight(
        "What happens when nodes are killed or restarted under load?",
        "failover",
        ("phase", "events", "requests", "failed", "wrong", "pause p50 s", "pause p99 s"),
    ),
    Highlight(
        "How much do EAGLE-3 drafts gain?",
        "speculation_gpu",
        ("batch", "acceptance_length", "none_tokens_per_s", "tokens_per_s", "speedup"),
    ),
    Highlight("What does the proxy cost?", "proxy", ("work", "system", "cpu_us")),
]

SUMMARY = """\
# Benchmarks

You want to know how fast pd is, or whether your machine is as fast. Run the command of a result's
section, and then write these pages again:

```
make benchmarks
```

Every number here comes from a file in `benchmarks/results/`, and `make check` fails if a page
differs from its files. Timings depend on the machine and its other load, so compare figures only
within one table.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if a page is out of date")
    args = parser.parse_args()
    pages = render()
    if not args.check:
        (DOCS / "benchmarks").mkdir(exist_ok=True)
        for path, text in pages.items():
            path.write_text(text)
    stale = [path for path, text in pages.items() if not path.is_file() or path.read_text() != text]
    stale += sorted(set((DOCS / "benchmarks").glob("*")) - pages.keys())
    for path in stale:
        print(f"{path.relative_to(ROOT)} differs from the result files; run: make benchmarks")
    return 1 if stale else 0


def render() -> dict[Path, str]:
    """Render all pages. Exits if a result file belongs to no topic, or to several."""
    chosen: dict[str, list[Path]] = {topic: [] for topic in TOPICS}
    for path in sorted(RESULTS.glob("*.json")):
        topics = [key for key, topic in TOPICS.items() if path.stem.startswith(topic.names)]
        if len(topics) != 1:
            raise SystemExit(f"{path.name}: belongs to {topics or 'no topic'}; see TOPICS")
        chosen[topics[0]].append(path)
    pages = {
        DOCS / "benchmarks" / f"{key}.md": topic_page(TOPICS[key].title, paths)
        for key, paths in chosen.items()
    }
    return {DOCS / "benchmarks.md": summary(chosen), **pages}


def summary(chosen: dict[str, list[Path]]) -> str:
    """Render the page with the most telling tables, and links to all others."""
    page_of = {path.stem: key for key, paths in chosen.items() for path in paths}
    parts = [SUMMARY]
    for question, name, columns, wanted in HIGHLIGHTS:
        report = json.loads((RESULTS / f"{name}.json").read_text())
        rows = [
            {column: row.get(column) for column in columns}
            for row in report["results"]
            if all(row[column] in values for column, values in wanted.items())
        ]
        link = f"benchmarks/{page_of[name]}.md#{name}"
        where = f"{machine(report)}, {report['date'][:10]}: [command and all rows]({link})"
        parts.append(f"## {question}\n\n{table(rows)}\n\n{where}\n")
    parts.append("## All results\n\n| page | results |\n|---|---|")
    lines = []
    for key, paths in chosen.items():
        links = ", ".join(f"[{p.stem}](benchmarks/{key}.md#{p.stem})" for p in paths)
        lines.append(f"| [{TOPICS[key].title}](benchmarks/{key}.md) | {links} |")
    return "\n".join(parts) + "\n" + "\n".join(lines) + "\n"


def machine(report: dict[str, Any]) -> str:
    """Name the GPUs of a measurement, or its CPU."""
    facts = report["machine"]
    gpus = facts.get("gpus") or facts.get("gpu")
    return (" and ".join(sorted(set(gpus))) if isinstance(gpus, list) else gpus) or facts["cpu"]


def topic_page(title: str, paths: list[Path]) -> str:
    """Render all result files of a topic. The first result of a program explains it."""
    explained = set[str]()
    head = f"# {title}\n\n[All benchmarks](../benchmarks.md)\n"
    return "\n".join([head, *(section(path, explained) for path in paths)])


def section(path: Path, explained: set[str]) -> str:
    """Render one result file. Adds the program's explanation to ``explained``, unless it is
    there."""
    report = json.loads(path.read_text())
    command = report["command"]
    for before, after in MOVED.items():
        command = command.replace(before, after)
    explanation = purpose(command)
    facts = [f"- command: `{command}`", f"- commit: `{report['commit'][:12]}`"]
    facts.append(f"- date: {report['date'][:10]}")
    given = [name for name in ("machine", "settings") if report.get(name)]
    facts += [f"- {name}: {inline(report[name])}" for name in given]
    facts += [f"- note: {report['note']}"] if report.get("note") else []
    parts = [
        f"## {path.stem}",
        "" if explanation in explained else explanation,
        "\n".join(facts),
        table(report["results"]),
        findings(path.with_suffix(".md"), report["results"]),
    ]
    explained.add(explanation)
    return "\n\n".join(part for part in parts if part) + "\n"


def findings(page: Path, rows: list[dict[str, Any]]) -> str:
    """Fill a page's text with numbers from the rows; empty if there is no such page."""
    if not page.is_file():
        return ""
    text = page.read_text()
    own = re.search(r"(?<![\w.])\d[\d.,]*(?!\w)", re.sub(r"\{.*?\}|`.*?`", "", text))
    if own is not None:
        raise SystemExit(f"{page}: {own.group()} must be a field of the results")
    return text.format_map({str(next(iter(row.values()))): row for row in rows}).strip()


def purpose(command: str) -> str:
    """Return the docstring of a command's program, without its indented examples."""
    words = [word for word in shlex.split(command) if not word.endswith(("python", "python3"))]
    if not words:
        return ""
    module = words[1] if words[0] == "-m" else ""
    if words[0] == "pd-bench":
        module = f"pd.bench.{words[1]}"
    path = ROOT / (module.replace(".", "/") + ".py" if module else words[0])
    if not path.is_file():  # a benchmark may be a package
        path = path.with_suffix("") / "command.py"
    if not path.is_file():
        return ""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraphs = [p for p in text.split("\n\n") if not p.startswith("    ")]
    return "\n\n".join(paragraphs)


def inline(values: dict[str, Any]) -> str:
    """Write nested settings in one line."""
    pairs = []
    for name, value in values.items():
        shown = f"({inline(value)})" if isinstance(value, dict) else str(value)
        pairs.append(f"{name} {shown}")
    return ", ".join(pairs)


def table(rows: list[dict[str, Any]]) -> str:
    """Render Markdown, without columns that are empty in every row."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    names = [name for name in names if any(row.get(name) is not None for row in rows)]
    numeric = {n for n in names if all(is_number(row.get(n)) for row in rows if row.get(n))}
    lines = [
        "| " + " | ".join(map(title, names)) + " |",
        "|" + "|".join("---:" if name in numeric else "---" for name in names) + "|",
    ]
    lines += ["| " + " | ".join(cell(name, row.get(name)) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def title(name: str) -> str:
    return name.replace("gb_s", "GB/s").replace("_", " ")


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def cell(name: str, value: object) -> str:
    if value is None:
        return ""
    if not is_number(value):
        text = str(value).strip().replace("|", "\\|")
        return f"`{text}`" if "<" in text else text  # a C++ name is no HTML
    assert isinstance(value, int | float)
    if name.endswith("_rate"):
        return f"{value:.2%}"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
