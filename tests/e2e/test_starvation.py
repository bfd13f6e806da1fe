"""A split that gets a quarter of its CPU time answers late, and answers all the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from backends import FAKE, PROCESSES, Backend, over
from busy import busy_loops, two_cores
from embedded.heldout import is_right, recall_examples
from processes import deployment
from test_recall import answer_in, ask

from pd.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS, LENGTH = 20, 1000
LOOPS = 6


@pytest.mark.starved
@over((*PROCESSES, FAKE))
@pytest.mark.timeout(600)
def test_every_answer_is_right_beside_six_busy_loops(backend: Backend, tmp_path: Path) -> None:
    examples = recall_examples(LENGTH, PROMPTS)
    flags = ("--transfer-backend", backend.flag, "--kv-cache-tokens", "32768")
    flags += ("--chunked-prefill-size", "512")
    split = deployment(EMBEDDED_MODEL, tmp_path, node_flags=flags, env=backend.env)
    with two_cores(), split as running, ThreadPoolExecutor(PROMPTS) as pool:
        with busy_loops(LOOPS):
            texts = list(pool.map(lambda e: answer_in(ask(running.proxy.url, e)), examples))
        running.wait_idle()
    wrong = [
        (example.turns[-1], text)
        for example, text in zip(examples, texts, strict=True)
        if not is_right(example, text)
    ]
    assert not wrong
