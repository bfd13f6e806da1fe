"""Runs a module of Python and lists the lines of ``pd/`` that none of its processes reached.

    python scripts/reached/reached_lines.py pytest -n 2 tests/radix

Tests take twice as much processor time where ``coverage run`` traces them. This program compiles
the modules of ``pd`` with a mark before each statement instead, which costs a few percent: every
line has a byte in a file that all processes map, and its mark sets it. So no process has to write
anything when it ends, and lines of processes that were killed count, too. ``coverage report`` then
does what it always does, with the settings of ``pyproject.toml``.
"""

from __future__ import annotations

import ast
import builtins
import json
import marshal
import mmap
import os
import subprocess
import sys
import tempfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

ROOT = Path(__file__).resolve().parents[2]
# The name by which marks find the bytes of all lines.
_BYTES = "__reached_lines__"
_Block = list[ast.stmt]


class Marking(ast.NodeTransformer):
    """Puts a mark before each statement.

    Args:
        base: place of the byte of the file's line 0.
    """

    def __init__(self, base: int) -> None:
        self._base = base

    def visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                setattr(node, name, list(self._marked(node, block)))
        return node

    def _marked(self, parent: ast.AST, block: _Block) -> Iterator[ast.stmt]:
        lines: list[int] = []
        if isinstance(parent, ast.ExceptHandler):
            lines.append(parent.lineno)
        elif isinstance(parent, ast.match_case):
            lines.append(parent.pattern.lineno)
        for number, statement in enumerate(block):
            lines.append(statement.lineno)
            lines += [each.lineno for each in getattr(statement, "decorator_list", [])]
            if not ((_is_text(statement) and number == 0) or _is_future(statement)):
                yield from (self._mark(line, statement) for line in lines)
                lines.clear()
            yield statement
        last = block[-1]
        yield from (self._mark(line, last) for line in lines)

    def _mark(self, line: int, place: ast.stmt) -> ast.stmt:
        (mark,) = ast.parse(f"{_BYTES}[{self._base + line}] = 1").body
        for node in ast.walk(mark):
            if isinstance(node, ast.stmt | ast.expr):
                ast.copy_location(node, place)
                node.end_lineno, node.end_col_offset = place.lineno, place.col_offset
        return mark


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


class Loader(SourceFileLoader):
    """Loads a module that was compiled with marks."""

    def __init__(self, name: str, path: str, compiled: Path) -> None:
        super().__init__(name, path)
        self._compiled = compiled

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = marshal.loads(self._compiled.read_bytes())
        return code

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _mark_interpreted_kernels()


class Finder:
    """Has modules of this tree's ``pd`` loaded with marks, wherever others find them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != "pd":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.origin in _bases:
            compiled = self._directory / str(_bases[spec.origin])
            spec.loader = Loader(name, spec.origin, compiled)
        return spec


# Place of the byte of line 0 by the path of a file.
_bases: dict[str, int] = {}


def install(directory: str) -> None:
    """Mark the lines that this process reaches from now on."""
    _bases.update(json.loads((Path(directory) / "bases").read_text()))
    with (Path(directory) / "bytes").open("r+b") as file:
        setattr(builtins, _BYTES, mmap.mmap(file.fileno(), 0))
    sys.meta_path.insert(0, Finder(Path(directory)))  # type: ignore[arg-type]


def _mark_interpreted_kernels() -> None:
    """Triton's interpreter compiles kernels by itself, from their source."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    rewriter = getattr(interpreter, "FunctionRewriter", None)
    if rewriter is None or hasattr(rewriter, _BYTES):
        return
    execute = rewriter._compile_and_exec

    def marked(self: Any, tree: ast.AST) -> Any:
        if self.filename in _bases:
            tree = Marking(_bases[self.filename]).visit(tree)
        return execute(self, tree)

    rewriter._compile_and_exec = marked
    setattr(rewriter, _BYTES, True)


def _prepare(directory: Path) -> dict[str, int]:
    """Compile all modules; returns the place of each file's line 0."""
    bases, end = {}, 0
    for path in sorted((ROOT / "pd").rglob("*.py")):
        source = path.read_bytes()
        tree = Marking(end).visit(ast.parse(source))
        assert isinstance(tree, ast.Module)
        code = compile(tree, str(path), "exec", dont_inherit=True)
        (directory / str(end)).write_bytes(marshal.dumps(code))
        bases[str(path)] = end
        end += source.count(b"\n") + 2
    (directory / "bases").write_text(json.dumps(bases))
    (directory / "bytes").write_bytes(bytes(end))
    return bases


def _write(directory: Path, bases: dict[str, int]) -> None:
    """Write what was reached as data of coverage."""
    from coverage import CoverageData

    marks = (directory / "bytes").read_bytes()
    ends = [*list(bases.values())[1:], len(marks)]
    data = CoverageData(str(ROOT / ".coverage"))
    data.erase()
    data.add_lines(
        {
            path: [line for line, mark in enumerate(marks[base:end]) if mark]
            for (path, base), end in zip(bases.items(), ends, strict=True)
        }
    )
    data.write()


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="pd-reached-") as name:
        directory = Path(name)
        bases = _prepare(directory)
        path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {"PD_TEST_REACHED": name, "PYTHONPATH": os.pathsep.join(path)}
        status = subprocess.run([sys.executable, "-m", *sys.argv[1:]], env=env).returncode
        _write(directory, bases)
    subprocess.run([sys.executable, "-m", "coverage", "report"], cwd=ROOT, check=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
