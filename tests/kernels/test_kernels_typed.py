"""Python functions beside Triton's kernels have types, though mypy does not demand it there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pd.kernels

ROOT = Path(pd.kernels.__file__).parent
FILES = [path for path in sorted(ROOT.rglob("*.py")) if "@triton.jit" in path.read_text()]


def is_kernel(function: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_there_are_such_files() -> None:
    assert len(FILES) > 5


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_only_kernels_lack_types(path: Path) -> None:
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
    for function in functions:
        if is_kernel(function):
            continue
        arguments = [*function.args.args, *function.args.kwonlyargs]
        lacking = [
            a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")
        ]
        assert not lacking, f"{path.name}: {function.name} lacks the types of {lacking}"
        assert function.returns is not None, f"{path.name}: {function.name} lacks its result's type"
