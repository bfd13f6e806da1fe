"""Tests of the proxy once more with two processes behind its port. They are those that look at it
from outside only: a test that patches the proxy, or looks into it, has it in its own process.

The files on routing, bodies, workers, heartbeats, moves, writing, batches, failover, hand-offs and
failing nodes look into it in most of their tests, or count on all requests being one process's,
which alone notes how many failed at a node.
``test_proxy_admin`` starts processes by itself and patches how long a health check takes;
``test_proxy_processes`` tests administration with several. The other files test parts of the proxy
without a server.
"""

from __future__ import annotations

import pytest
from again import run_again


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("file", "every", "chosen"),
    [
        ("proxy/test_proxy_lifecycle.py", 3, ""),
        ("proxy/test_proxy_completions.py", 4, ""),
        ("proxy/test_proxy_chat.py", 4, ""),
        ("proxy/test_proxy_choices.py", 4, ""),
        ("proxy/test_proxy_reasoning.py", 4, ""),
        ("proxy/test_proxy_stream_interval.py", 4, ""),
        ("proxy/test_proxy_openai_client.py", 1, ""),
        ("proxy/test_proxy_errors.py", 20, "not a_body_is_bounded"),
        (
            "proxy/test_proxy_generate.py",
            3,
            "not fault_of_the_proxy and not first_event_waits and not large_events",
        ),
        ("proxy/test_proxy_tools.py", 8, ""),
        # Requests of another process, which a node's death concerned too, are not tried alone.
        ("proxy/test_proxy_failover_limits.py", 2, "not tried_one_at_a_time"),
        ("proxy/test_proxy_special_tokens.py", 4, ""),
        ("proxy/test_slow_readers.py", 1, ""),
        ("security/test_rids.py", 1, ""),
    ],
)
def test_with_two_processes(file: str, every: int, chosen: str) -> None:
    """Only some tests run of long files about single requests, which one process serves alone.
    ``chosen``: an expression that leaves out tests which have the proxy in their own process."""
    run_again(file, every, chosen, PD_TEST_PROXY_WORKERS="2")
