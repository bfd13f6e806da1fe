"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from backends import Backend


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Apply ``sample``: ``make test`` runs those cells of a matrix of which its function is true.

    The function takes a cell's parameters by name. Parameters that carry marks themselves could not
    do this where a fixture of a module is one of several: pytest would make that fixture again for
    every cell. Cells of which ``exist`` is not true are no tests at all.
    """
    for item in list(items):
        marker = item.get_closest_marker("sample")
        if marker is None:
            continue
        assert isinstance(item, pytest.Function)
        if not marker.kwargs.get("exist", lambda _: True)(item.callspec.params):
            items.remove(item)
            continue
        item.own_markers = [mark for mark in item.own_markers if mark.name != "full"]
        if not marker.kwargs["cells"](item.callspec.params):
            item.add_marker("full")


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Backend:
    """The backend that :func:`backends.over` asks for; skips where its library is missing."""
    chosen: Backend = request.param
    chosen.require()
    return chosen
