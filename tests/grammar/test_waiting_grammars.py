"""A request waits for its grammar on either node, without pages and without delaying
others."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster import wait_until
from grammar_nodes import JSON, PROMPTS, ask, cluster_of
from hand_off_helpers import CASES, check_abort, pages, rules, scripted

from pd import assembly
from pd.core.grammar import Grammar
from pd.core.messages import HEARTBEAT_INTERVAL

if TYPE_CHECKING:
    from pathlib import Path

    from cluster import Cluster

    from pd.core.config import NodeConfig
    from pd.grammar.grammars import Grammars


class HeldBack:
    """The grammars of one node. They arrive when a test releases them."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self.held: list[tuple[Grammar, Any, str]] = []

    def request_rules(self, grammar: Grammar, done: Any, owner: str = "", **_: Any) -> None:
        self.held.append((grammar, done, owner))

    def let_go(self, place: int = 0) -> None:
        self._grammars.request_rules(*self.held.pop(place))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammars, name)


def hold_back(
    monkeypatch: pytest.MonkeyPatch, grammars: Grammars, roles: tuple[str, ...]
) -> dict[str, HeldBack]:
    """Make nodes of these roles wait for their grammars, if they start after this call."""
    held = {role: HeldBack(grammars) for role in roles}

    def make(config: NodeConfig, engine: object) -> Any:
        return held.get(config.role, grammars)

    monkeypatch.setattr(assembly, "make_grammars", make)
    return held


@pytest.mark.parametrize(("state", "told"), CASES)
def test_an_abort_under_a_grammar_ends_the_room_on_both_nodes(
    tmp_path: Path, model: Path, shared_grammars: Grammars, state: str, told: str
) -> None:
    """We abort in every state after the compilation."""
    grammar, known = Grammar("regex", "[ab]{300}"), threading.Event()
    shared_grammars.request_rules(grammar, lambda _: known.set())
    assert known.wait(30)
    settings = scripted(tmp_path, *rules(state)) | {"max_running_requests": 1}
    with cluster_of(model, "split", **settings) as cluster:
        check_abort(cluster, state, told, grammar=grammar)


def held_pages(cluster: Cluster) -> list[int]:
    return [pages(server)["locked"] + pages(server)["reserved"] for server in cluster.pair]


@pytest.mark.parametrize("roles", [("prefill",), ("decode",), ("prefill", "decode")])
def test_a_request_that_waits_for_its_grammar_holds_no_pages(
    monkeypatch: pytest.MonkeyPatch, model: Path, shared_grammars: Grammars, roles: tuple[str, ...]
) -> None:
    """Either node may still compile it. A prompt computed meanwhile stays cached."""
    held = hold_back(monkeypatch, shared_grammars, roles)
    with cluster_of(model, "split") as cluster:
        other = ask(cluster, PROMPTS[0], max_tokens=20, ignore_eos=True)
        waiting = ask(cluster, PROMPTS[1], grammar=JSON, temperature=1.0, seed=1)
        wait_until(lambda: all(each.held for each in held.values()), 10)
        assert len(other.tokens()) == 20
        wait_until(lambda: not any(held_pages(cluster)), 10, cluster.nodes[0].node.server_info)
        until = time.monotonic() + 2 * HEARTBEAT_INTERVAL
        while time.monotonic() < until:
            assert held_pages(cluster) == [0, 0]
            time.sleep(0.05)
        assert not waiting.done.is_set()
        assert len(ask(cluster, PROMPTS[0], max_tokens=20, ignore_eos=True).tokens()) == 20
        assert len(waiting.choices[0].tokens) == ("prefill" not in roles), "token 1 is early"
        for each in held.values():
            each.let_go()
        found = waiting.tokens()
        cluster.wait_idle(30.0)
    monkeypatch.setattr(assembly, "make_grammars", lambda *_: shared_grammars)
    with cluster_of(model, "unified") as cluster:
        assert ask(cluster, PROMPTS[1], grammar=JSON, temperature=1.0, seed=1).tokens() == found


def test_grammars_may_be_ready_in_any_order(
    monkeypatch: pytest.MonkeyPatch, model: Path, shared_grammars: Grammars, seed: int
) -> None:
    """We also abort some requests, and memory is short."""
    rng = random.Random(seed)
    held = hold_back(monkeypatch, shared_grammars, ("prefill", "decode"))
    names = [f"{number:02}" for number in range(12)]
    with cluster_of(model, "split", kv_cache_tokens=400, reserved_decode_tokens=4) as cluster:
        asked = {
            name: ask(cluster, rng.choice(PROMPTS), grammar=Grammar("regex", f"{name}[ab]{{20}}"))
            for name in names
        }
        wait_until(lambda: all(len(each.held) == len(names) for each in held.values()), 10)
        aborted = set(rng.sample(names, 3))
        todo: list[Any] = [
            *(each.let_go for each in held.values() for _ in names),
            *(lambda name=name: cluster.client.abort(asked[name]) for name in aborted),
        ]
        rng.shuffle(todo)
        for each in todo:
            if each.__name__ == "let_go":
                each(rng.randrange(len(each.__self__.held)))
            else:
                each()
            time.sleep(rng.choice((0.0, 0.01, 0.05)))
        for name in set(names) - aborted:
            assert len(asked[name].tokens()) > 20
        cluster.wait_idle(30.0)
