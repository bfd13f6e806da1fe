"""Plugin of runs in which proxies have several processes: ``PD_TEST_PROXY_WORKERS=2``.

Only tests of proxies run, once more: those with a fixture that makes proxies. Tests marked
``one_process`` are left out for the reason that the mark gives. A test that starts no proxy of
several processes fails, so that none runs to no purpose.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PROCESSES = int(os.environ.get("PD_TEST_PROXY_WORKERS", "1"))
PROXY_TESTS = str(Path(__file__).parent / "proxy")

# Fixtures that have proxies, or make them.
_FIXTURES = {"cluster", "clients", "keyless", "model_dir"}


def _has_proxies(item: pytest.Item) -> bool:
    return not _FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen, rest = [], []
    for item in items:
        marker = item.get_closest_marker("one_process")
        if marker is not None and not (marker.args and marker.args[0]):
            raise pytest.UsageError(f"{item.nodeid}: the mark one_process needs a reason")
        (chosen if marker is None and _has_proxies(item) else rest).append(item)
    config.hook.pytest_deselected(items=rest)
    items[:] = chosen


@pytest.fixture(scope="session", autouse=True)
def forked_children() -> Iterator[None]:
    """Start processes of proxies quickly."""
    sys.path.insert(0, PROXY_TESTS)
    from forked_children import fork_children

    yield from fork_children()


@pytest.fixture(autouse=True)
def several_processes(forked_children: None) -> Iterator[None]:
    """Fail where the test has had no proxy of several processes."""
    from forked_children import ForkedChild

    yield
    assert ForkedChild.living or ForkedChild.ended, "mark one_process: it has no process of a proxy"
    ForkedChild.ended = 0
