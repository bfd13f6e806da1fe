"""Fail when two classes of pd have the same public name: one of the two is named too vaguely."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def classes_of(node: ast.Module | ast.ClassDef) -> Iterator[ast.ClassDef]:
    """Yield the public classes of a module, those inside other classes included."""
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield child
            yield from classes_of(child)


def main() -> int:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(Path("pd").rglob("*.py")):
        for found in classes_of(ast.parse(path.read_text())):
            places[found.name].append(f"{path}:{found.lineno}")
    errors = [
        f"class {name}: {', '.join(where)}" for name, where in sorted(places.items()) if where[1:]
    ]
    print("\n".join(errors) or "every class has a name of its own")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
