"""Output under a grammar: valid, and the same on every deployment and with every drafter, together
with every other feature of a request."""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from covering import every_two
from grammar_model import EOS
from grammar_nodes import (
    DRAFTERS,
    FEATURES,
    JSON,
    PROMPT_OF,
    PROMPTS,
    SCHEMA,
    STOP_ID,
    STOP_TEXTS,
    answers,
    ask,
    check_answers,
    cluster_of,
    same_answers,
    share_grammars,
)
from lagging_device import LaggingDevice
from tokenizers import Tokenizer

from pd import assembly
from pd.core.errors import InvalidRequestError, UnavailableError
from pd.core.grammar import Grammar
from pd.engine import rule_budget
from pd.grammar.compiler import CompileLimits
from pd.grammar.grammars import Grammars, MakeRules
from pd.grammar.rules import GrammarRules
from pd.node import intake

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from grammar_nodes import Answers


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Answers]:
    with cluster_of(model, "unified", overlap_schedule="off") as cluster:
        yield answers(cluster)


def test_output_matches_the_grammar(model: Path, plain: Answers) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    checked = 0
    for name, params in FEATURES.items():
        for tokens in plain[name].result():
            is_stopped = tokens[-1] in params.get("stop_token_ids", ())
            has_end = is_stopped or tokens[-1] == EOS
            text = tokenizer.decode(tokens[: -1 if has_end else None], skip_special_tokens=False)
            if name == "stop texts" and is_stopped:
                continue
            if "ends_after" in params:
                assert text.startswith('{"name"') and tokens[-1] in params["ends_after"]
            elif params.get("grammar") is JSON and "max_tokens" not in params:
                assert tokens[-1] == EOS or is_stopped, (name, text)
                jsonschema.validate(json.loads(text), SCHEMA)
                checked += 1
            elif name == "regex":
                assert set(text) <= set("abxy")
            elif name == "ebnf":
                assert text in ("no" * n + "yes" for n in range(100))
            elif name == "tags" and has_end:
                check_tags(text)
            elif name == "triggers":
                numbers = re.findall(",[1-9][0-9]\\.", text)
                assert 0 < len(numbers) >= text.count(",") - 1, text
    assert checked > 10
    assert {tokens[-1] for tokens in plain["stop ids"].result()} == {STOP_ID}
    for name in ("stop ids", "stop texts"):
        assert plain[name].choices[0].finish.matched == plain[name].tokens()[-1]


def check_tags(text: str) -> None:
    """Check a list of strings and objects, each between a letter and a full stop."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        schema = {"a": {"type": "string", "maxLength": 4}, "b": SCHEMA}[text[at]]
        value, end = decoder.raw_decode(text, at + 1)
        jsonschema.validate(value, schema)
        assert text[end : end + 2] in (".;", "."), text
        at = end + 2


def test_a_stop_token_with_text_is_allowed_where_the_grammar_has_this_text(
    model: Path, plain: Answers
) -> None:
    """It is not allowed where the output is complete, because its text belongs to the output."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert [tokenizer.id_to_token(token) for token in STOP_TEXTS] == [",", ":"]
    stopped = [each for each in plain["stop texts"].result() if each[-1] in STOP_TEXTS]
    assert stopped
    for tokens in stopped:
        assert not set(tokens[:-1]) & set(STOP_TEXTS)
        assert tokenizer.decode(tokens).startswith('{"name"')
    comma, colon = STOP_TEXTS
    a, b = (tokenizer.token_to_id(letter) for letter in "ab")
    wanted = Grammar("regex", "a,b")
    with cluster_of(model, "unified") as cluster:
        for stop_ids, expected in (
            ((comma,), [a, comma]),
            ((colon,), [a, comma, b, EOS]),
            ((STOP_ID, comma), [a, comma]),
        ):
            asked = ask(cluster, PROMPTS[0], grammar=wanted, stop_token_ids=stop_ids)
            assert asked.tokens() == expected
            assert asked.choices[0].finish.matched == expected[-1]
        biased = {"stop_token_ids": (STOP_ID,), "logit_bias": {STOP_ID: 90.0}}
        asked = ask(cluster, PROMPTS[0], grammar=wanted, ignore_eos=True, **biased)
        assert asked.tokens() == [a, comma, b, STOP_ID]
        asked = ask(cluster, PROMPTS[0], grammar=wanted, stop_token_ids=(comma,), min_tokens=3)
        assert asked.tokens() == [a, comma, b, EOS]


