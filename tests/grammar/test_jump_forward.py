"""Jump-forward: forced tokens join the output without being sampled, the same ones
on every deployment and with every drafter."""

from __future__ import annotations

import json
import queue
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
from counters import counter
from grammar_model import EOS, VOCAB_SIZE
from grammar_nodes import (
    FEATURES,
    JSON,
    PROMPT_OF,
    PROMPTS,
    SCHEMA,
    answers,
    ask,
    check_answers,
    cluster_of,
    same_answers,
    share_grammars,
    use_grammars,
)
from lagging_device import LaggingDevice
from tokenizers import Tokenizer

from pd.core.grammar import Grammar
from pd.grammar.jump_forward import MAX_BYTES, Retokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from grammar_nodes import Answers

    from pd.grammar.grammars import Grammars

FORCED = "pd_grammar_forced_tokens_total"
# The rest of a name is forced once its first token is drawn.
NAMES = {"enum": ["green and blue", "tags, tags and more tags"]}


@pytest.fixture(scope="module")
def jumping(model_directory: Path) -> Iterator[Grammars]:
    with share_grammars(model_directory, jump_forward=True) as made:
        yield made


@pytest.fixture(scope="module")
def model(model_directory: Path, jumping: Grammars) -> Path:
    return model_directory


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Answers]:
    with cluster_of(model, "unified", overlap_schedule="off") as cluster:
        yield answers(cluster)
        assert counter(cluster.unified[0], FORCED) > 40


def test_output_matches_the_grammar(model: Path, plain: Answers) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for name, params in FEATURES.items():
        if params.get("grammar") is not JSON or "max_tokens" in params:
            continue
        for tokens in plain[name].result():
            is_stopped = tokens[-1] in params.get("stop_token_ids", ())
            if (name == "stop texts" and is_stopped) or "ends_after" in params:
                continue
            has_end = is_stopped or tokens[-1] == EOS
            text = tokenizer.decode(tokens[: -1 if has_end else None], skip_special_tokens=False)
            assert tokens[-1] == EOS or is_stopped, (name, text)
            jsonschema.validate(json.loads(text), SCHEMA)
    assert all(len(tokens) <= 3 for tokens in plain["short"].result())


CELLS = [
    pytest.param(
        *("split", "none", {"overlap_schedule": "on", "chunked_prefill_size": 16}),
        marks=pytest.mark.full,
    ),
    pytest.param("unified", "tree", {"overlap_schedule": "on"}, marks=pytest.mark.full),
    pytest.param("unified", "none", {"overlap_schedule": "on"}, marks=pytest.mark.full),
    pytest.param("split", "ngram", {}, marks=pytest.mark.full),
    pytest.param("split", "eagle", {"page_size": 16}, marks=pytest.mark.full),
    ("split", "half right", {"overlap_schedule": "on", "page_size": 1}),
    pytest.param(
        *("unified", "half right", {"kv_cache_tokens": 320, "reserved_decode_tokens": 1}),
        marks=pytest.mark.full,
    ),
    pytest.param("split", "draft", {}, marks=pytest.mark.full),
    pytest.param("split", "eagle", {"tp_size": 2}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("kind", "drafter", "settings"), CELLS)
def test_every_deployment_gives_the_same_output(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    plain: Answers,
    kind: str,
    drafter: str,
    settings: dict[str, Any],
) -> None:
    is_short = "kv_cache_tokens" in settings
    check_answers(monkeypatch, model, plain, kind, drafter, settings, is_short=is_short)


def test_a_request_can_resume_after_any_message(model: Path, plain: Answers) -> None:
    """Also where the next tokens are forced. They come in one message, so no resumed request begins
    among them."""
    with cluster_of(model, "unified") as first, cluster_of(model, "split") as second:
        whole = ask(first, PROMPT_OF["seeded"], **FEATURES["seeded"])
        (tokens,) = whole.result()
        assert tokens == plain["seeded"].tokens()
        ends = {output.position + len(output.token_ids) for output in whole.outputs}
        forced = {output.position for output in whole.outputs if len(output.token_ids) > 1}
        assert forced
        for cut in sorted({*range(1, len(tokens), 3), *forced} & ends):
            resumed = ask(second, PROMPT_OF["seeded"], produced=tokens[:cut], **FEATURES["seeded"])
            assert resumed.tokens() == tokens, cut
        second.wait_idle(30.0)


def test_a_request_can_resume_before_forced_tokens(model: Path) -> None:
    """A client may have seen the output up to any token, also if the grammar forces the next."""
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in ("first name", "second name")},
        "required": ["first name", "second name"],
        "additionalProperties": False,
    }
    grammar = Grammar("json_schema", json.dumps(schema))
    with cluster_of(model, "unified") as first, cluster_of(model, "split") as second:
        tokens = ask(first, PROMPTS[0], grammar=grammar).tokens()
        for cluster in (first, second):
            for cut in range(1, len(tokens) - 1):
                resumed = ask(cluster, PROMPTS[0], produced=tokens[:cut], grammar=grammar)
                assert resumed.tokens()[:cut] == tokens[:cut], cut


