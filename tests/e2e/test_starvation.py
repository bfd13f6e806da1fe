"""A split that gets a quarter of its CPU time answers late, and answers all the same.

Failover is off, which would hide requests that fail.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from backends import FAKE, IN_PROCESS, PROCESSES, Backend, over
from busy import busy_loops, two_cores
from cluster import Cluster
from embedded.heldout import Example, is_right, recall_examples
from processes import deployment
from test_recall import answer_in, ask, serve, settings
from troubles import no_troubles

from pd.embedded import EMBEDDED_MODEL

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))

from nvlink_shm import nodes_in_shared_memory

PROMPTS, LENGTH = 20, 1000
LOOPS = 6


def answers(url: str) -> list[tuple[Example, str]]:
    """The examples and their answers, all asked at once."""
    examples = recall_examples(LENGTH, PROMPTS)
    with ThreadPoolExecutor(PROMPTS) as pool:
        texts = pool.map(lambda example: answer_in(ask(url, example)), examples)
        return list(zip(examples, texts, strict=True))


def wrong(answered: list[tuple[Example, str]]) -> list[tuple[Example, str]]:
    return [(example, text) for example, text in answered if not is_right(example, text)]


@pytest.mark.starved
@over((*PROCESSES, FAKE))
@pytest.mark.timeout(600)
def test_every_answer_is_right_beside_six_busy_loops(backend: Backend, tmp_path: Path) -> None:
    flags = ("--transfer-backend", backend.flag, "--kv-cache-tokens", "32768")
    flags += ("--chunked-prefill-size", "512")
    options = {"node_flags": flags, "proxy_flags": ("--failover", "off"), "env": backend.env}
    with two_cores(), deployment(EMBEDDED_MODEL, tmp_path, **options) as running:
        with busy_loops(LOOPS), no_troubles(running.proxy.url):
            answered = answers(running.proxy.url)
        running.wait_idle()
    assert not wrong(answered)


def check_starved_process(backend: str) -> None:
    """A thread that has the interpreter's lock and no CPU holds up all threads of both nodes."""
    with two_cores(), Cluster(EMBEDDED_MODEL, **settings(transfer_backend=backend)) as cluster:
        with serve(cluster) as proxy, busy_loops(LOOPS), no_troubles(proxy.url):
            answered = answers(proxy.url)
        cluster.wait_idle()
    assert not wrong(answered)


@pytest.mark.starved
@over(IN_PROCESS)
@pytest.mark.timeout(600)
def test_every_answer_is_right_of_nodes_that_share_a_starved_process(backend: Backend) -> None:
    check_starved_process(backend.flag)


@pytest.mark.starved
@pytest.mark.timeout(600)
def test_every_answer_is_right_over_nvlink_in_a_starved_process() -> None:
    """Its GPUs are shared memory, and its streams are threads."""
    with nodes_in_shared_memory() as devices:
        check_starved_process("nvlink")
        assert devices[0].launched >= PROMPTS
