"""Write docs/benchmarks.md from benchmarks/results/*.json; with --check only compare.

A result file names the ``command`` that made it, the ``commit``, ``date`` and ``machine`` (and
``settings`` and a ``note``, if any), and has ``results``: a list of rows. What the numbers mean is
said by the docstring of the program that the command runs. What they show may be said by a file of
the same name that ends in ``.md``. Its numbers are fields like ``{unified[tpot_p50_ms]:.1f}``: the
row whose first column is ``unified``, and the column.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TARGET = ROOT / "docs" / "benchmarks.md"
# Where programs stand now that recorded commands name by an earlier place.
MOVED = {
    "scripts/evaluate_model.py": "training/evaluate_model.py",
}

HEAD = """\
# Benchmarks

Every number here was written by a program to a file below `benchmarks/results/` and put on this
page by `scripts/render_benchmarks.py`; `make check` fails when the two differ. To measure again,
run the command of a section, then `make benchmarks`. Timings depend on the machine and on what else
runs there, so compare within a section only.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the page is out of date")
    args = parser.parse_args()
    page = render()
    if not args.check:
        TARGET.write_text(page)
        return 0
    if TARGET.is_file() and TARGET.read_text() == page:
        print("benchmark tables are up to date")
        return 0
    print(f"{TARGET.relative_to(ROOT)} differs from the result files; run: make benchmarks")
    return 1


def render() -> str:
    """The whole page."""
    sections = [section(path) for path in sorted(RESULTS.glob("*.json"))]
    return "\n".join([HEAD, *sections])


def section(path: Path) -> str:
    """One result file."""
    report = json.loads(path.read_text())
    command = report["command"]
    for before, after in MOVED.items():
        command = command.replace(before, after)
    facts = [f"- command: `{command}`", f"- commit: `{report['commit'][:12]}`"]
    facts.append(f"- date: {report['date'][:10]}")
    given = [name for name in ("machine", "settings") if report.get(name)]
    facts += [f"- {name}: {inline(report[name])}" for name in given]
    facts += [f"- note: {report['note']}"] if report.get("note") else []
    parts = [
        f"## {path.stem}",
        purpose(command),
        "\n".join(facts),
        table(report["results"]),
        findings(path.with_suffix(".md"), report["results"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def findings(page: Path, rows: list[dict[str, Any]]) -> str:
    """The text of a page with the numbers of the rows; nothing if there is no such page."""
    if not page.is_file():
        return ""
    text = page.read_text()
    own = re.search(r"(?<![\w.])\d[\d.,]*(?!\w)", re.sub(r"\{.*?\}|`.*?`", "", text))
    if own is not None:
        raise SystemExit(f"{page}: {own.group()} must be a field of the results")
    return text.format_map({str(next(iter(row.values()))): row for row in rows}).strip()


def purpose(command: str) -> str:
    """The docstring of the program that a command runs, without its last indented example."""
    words = [word for word in shlex.split(command) if not word.endswith(("python", "python3"))]
    if not words:
        return ""
    module = words[1] if words[0] == "-m" else ""
    if words[0] == "pd-bench":
        module = f"pd.bench.{words[1]}"
    path = ROOT / (module.replace(".", "/") + ".py" if module else words[0])
    if not path.is_file():
        return ""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraphs = [p for p in text.split("\n\n") if not p.startswith("    ")]
    return "\n\n".join(paragraphs)


def inline(values: dict[str, Any]) -> str:
    """Nested settings in one line."""
    pairs = []
    for name, value in values.items():
        shown = f"({inline(value)})" if isinstance(value, dict) else str(value)
        pairs.append(f"{name} {shown}")
    return ", ".join(pairs)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; columns that are empty in every row are left out."""
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
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


if __name__ == "__main__":
    sys.exit(main())