def test_late_steps_change_nothing(model: Path, plain: Answers) -> None:
    """A step launched before its row's tokens were forced has an extra sample."""
    with cluster_of(model, "unified", overlap_schedule="on") as cluster:
        device = LaggingDevice(cluster.unified[0])
        same_answers(answers(cluster), plain)
        assert device.ahead > 20


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_forced_tokens_share_a_forward_pass(model: Path, overlap: str) -> None:
    names = [f"property number {i}" for i in range(4)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    grammar = Grammar("json_schema", json.dumps(schema))
    with cluster_of(model, "unified", overlap_schedule=overlap) as cluster:
        tokens = ask(cluster, PROMPTS[0], grammar=grammar).tokens()
        passes = counter(cluster.unified[0], "pd_steps_total")
        forced = counter(cluster.unified[0], FORCED)
    assert forced > len(tokens) / 2
    # With overlap a pass is under way when tokens turn out to be forced, after each of the values.
    assert passes <= len(tokens) - forced + (len(names) + 1 if overlap == "on" else 0)


def test_log_probabilities_and_biases_act_on_sampled_tokens(
    model: Path, plain: Answers, shared_grammars: Grammars
) -> None:
    with use_grammars(shared_grammars), cluster_of(model, "unified") as cluster:
        without = answers(cluster)
    same_answers(without, plain, ("log probabilities", "bias", "none"))
    assert without["greedy"].result() != plain["greedy"].result()


@pytest.fixture(scope="module")
def rules_of(jumping: Grammars) -> Any:
    def rules(kind: Any, text: str) -> Any:
        found: queue.Queue[Any] = queue.Queue()
        jumping.request_rules(Grammar(kind, text), found.put)
        return found.get(timeout=60)([EOS])

    return rules


class TestRules:
    @pytest.fixture
    def tokenizer(self, model_directory: Path) -> Tokenizer:
        return Tokenizer.from_file(str(model_directory / "tokenizer.json"))

    def forced(self, rules: Any, ids: list[int]) -> list[int]:
        tokens: list[int] = rules.find_forced(np.array(ids, np.int32))
        return tokens

    def test_forced_tokens_are_those_of_the_tokenizer(self, rules_of, tokenizer) -> None:
        text = '{"name": "Ada", "age": 36, "tags": ["red"'
        rules = rules_of("regex", text.replace("{", r"\{").replace("[", r"\[") + "[ab]")
        ids = tokenizer.encode(text).ids
        found = self.forced(rules, [5, 6])
        assert found == ids[: len(found)]
        assert len(found) == len(ids) - 1

    def test_asking_changes_nothing(self, rules_of) -> None:
        rules = rules_of("json_schema", json.dumps(NAMES))
        mask = np.zeros((VOCAB_SIZE + 31) // 32, np.int32)
        rules.fill_mask(mask)
        before = mask.copy()
        self.forced(rules, [1, 2])
        rules.fill_mask(mask)
        assert np.array_equal(mask, before)

    def test_known_tokens_stay_where_the_tokenizer_would_merge(self, rules_of, tokenizer) -> None:
        """``re`` is known, and ``red`` is one token, so nothing is forced."""
        (red,) = tokenizer.encode("red").ids
        known = [tokenizer.token_to_id("r"), tokenizer.token_to_id("e")]
        rules = rules_of("regex", "red or [ab]")
        for token in known:
            assert rules.accept_token(token)
        assert self.forced(rules, known) == []
        assert red not in known

    @pytest.mark.parametrize("text", ["名|后", "[名后]前"])
    def test_a_part_of_a_character_is_not_forced(self, rules_of, tokenizer, text) -> None:
        rules = rules_of("regex", f"ab (tags {text})")
        found = self.forced(rules, [3])
        assert "\ufffd" not in tokenizer.decode(found)
        if found:
            assert "ab tags ".startswith(tokenizer.decode(found))

    def test_a_long_constant_comes_in_parts(self, rules_of) -> None:
        rules = rules_of("json_schema", json.dumps({"const": "ab" * 50_000}))
        ids = [4]
        for _ in range(3):
            found = self.forced(rules, ids)
            assert 2 <= len(found) <= MAX_BYTES
            assert all(rules.accept_token(token) for token in found)
            ids += found

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("text", ['"a" root', '"b" | "ab" tail\ntail ::= "a" tail'])
    def test_text_without_an_end_comes_in_parts(self, rules_of, tokenizer, text) -> None:
        """The second cycle comes after a choice."""
        rules = rules_of("ebnf", f"root ::= {text}")
        ids = [tokenizer.token_to_id(letter) for letter in ("a", "b")[: 1 + ("tail" in text)]]
        assert all(rules.accept_token(token) for token in ids)
        for _ in range(3):
            found = self.forced(rules, ids)
            assert 2 <= len(found) <= MAX_BYTES
            assert set(tokenizer.decode(found)) == {"a"}
            assert all(rules.accept_token(token) for token in found)
            ids += found

    @pytest.mark.timeout(60)
    def test_an_object_that_holds_itself_comes_in_parts(self, rules_of, tokenizer) -> None:
        schema = {
            "type": "object",
            "properties": {"a": {"$ref": "#"}},
            "required": ["a"],
            "additionalProperties": False,
        }
        found = self.forced(rules_of("json_schema", json.dumps(schema)), [4])
        text = tokenizer.decode(found)
        assert text and ('{"a": ' * MAX_BYTES).startswith(text)

    @pytest.mark.parametrize("text", ["name|named", "(ab|ac)d", "a{300}", "äö名(a|b)", "x?yz"])
    def test_forced_text_is_what_xgrammar_finds(self, rules_of, text) -> None:
        """We compare texts that end."""
        rules = rules_of("regex", text)
        found = rules._matcher.find_jump_forward_string()
        assert rules._find_forced_text() == found[:MAX_BYTES]

    def test_a_complete_output_has_no_forced_tokens(self, rules_of, tokenizer) -> None:
        rules = rules_of("regex", "name")
        for token in tokenizer.encode("name").ids:
            assert rules.accept_token(token)
        assert self.forced(rules, [1]) == []
        assert rules.accept_token(EOS)
        assert rules.has_ended
        assert self.forced(rules, [1]) == []

    def test_nothing_is_forced_behind_half_a_character(self, model_directory, tokenizer) -> None:
        half = tokenizer.encode("名").ids[:1]
        assert (
            Retokenizer(str(model_directory / "tokenizer.json")).retokenize_text(half, "tags tags")
            == []
        )
