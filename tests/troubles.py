"""Failures of nodes that clients of a proxy need not notice."""

from __future__ import annotations

import contextlib
import re
import threading
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator

# Breakers keep a node out for a second at least.
_INTERVAL = 0.25


@contextlib.contextmanager
def no_troubles(proxy_url: str) -> Iterator[None]:
    """Check that the proxy can always use every node, and that no answer failed over.

    A node that is given up, taken out by a breaker or stuck has a problem in ``GET /workers``.
    """
    problems: set[str] = set()
    ended = threading.Event()

    def watch() -> None:
        with httpx.Client(base_url=proxy_url, timeout=60) as client:
            while not ended.wait(_INTERVAL):
                for worker in client.get("/workers").json()["workers"]:
                    if worker["problem"]:
                        problems.add(f"{worker['role']}: {worker['problem']}")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    assert not problems
    assert not failovers(proxy_url)


def failovers(proxy_url: str) -> dict[str, float]:
    """Count answers that failed over, or could not, by outcome."""
    text = httpx.get(f"{proxy_url}/metrics", timeout=60).text
    counts = re.findall(r'^pd_proxy_failovers_total\{outcome="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {outcome: float(count) for outcome, count in counts}
