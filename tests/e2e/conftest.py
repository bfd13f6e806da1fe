"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from backends import Backend


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Backend:
    """The backend that :func:`backends.over` asks for; skips where its library is missing."""
    chosen: Backend = request.param
    chosen.require()
    return chosen
