"""Fail when a package imports from a package it must not know (imports run downwards only), or when
modules import one another in a circle, be it inside of functions."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import NamedTuple

ENDS = {"core", "engine", "radix", "bootstrap", "transfer", "scheduling"}
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "models": {"core", "kernels"},
    "kernels": {"core"},
    "engine": {"core", "models", "kernels"},
    "radix": {"core"},
    "bootstrap": {"core"},
    "transfer": {"core", "kernels"},
    "speculative": {"core", "engine", "kernels"},
    "grammar": {"core", "engine"},
    "scheduling": {"core", "engine", "radix", "speculative", "grammar"},
    "prefill_node": ENDS,
    "decode_node": ENDS,
    "node": ENDS | {"grammar"},
    "unified_node": {"core", "scheduling", "node"},
    "proxy": {"core", "radix"},
    "cluster": {"core"},
    "batch": {"core"},
}
# Programs, which may import everything and which no package may import.
PROGRAMS = {"commands", "bench"}
# The half of the harness that makes load runs on hosts which have little of pd installed.
LOAD = Path("pd/bench/load")
LOAD_ALLOWED = ("pd.core", "pd.bench.load", "pd.bench.report")
# A request names, for types only, the classes of other packages that it carries.
TYPES_OF_OTHER_PACKAGES = {Path("pd/core/request.py")}
# The proxy and what it is made of, its client for batches, and what starts deployments, must start
# without torch.
NO_TORCH = {"core", "radix", "proxy", "bootstrap", "cluster", "batch"}


class Import(NamedTuple):
    """One imported module.

    ``names``: what a ``from`` import takes from it. ``for_types``: under ``if TYPE_CHECKING``.
    """

    line: int
    module: str
    names: tuple[str, ...]
    for_types: bool


def imports_of(source: str) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, for_types: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(node.lineno, a.name, (), for_types) for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = tuple(alias.name for alias in node.names)
            found.append(Import(node.lineno, node.module, names, for_types))
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                visit(child, True)
            for child in node.orelse:
                visit(child, for_types)
        else:
            for child in ast.iter_child_nodes(node):
                visit(child, for_types)

    visit(ast.parse(source), False)
    return found


def package_errors(path: Path, imports: list[Import]) -> list[str]:
    """Imports of a module that its package must not make."""
    package, errors = path.parts[1], []
    for found in imports:
        parts = found.module.split(".")
        if parts[0] == "torch" and package in NO_TORCH:
            errors.append(f"{path}:{found.line}: {package} must not import torch")
        if parts[0] == "pd" and path.is_relative_to(LOAD):
            allowed = found.module == "pd" or found.module.startswith(LOAD_ALLOWED)
            if not allowed:
                errors.append(f"{path}:{found.line}: {LOAD} must not import {found.module}")
        if parts[0] != "pd" or package not in ALLOWED:
            continue
        if found.for_types and path in TYPES_OF_OTHER_PACKAGES:
            continue
        # ``from pd import engine`` names packages, too.
        packages = {parts[1]} if len(parts) > 1 else set(found.names)
        errors += [
            f"{path}:{found.line}: {package} must not import pd.{other}"
            for other in sorted(packages - {package} - ALLOWED[package])
            if other in ALLOWED.keys() | PROGRAMS
        ]
    return errors


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which reaches every other one of its group."""
    reached = {module: _reachable(graph, module) for module in graph}
    groups = {
        tuple(sorted({module, *(m for m in reached[module] if module in reached[m])}))
        for module in graph
        if module in reached[module]
    }
    return [list(group) for group in sorted(groups)]


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        for module in graph[left.pop()] - found:
            found.add(module)
            left.append(module)
    return found


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def runtime_graph(imports: dict[str, list[Import]]) -> dict[str, set[str]]:
    """List the modules of pd that each module imports, be it later, but for types only."""
    graph: dict[str, set[str]] = {}
    for module, found in imports.items():
        targets: set[str] = set()
        for one in found:
            if not one.for_types:
                submodules = {f"{one.module}.{name}" for name in one.names} & imports.keys()
                # A package that only leads to its own modules is no end of the import.
                targets |= submodules
                if one.module in imports and len(submodules) < max(1, len(one.names)):
                    targets.add(one.module)
        graph[module] = targets
    return graph


def main() -> int:
    imports = {path: imports_of(path.read_text()) for path in sorted(Path("pd").rglob("*.py"))}
    errors = [error for path, found in imports.items() for error in package_errors(path, found)]
    graph = runtime_graph({module_name(path): found for path, found in imports.items()})
    errors += [f"import circle: {', '.join(circle)}" for circle in circles(graph)]
    print("\n".join(errors) or "imports run downwards")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
