"""Random texts as grammars: each is served or refused, and other streams continue."""

from __future__ import annotations

import itertools
import os
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster import wait_until
from grammar_nodes import ask, cluster_of

from pd.core.errors import InvalidRequestError
from pd.core.grammar import Grammar

if TYPE_CHECKING:
    from cluster import Pending

    from pd.core.grammar import GrammarKind

SEED = int(os.environ.get("PD_TEST_SEED", random.randrange(1 << 31)))
KINDS: tuple[GrammarKind, ...] = ("regex", "ebnf", "json_schema", "structural_tag")
# Most tokens of the stream beside each batch, which would end after the batch, and seconds that it
# may pause on a busy machine.
STREAMED, MAX_PAUSE = 1000, 5.0
PIECES: dict[GrammarKind, list[str]] = {
    "regex": [
        *"abé()[]{}|*+?.^$\\-,09",
        *("{2,5}", "{0,999}", "(?:", "[^a]", "\\d", "\\u00e4", "(a|b)"),
    ],
    "ebnf": [
        *("root ::= ", "x ::= ", '"a"', "[a-z]", "x", "root", "(", ")", "*", "+", "{3}", "|"),
        *("\n", "é", '"'),
    ],
    "json_schema": [
        *('{"type": ', '"object"', '"string"', "}", "]", "[", ",", '"anyOf": [', "true", "1e999"),
        *('"properties": {', '"a": ', '{"$ref": "#"}', '"maxLength": ', "-1", '"enum": []', "null"),
    ],
    "structural_tag": [
        *('{"type": "structural_tag", "format": ', '{"type": "const_string", "value": "a"}', "}"),
        *('{"type": "sequence", "elements": [', "]", ",", '{"type": "any_text"}', "null", "1"),
    ],
}


def random_grammar(rng: random.Random) -> Grammar:
    """Join pieces of a kind, or bytes."""
    kind = rng.choice(KINDS)
    if rng.random() < 0.3:
        return Grammar(
            kind, bytes(rng.randrange(256) for _ in range(rng.randrange(80))).decode("latin-1")
        )
    return Grammar(kind, "".join(rng.choice(PIECES[kind]) for _ in range(rng.randrange(14))))


@pytest.fixture(scope="module", autouse=True)
def one_child() -> None:
    """These tests use as many children as nodes do."""


def resident_bytes() -> int:
    """Return the memory of this process, with the nodes, and of its compiling children."""
    pids = [os.getpid(), *(int(pid) for pid in _children())]
    return sum(map(_resident_pages, pids)) * os.sysconf("SC_PAGE_SIZE")


def _children() -> list[str]:
    tasks = Path("/proc/self/task").iterdir()
    return [pid for task in tasks for pid in (task / "children").read_text().split()]


def _resident_pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:  # it has ended
        return 0


def longest_pause(stream: Pending, others: list[Pending]) -> float:
    """Return the longest time between two tokens of a stream while others were not done."""
    longest, count, since = 0.0, 0, time.monotonic()
    while not stream.done.is_set() and not all(each.done.is_set() for each in others):
        time.sleep(0.005)
        now, received = time.monotonic(), len(stream.choices[0].tokens)
        if received > count:
            count, since = received, now
        longest = max(longest, now - since)
    return longest


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.full)])
@pytest.mark.timeout(1500)
def test_random_texts_are_served_or_refused(model: Path, count: int) -> None:
    print(f"PD_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    served, started = 0, Grammar("regex", "ok")
    with cluster_of(model, "split", max_running_requests=64) as cluster:
        assert ask(cluster, [1, 2, 3], grammar=started, max_tokens=9).tokens()
        assert _children()
        memory, pauses, received = [resident_bytes()], [], []
        for start in range(0, count, 100):
            other = ask(cluster, [1, 2, start % 400], max_tokens=STREAMED, ignore_eos=True)
            tokens = other.choices[0].tokens
            wait_until(tokens.__len__, 60.0)
            known = len(tokens)
            asked = [
                ask(cluster, [5, 6, 7], grammar=random_grammar(rng), temperature=1.0, max_tokens=5)
                for _ in range(min(100, count - start))
            ]
            pauses.append(longest_pause(other, asked))
            received.append(len(tokens) - known)
            for pending in asked:
                try:
                    pending.result(300)
                    served += 1
                except InvalidRequestError as error:
                    assert str(error)
            # A text may be compiled for seconds, in which the stream comes to its end.
            assert len(tokens) == STREAMED or not other.done.is_set()
            cluster.client.abort(other)
            memory.append(resident_bytes())
        assert ask(cluster, [1, 2, 3], grammar=started, max_tokens=9).tokens()
        cluster.wait_idle(30.0)
        grown = resident_bytes() - memory[0]
    assert 0 < served < count
    assert min(received) > 0
    assert max(pauses) < MAX_PAUSE
    # A single grammar may leave a process a hundred MiB larger, whenever it comes. What each leaves
    # shows in most batches; this test's client keeps some KiB of each request.
    late = [after - before for before, after in itertools.pairwise(memory)][len(memory) // 2 :]
    batch = int(statistics.median(late))
    print(f"{served} of {count} served; memory grew by {grown >> 20} MiB")
    print(f"late batches: {batch >> 10} KiB")
    print(f"tokens beside each batch: {received}; longest pauses: {pauses}")
    assert grown < 1 << 30
    assert count < 10_000 or batch < 1 << 20
