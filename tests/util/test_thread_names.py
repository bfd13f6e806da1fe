"""Every thread of a node or a proxy has a name and a row in the tables of threads."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
TABLES = ("docs/threads.md", "pd/transfer/README.md")
# Programs that are neither a node nor a proxy.
OTHERS = ("pd/bench/", "pd/cluster/", "pd/commands/processes.py")
PREFIX = "STUCK_PREFIX"
# A part of a name that differs from thread to thread; tables have N, BACKEND or a word there.
PART = r"[\w-]+"

# File and line, and the expression of the name, if there is one.
Started = tuple[str, ast.expr | None]


def threads(source: str, file: str) -> Iterator[Started]:
    """Where threads are made: calls of Thread, ThreadPoolExecutor and classes of ours, and
    subclasses of Thread."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        names = {keyword.arg: keyword.value for keyword in node.keywords}
        place = f"{file}:{node.lineno}"
        if called == "threading.Thread":
            yield place, names.get("name")
        elif called == "ThreadPoolExecutor":
            yield place, names.get("thread_name_prefix") or (node.args[1:] or [None])[0]
        elif called in ("WorkQueue", "CallThread", "LinkThread", "Pump"):
            yield place, (node.args or [None])[0]
        elif called == "super().__init__" and {"name", "daemon"} <= set(names):
            yield place, names["name"]


def pattern(name: ast.expr) -> str | None:
    """Return a regular expression for a name in the tables; None if it comes from elsewhere."""
    match name:
        case ast.Constant(value=str(text)):
            return re.escape(text)
        case ast.JoinedStr(values=values):
            parts = [pattern(value) for value in values]
            return "".join(PART if part is None else part for part in parts)
        case ast.FormattedValue(value=value):
            return "" if ast.unparse(value) == PREFIX else None
        case ast.BinOp(left=ast.Name(id="STUCK_PREFIX"), right=right):
            return pattern(right)
    return None


def all_threads() -> list[Started]:
    """Find the threads of nodes and proxies. A variable ``name`` has its value in the same file."""
    found: list[Started] = []
    for path in sorted(ROOT.glob("pd/**/*.py")):
        file = str(path.relative_to(ROOT))
        if file.startswith(OTHERS):
            continue
        source = path.read_text()
        given = [
            node.value
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "name"
        ]
        for place, name in threads(source, file):
            if isinstance(name, ast.Name) and given:
                found += [(place, value) for value in given]
            else:
                found.append((place, name))
    return found


@pytest.fixture(scope="module")
def first_columns() -> str:
    """Read the first column of every table."""
    lines = [line for page in TABLES for line in (ROOT / page).read_text().splitlines()]
    return "\n".join(line.split("|")[1] for line in lines if line.startswith("|"))


def test_every_thread_has_a_name() -> None:
    started = all_threads()
    assert len(started) > 25
    assert not [place for place, name in started if name is None]


def test_the_tables_of_threads_are_complete(first_columns: str) -> None:
    patterns = [(place, pattern(name)) for place, name in all_threads() if name is not None]
    assert sum(wanted is not None for _, wanted in patterns) > 20
    missing = [
        f"{place}: {wanted}"
        for place, wanted in patterns
        if wanted is not None and not re.search(rf"(?<![\w-]){wanted}(?![\w-])", first_columns)
    ]
    assert not missing
