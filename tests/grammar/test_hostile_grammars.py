"""Random texts as grammars: each is served or refused, and other streams go on."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from grammar_model import make_model
from grammar_nodes import ask, cluster_of, share_grammars

from pd.core.errors import InvalidRequestError
from pd.core.grammar import Grammar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.core.grammar import GrammarKind

SEED = int(os.environ.get("PD_TEST_SEED", random.randrange(1 << 31)))
KINDS: tuple[GrammarKind, ...] = ("regex", "ebnf", "json_schema", "structural_tag")
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
    """Pieces of a kind, or bytes."""
    kind = rng.choice(KINDS)
    if rng.random() < 0.3:
        return Grammar(
            kind, bytes(rng.randrange(256) for _ in range(rng.randrange(80))).decode("latin-1")
        )
    return Grammar(kind, "".join(rng.choice(PIECES[kind]) for _ in range(rng.randrange(14))))


def resident_bytes() -> int:
    """Memory of this process, in which the nodes are."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"))
    with share_grammars(path):
        yield path


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.full)])
@pytest.mark.timeout(1500)
def test_random_texts_are_served_or_refused(model: Path, count: int) -> None:
    print(f"PD_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    served, before = 0, resident_bytes()
    with cluster_of(model, "split", max_running_requests=64) as cluster:
        other = ask(cluster, [1, 2, 3], max_tokens=500, ignore_eos=True)
        for start in range(0, count, 100):
            asked = [
                ask(cluster, [5, 6, 7], grammar=random_grammar(rng), temperature=1.0, max_tokens=5)
                for _ in range(min(100, count - start))
            ]
            for pending in asked:
                try:
                    pending.result(300)
                    served += 1
                except InvalidRequestError as error:
                    assert str(error)
        assert len(other.tokens()) == 500
        assert ask(cluster, [1, 2, 3], grammar=Grammar("regex", "ok"), max_tokens=9).tokens()
        cluster.wait_idle(30.0)
    assert 0 < served < count
    # What nodes remember of grammars is 64 MiB for each of two caches.
    grown = resident_bytes() - before
    print(f"{served} of {count} served; memory grew by {grown >> 20} MiB")
    assert grown < 512 << 20