LITTLE_MEMORY = {"kv_cache_tokens": 320, "reserved_decode_tokens": 1}
COLUMNS: tuple[tuple[Any, ...], ...] = (
    ("split", "unified"),
    tuple(DRAFTERS),
    ("on", "off"),  # overlap
    (1, 4, 16),  # tokens of a page
    (True, False),  # whether memory is short, so that answers are retracted
    (1, 2),  # GPUs of a node
    (True, False),  # whether other requests are aborted meanwhile
)


def cost(cell: tuple[Any, ...]) -> float:
    """Each node with two GPUs starts a process, and that takes longer than everything else."""
    if cell[5] == 1:
        return 1.0
    return 1.5 if cell[0] == "unified" else 2.0


# Every two values of different columns, but these: what drafters have to do with page sizes and
# ranks is in tests/speculative/test_pairs.py.
APART = [(1, 3), (1, 5), (3, 5)]
CELLS = every_two(list(itertools.product(*COLUMNS)), 36, cost, apart=APART)
# Every page size and deployment, with and without what disturbs it, and the drafters that differ
# most.
SHARP = [
    ("split", "eagle", "on", 16, True, 1, False),
    ("unified", "none", "on", 4, True, 2, True),
    ("split", "tree", "on", 1, False, 1, True),
    ("unified", "draft", "off", 16, False, 1, True),
]
assert set(SHARP) <= set(CELLS)


def test_every_two_circumstances_occur_together() -> None:
    for (i, some), (j, others) in itertools.combinations(enumerate(COLUMNS), 2):
        if (i, j) in APART:
            continue
        assert {(cell[i], cell[j]) for cell in CELLS} == set(itertools.product(some, others))


def test_every_two_features_of_a_request_occur_together() -> None:
    """We combine features that interact: sampling, and these four."""
    names = ("temperature", "n", "logprobs", "min_tokens", "ends_after")
    found = [[name in params for name in names] for params in FEATURES.values()]
    for i, j in itertools.combinations(range(len(names)), 2):
        assert len({(each[i], each[j]) for each in found}) == 4, (names[i], names[j])


@pytest.mark.parametrize(
    ("kind", "drafter", "overlap", "page_size", "is_short", "tp_size", "aborts"),
    [
        pytest.param(
            *cell,
            id="-".join(map(str, cell)),
            marks=() if cell in SHARP else pytest.mark.full,
        )
        for cell in CELLS
    ],
)
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("forked_ranks")
def test_every_deployment_gives_the_same_output(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    plain: Answers,
    seed: int,
    kind: str,
    drafter: str,
    overlap: str,
    page_size: int,
    is_short: bool,
    tp_size: int,
    aborts: bool,
) -> None:
    settings = {"overlap_schedule": overlap, "page_size": page_size, "tp_size": tp_size}
    settings |= LITTLE_MEMORY if is_short else {}
    aborting = random.Random(seed) if aborts else None
    check_answers(monkeypatch, model, plain, kind, drafter, settings, aborting, is_short=is_short)


