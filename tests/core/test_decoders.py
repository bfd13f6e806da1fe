"""msgspec crashes the process if two threads inspect the same type at once, in each one's first
typed decode (a decode node crashed when two prefill nodes answered together). So we make
decoders at import, while only one thread runs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pd

ROOT = Path(pd.__file__).parent
# While these run there is one thread.
AT_START = {ROOT / "transfer/fake/script.py", ROOT / "cluster/spec.py", *(ROOT / "bench").iterdir()}
SOURCES = sorted(set(ROOT.rglob("*.py")) - AT_START)


def learns_a_type(call: ast.Call) -> bool:
    """``msgspec.json.decode(..., type=T)``, ``msgspec.convert(..., T)``, ``Decoder(T)``."""
    name = ast.unparse(call.func)
    if not name.startswith("msgspec."):
        return False
    typed = any(keyword.arg == "type" for keyword in call.keywords)
    is_decode = name.endswith(".decode") and typed
    return is_decode or name == "msgspec.convert" or name.endswith(".Decoder")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_decoders_are_made_at_import(path: Path) -> None:
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    inside = (node for function in functions for node in ast.walk(function))
    calls = [node for node in inside if isinstance(node, ast.Call)]
    assert not [ast.unparse(call) for call in calls if learns_a_type(call)]
