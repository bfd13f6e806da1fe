"""Fail when a room imports from a room it must not know (imports run downwards only)."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

NODE = {"core", "engine", "radix", "bootstrap", "transfer", "scheduling", "node"}
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "models": {"core", "kernels"},
    "kernels": {"core"},
    "engine": {"core", "models", "kernels"},
    "radix": {"core"},
    "bootstrap": {"core"},
    "transfer": {"core", "kernels"},
    "scheduling": NODE,
    "node": NODE - {"node"},
    "prefill_node": NODE,
    "decode_node": NODE,
    "unified_node": NODE | {"prefill_node", "decode_node"},
    "proxy": {"core", "radix"},
}
# The proxy and what it is made of must start without torch.
NO_TORCH = {"core", "radix", "proxy", "bootstrap"}


def imported_modules(path: Path) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.lineno, node.module))
    return found


def main() -> int:
    errors = []
    for room, allowed in ALLOWED.items():
        for path in sorted(Path("pd", room).rglob("*.py")):
            for line, module in imported_modules(path):
                parts = module.split(".")
                if parts[0] == "torch" and room in NO_TORCH:
                    errors.append(f"{path}:{line}: {room} must not import torch")
                if parts[0] != "pd" or len(parts) < 2:
                    continue
                if parts[1] != room and parts[1] in ALLOWED and parts[1] not in allowed:
                    errors.append(f"{path}:{line}: {room} must not import {module}")
    print("\n".join(errors) or "imports run downwards")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