@pytest.mark.parametrize(
    ("kind", "drafter"),
    [("split", "ngram"), pytest.param("unified", "tree", marks=pytest.mark.full)],
)
def test_a_request_can_resume_after_any_token(
    model: Path, plain: Answers, kind: str, drafter: str
) -> None:
    """The grammar continues from its state after the output of other nodes."""
    with cluster_of(model, kind, **DRAFTERS[drafter]) as cluster:
        asked = [
            (ask(cluster, PROMPT_OF[name], produced=tokens[:cut], **params), plain[name])
            for name, params in FEATURES.items()
            if params.get("n", 1) == 1
            for tokens in plain[name].result()
            for cut in sorted({1, len(tokens) // 2, len(tokens) - 1})
            if 0 < cut < len(tokens)
        ]
        assert len(asked) > 20
        for pending, known in asked:
            assert pending.tokens() == known.tokens()
            assert pending.choices[0].finish == known.choices[0].finish
        cluster.wait_idle(30.0)


def test_an_output_is_replayed_without_the_lock(
    model: Path, plain: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests do not wait for the grammar of a resumed one."""
    held: list[bool] = []
    restore = intake.restore_sampling
    tokens = plain["greedy"].tokens()
    with cluster_of(model, "unified") as cluster:
        lock: Any = cluster.unified[0].node.core.events.lock

        def watched(*args: Any) -> None:
            held.append(lock._is_owned())
            restore(*args)

        monkeypatch.setattr(intake, "restore_sampling", watched)
        resumed = ask(cluster, PROMPTS[0], produced=tokens[:5], **FEATURES["greedy"])
        assert resumed.tokens() == tokens
    assert held == [False]


def test_a_replay_without_a_thread_fails_and_later_ones_succeed(
    model: Path, plain: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We try a known grammar (its result goes to the control thread) and new ones (their results go
    to the compiling threads)."""
    start = threading.Thread.start

    def no_replay(self: threading.Thread) -> None:
        if self.name.startswith("grammar-replay"):
            raise RuntimeError("can't start new thread")
        start(self)

    tokens = plain["greedy"].tokens()
    new = [Grammar("json_schema", json.dumps(SCHEMA, indent=indent)) for indent in range(1, 5)]
    with cluster_of(model, "unified") as cluster:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_replay)
            for grammar in (JSON, *new[:3]):
                asked = ask(cluster, PROMPTS[0], produced=tokens[:5], grammar=grammar)
                with pytest.raises(UnavailableError, match="can't start new thread"):
                    asked.tokens()
        for grammar in (JSON, new[0], new[3]):
            assert ask(cluster, PROMPTS[0], produced=tokens[:5], grammar=grammar).tokens() == tokens
        cluster.wait_idle(30.0)


NO_TOKEN = "it leaves no token that the model could go on with (or "
# Rules that never end, how many tokens come before one, and what is said.
IMPOSSIBLE = [
    (Grammar("ebnf", "root ::= root"), 0, NO_TOKEN),
    # xgrammar itself refuses this since 0.2.9, in its own words.
    (Grammar("json_schema", '{"$ref": "#"}'), 0, ""),
    (Grammar("ebnf", 'root ::= "a" dead\ndead ::= "b" dead2\ndead2 ::= dead2'), 2, NO_TOKEN),
]


@pytest.mark.parametrize(("kind", "drafter"), [("unified", "none"), ("split", "ngram")])
def test_a_grammar_that_leaves_no_token_ends_its_request_with_an_error(
    model: Path, kind: str, drafter: str
) -> None:
    """The prefill node of a pair samples token 1. Other requests continue."""
    with cluster_of(model, kind, **DRAFTERS[drafter]) as cluster:
        other = ask(cluster, PROMPTS[1], grammar=JSON)
        asked = [(*each, ask(cluster, PROMPTS[0], grammar=each[0])) for each in IMPOSSIBLE]
        for grammar, count, said, pending in asked:
            with pytest.raises(InvalidRequestError) as caught:
                pending.result()
            assert str(caught.value).startswith(f"{grammar.kind}: {said}")
            assert caught.value.param == grammar.kind
            assert len(pending.choices[0].tokens) == count
        assert other.tokens()[-1] == EOS
        cluster.wait_idle(30.0)


def test_late_steps_change_nothing(model: Path, plain: Answers) -> None:
    """On a device that computes late, rules must know every token before they answer."""
    with cluster_of(model, "unified", overlap_schedule="on") as cluster:
        device = LaggingDevice(cluster.unified[0])
        same_answers(answers(cluster), plain)
        assert device.ahead > 20


def test_metrics_count_the_outcomes_of_grammars(model: Path) -> None:
    with share_grammars(model), cluster_of(model, "unified") as cluster:
        for grammar in (JSON, JSON, Grammar("regex", "ok")):
            assert ask(cluster, PROMPTS[0], grammar=grammar, max_tokens=9).tokens()
        with pytest.raises(InvalidRequestError):
            ask(cluster, PROMPTS[0], grammar=Grammar("regex", "(")).tokens()
        text = cluster.unified[0].node.core.metrics.render_text().decode()
    for line in (
        'pd_grammars_total{outcome="cached"} 1.0',
        'pd_grammars_total{outcome="compiled"} 2.0',
        'pd_grammars_total{outcome="refused"} 1.0',
        "pd_grammars_waiting 0.0",
        "pd_grammar_compile_seconds_count 3.0",
    ):
        assert line in text.splitlines(), line


def test_requests_waiting_for_their_grammar_can_be_aborted(model: Path) -> None:
    """Other requests do not wait for them."""
    slow = Grammar("ebnf", "root ::= " + " ".join('("a" | "b")?' for _ in range(40)))
    held: list[Any] = []

    class Held(Grammars):
        def request_rules(self, grammar: Grammar, done: Any, owner: str = "", **_: Any) -> None:
            held.append(done)

    with pytest.MonkeyPatch.context() as patch:
        held_back = Held("none", CompileLimits(0.0, 0, 0), 0)
        patch.setattr(assembly, "make_grammars", lambda *_: held_back)
        with cluster_of(model, "split") as cluster:
            waiting = ask(cluster, PROMPTS[0], grammar=slow)
            assert len(ask(cluster, PROMPTS[1]).tokens()) > 0
            # They count in the first queue of a node.
            queued = [next(iter(node.node.count_queues().values())) for node in cluster.pair]
            assert queued == [1, 1]
            cluster.client.abort(waiting)
            cluster.wait_idle(30.0)
            for done in held:  # what comes too late is not used
                done(InvalidRequestError("it is none"))
            cluster.wait_idle(30.0)


def test_a_grammar_whose_masks_take_too_long_ends_its_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with an error, another stream continues, and we refuse the grammar from then on."""
    monkeypatch.setattr(rule_budget, "BASE_SECONDS", 0.25)
    slow = Grammar("regex", "[ab]{20}slow")
    fill_mask = GrammarRules.fill_mask

    def busy(self: GrammarRules, mask: Any) -> None:
        fill_mask(self, mask)
        until = time.thread_time() + 0.15
        while self.num_filled >= 3 and self.is_slow and time.thread_time() < until:
            pass
        self.num_filled += 1

    monkeypatch.setattr(GrammarRules, "num_filled", 0, raising=False)
    monkeypatch.setattr(GrammarRules, "is_slow", False, raising=False)

    def together(rules: list[GrammarRules], masks: Any, rows: list[int]) -> None:
        for each, row in zip(rules, rows, strict=True):
            each.fill_mask(masks[row])

    monkeypatch.setattr(GrammarRules, "fill_mask", busy)
    monkeypatch.setattr(GrammarRules, "fill_together", staticmethod(together))
    want = Grammars.request_rules

    def wanted(
        self: Grammars, grammar: Grammar, done: Any, owner: str = "", **options: Any
    ) -> None:
        class MakeSlow(MakeRules):
            def __call__(self, ending: Any) -> Any:
                rules: Any = super().__call__(ending)
                rules.is_slow = True
                return rules

        def marked(found: Any) -> None:
            is_slow = grammar == slow and isinstance(found, MakeRules)
            done(MakeSlow(**vars(found)) if is_slow else found)

        want(self, grammar, marked, owner, **options)

    monkeypatch.setattr(Grammars, "request_rules", wanted)
    with cluster_of(model, "split", overlap_schedule="on") as cluster:
        other = ask(cluster, PROMPTS[1], grammar=JSON)
        with pytest.raises(InvalidRequestError, match="tokens of the output took"):
            ask(cluster, PROMPTS[0], grammar=slow).tokens()
        assert other.tokens()[-1] == EOS
        with pytest.raises(InvalidRequestError, match="tokens of the output took"):
            ask(cluster, PROMPTS[0], grammar=slow).tokens()
        cluster.wait_idle(30.0)
