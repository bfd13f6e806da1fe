"""Fail if two classes of pd have the same name, because one of the names is then too vague."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

# Names that programs of vLLM and SGLang import, so `pd.offline` has them, too.
NAMES_OF_OTHERS = {"Engine", "SamplingParams"}


def main() -> int:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(Path("pd").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    errors = [
        f"class {name}: {', '.join(where)}"
        for name, where in sorted(places.items())
        if where[1:] and name not in NAMES_OF_OTHERS
    ]
    print("\n".join(errors) or "every class has a name of its own")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
