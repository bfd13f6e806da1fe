"""The mark ``sample``: which cells of a matrix ``make test`` runs. The others are ``full``."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import pytest
from covering import every_two

if TYPE_CHECKING:
    from collections.abc import Iterable


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Apply ``sample``: ``make test`` runs those cells of a matrix of which its function is true.

    The function takes a cell's parameters by name. Parameters that carry marks themselves could not
    do this where a fixture of a module is one of several: pytest would make that fixture again for
    every cell. Cells of which ``exist`` is not true are no tests at all. Without a function so many
    cells are run that every two values of different parameters occur together.
    """
    matrices: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in list(items):
        marker = item.get_closest_marker("sample")
        if marker is None:
            continue
        assert isinstance(item, pytest.Function)
        if "cells" not in marker.kwargs:
            matrices[item.nodeid.partition("[")[0]].append(item)
            continue
        if not marker.kwargs.get("exist", lambda _: True)(item.callspec.params):
            items.remove(item)
            continue
        item.own_markers = [mark for mark in item.own_markers if mark.name != "full"]
        if not marker.kwargs["cells"](item.callspec.params):
            item.add_marker("full")
    for matrix in matrices.values():
        _sample_pairs(matrix)


def _sample_pairs(matrix: Iterable[pytest.Function]) -> None:
    """Mark all but a few cells of a matrix ``full``. Those that are marked already stay so.

    Values are known by their identity, because some cannot be compared.
    """
    numbers: defaultdict[str, dict[int, int]] = defaultdict(dict)
    cells = {
        tuple(
            numbers[name].setdefault(id(value), len(numbers[name]))
            for name, value in item.callspec.params.items()
        ): item
        for item in matrix
        if item.get_closest_marker("full") is None
    }
    sampled = set(every_two(list(cells), 1))
    for cell, item in cells.items():
        if cell not in sampled:
            item.add_marker("full")
