"""Modules do not import each other in circles.

Imports inside functions count. Imports for types only do, too, except in the circles that are
listed here; that list must only become shorter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import grimp

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

# In each group every module imports every other one, directly or not.
TYPING_CIRCLES = [
    # A node answers GET /server_info, which describes the whole node.
    ("pd.node.info", "pd.node.node"),
    (
        # A job owns its generations and these their attempts, and each leads back to its owner.
        "pd.proxy.dispatch.attempt",
        "pd.proxy.dispatch.generation",
        "pd.proxy.dispatch.job",
    ),
]


def find_circles(package: str, *, with_types: bool) -> set[frozenset[str]]:
    """Find the groups in which every module imports every other one, directly or not."""
    graph = grimp.build_graph(package, cache_dir=None, exclude_type_checking_imports=not with_types)
    circles = set()
    for module in graph.modules:
        others = graph.find_upstream_modules(module) & graph.find_downstream_modules(module)
        if others:
            circles.add(frozenset({module, *others}))
    return circles


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not find_circles("pd", with_types=False)


def test_no_circle_of_imports_for_types_is_new_and_none_is_listed_in_vain() -> None:
    listed = {frozenset(circle) for circle in TYPING_CIRCLES}
    circles = find_circles("pd", with_types=True)
    new, gone = (
        "\n".join(sorted(str(tuple(sorted(circle))) for circle in group))
        for group in (circles - listed, listed - circles)
    )
    assert not new, f"Import downwards only, or use a Protocol. These circles are new:\n{new}"
    assert not gone, f"Well done. Take these circles out of the list:\n{gone}"


def _write_package(root: Path, **modules: str) -> None:
    package = root / "planted"
    package.mkdir()
    for name, source in {"__init__": "", **modules}.items():
        (package / f"{name}.py").write_text(source)


def test_a_circle_through_a_function_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    _write_package(
        tmp_path,
        first="from planted import second",
        second="import planted.third",
        third="def later():\n    from planted.first import something",
        fourth="import planted.first",
    )
    expected = {frozenset({"planted.first", "planted.second", "planted.third"})}
    assert find_circles("planted", with_types=False) == expected


def test_a_circle_for_types_is_found_only_with_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    _write_package(
        tmp_path,
        first="import planted.second",
        second=(
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from planted.first import It"
        ),
    )
    assert not find_circles("planted", with_types=False)
    assert find_circles("planted", with_types=True) == {
        frozenset({"planted.first", "planted.second"})
    }
