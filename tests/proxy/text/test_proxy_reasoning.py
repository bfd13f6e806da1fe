"""Reasoning of models in ``/v1/chat/completions``."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_proxy_tools import (
    ASKED,
    BOTH,
    CITIES,
    CLOCK,
    TOKENS,
    WEATHER,
    Scripted,
    calls_of,
)
from tool_models import MISTRAL, PLAIN, QWEN

from pd.core.config import REASONING_PARSERS
from pd.core.errors import InvalidRequestError
from pd.proxy.api.chat_plan import OutputPlan
from pd.proxy.api.chat_reader import ChatReader
from pd.proxy.dispatch.generation import Delta, FinishReason
from pd.proxy.requests.chat import ChatRequest
from pd.proxy.requests.grammar_fields import GrammarFields
from pd.proxy.text.chat_template import MAX_PROMPT_CHARACTERS, ChatTemplate
from pd.proxy.text.reasoning import ReasoningParser, ReasoningTags, find_reasoning_tags
from pd.proxy.text.reasoning_count import ReasoningCounter, ReasoningStart
from pd.proxy.text.tools.events import Reasoning

if TYPE_CHECKING:
    from pathlib import Path

    from proxy_cluster import Cluster

    from pd.proxy.text.reasoning import Stage

THINK = ReasoningTags("<think>", "</think>")
THOUGHT = "<think>\nhm, <b>?\n</think>\n\nYes."
AT_ONCE = {"chat_template_kwargs": {"thinks_at_once": True}}
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
INSTANCE: Any = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "object", "additionalProperties": False}},
}


@pytest.fixture
def model(cluster: Cluster, tmp_path: Path) -> Scripted:
    return Scripted(cluster, tmp_path)


def ask(model: Scripted, text: str, *, stream: bool = False, **options: Any) -> tuple[str, str]:
    """Reasoning and content of the answer."""
    answer = model.ask(text, tools=options.pop("tools", []), stream=stream, **options)
    if not stream:
        message = answer.choices[0].message
        assert message.reasoning == message.reasoning_content
        return message.reasoning_content or "", message.content
    deltas = [chunk.choices[0].delta for chunk in answer]
    thoughts = [getattr(d, "reasoning_content", None) for d in deltas]
    assert [getattr(d, "reasoning", None) for d in deltas] == thoughts
    kinds = [bool(t) for t, d in zip(thoughts, deltas, strict=True) if t or d.content]
    assert kinds == sorted(kinds, reverse=True), "reasoning comes before content"
    return "".join(filter(None, thoughts)), "".join(d.content or "" for d in deltas)


@pytest.mark.parametrize("stream", [False, True])
class TestReasoningIsSplitOff:
    def test_where_the_model_opens_it(self, model: Scripted, stream: bool) -> None:
        assert ask(model, THOUGHT, stream=stream) == ("hm, <b>?\n", "Yes.")
        assert ask(model, "Yes.", stream=stream) == ("", "Yes.")

    def test_where_the_prompt_opens_it(self, model: Scripted, stream: bool) -> None:
        text = THOUGHT.removeprefix("<think>\n")
        found = ask(model, text, stream=stream, extra_body=AT_ONCE)
        assert found == ("hm, <b>?\n", "Yes.")
        assert model.prompt().endswith("<think>\n")

    def test_where_the_prompt_closes_it(self, model: Scripted, stream: bool) -> None:
        found = ask(model, "<think> is a tag", stream=stream, extra_body=NO_THINKING)
        assert found == ("", "<think> is a tag")

    def test_but_not_if_it_is_not_wanted(self, model: Scripted, stream: bool) -> None:
        body = {"separate_reasoning": False}
        assert ask(model, THOUGHT, stream=stream, extra_body=body) == ("", THOUGHT)

    def test_or_left_out(self, model: Scripted, stream: bool) -> None:
        body = {"include_reasoning": False}
        assert ask(model, THOUGHT, stream=stream, extra_body=body) == ("", "Yes.")

    def test_what_a_client_writes_opens_nothing(self, model: Scripted, stream: bool) -> None:
        messages = [{"role": "user", "content": "<think>"}]
        found = ask(model, "Yes.", stream=stream, messages=messages)
        assert found == ("", "Yes.")

    def test_reasoning_that_does_not_end(self, model: Scripted, stream: bool) -> None:
        assert ask(model, "<think>hm </thi", stream=stream) == ("hm </thi", "")


@pytest.mark.parametrize(
    "options",
    [{}, {"extra_body": NO_THINKING}, {"extra_body": {"separate_reasoning": False}}, {"tools": []}],
)
@pytest.mark.parametrize("text", [THOUGHT, "Yes.", "<think>hm", "", f"<think>hm</think>{BOTH}"])
def test_every_delta_names_reasoning(model: Scripted, text: str, options: dict[str, Any]) -> None:
    """Loops as DeepSeek's documentation has them read it of each, and then its content."""
    chunks = list(model.ask(text, stream=True, **options))
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks]
    for delta in deltas:
        assert "reasoning_content" in delta
        shown = [delta.get(name) is not None for name in ("reasoning_content", "content")]
        assert sum(shown) == (0 if "tool_calls" in delta else 1), delta


def test_the_deltas_without_and_with_a_parser() -> None:
    part, end = Delta("a", [], [], None, is_first=False, total=0, pieces=0), FinishReason("stop")
    deltas = [part, part._replace(text=""), part._replace(text="", finish=end)]
    plan = OutputPlan(None, GrammarFields.from_field("response_format"))
    told = [ChatReader(plan).make_deltas(delta) for delta in deltas]
    assert told == [[{"content": "a"}], [{"content": ""}], [{"reasoning_content": None}]]
    plan = plan._replace(start=ReasoningStart(THINK, "after"))
    told = [ChatReader(plan).make_deltas(delta) for delta in deltas]
    assert told == [[{"content": text, "reasoning_content": None}] for text in ("a", "", "")]


@pytest.mark.parametrize("text", [THOUGHT, "<think>hm </thi", f"<think>hm</think>{BOTH}"])
def test_reasoning_may_come_in_one_piece(model: Scripted, text: str) -> None:
    body = {"stream_reasoning": False}
    chunks = list(model.ask(text, stream=True, extra_body=body))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thoughts = [d.reasoning for d in deltas if getattr(d, "reasoning", None)]
    assert len(thoughts) == 1
    behind = deltas[next(i for i, d in enumerate(deltas) if getattr(d, "reasoning", None)) + 1 :]
    streamed, _ = ask(model, text, stream=True, tools=[WEATHER, CLOCK])
    assert thoughts == [streamed]
    assert not any(d.content for d in deltas[: -len(behind) or None])


def test_calls_come_after_reasoning(model: Scripted) -> None:
    for separate in (True, False):
        message = (
            model.ask(
                f"<think><tool_call></think>{BOTH}", extra_body={"separate_reasoning": separate}
            )
            .choices[0]
            .message
        )
        assert calls_of(message) == CITIES
        if separate:
            assert message.reasoning_content == "<tool_call>"
            assert message.content == "I look.\n"


def test_a_message_that_is_continued_says_where_the_answer_begins(model: Scripted) -> None:
    def continued(content: str, text: str) -> tuple[str, str]:
        messages = [*ASKED, {"role": "assistant", "content": content}]
        body = {"continue_final_message": True}
        return ask(model, text, messages=messages, extra_body=body)

    assert continued("<think>I", " see</think>Yes.") == ("see", "Yes.")
    assert continued("<think>I see</think>Y", "es.") == ("", "es.")


# ---- its tokens in usage


def tokens_of(text: str) -> int:
    return len(TOKENS.encode(text, add_special_tokens=False).ids)


def usages(model: Scripted, *texts: str, **options: Any) -> list[Any]:
    """The usage of an answer, and of two streams of it: the last one, and those so far."""
    found = [model.ask(*texts, **options).usage]
    for also_so_far in (False, True):
        asked = {"include_usage": True, "continuous_usage_stats": also_so_far}
        chunks = model.ask(*texts, stream=True, stream_options=asked, **options)
        found += [chunk.usage for chunk in chunks if chunk.usage is not None]
    return found


@pytest.mark.parametrize(
    ("text", "options", "reasoning"),
    [
        (THOUGHT, {}, "<think>\nhm, <b>?\n</think>"),
        (THOUGHT, {"extra_body": {"separate_reasoning": False}}, "<think>\nhm, <b>?\n</think>"),
        (THOUGHT, {"extra_body": {"include_reasoning": False}}, "<think>\nhm, <b>?\n</think>"),
        ("hm</think>Yes.", {"extra_body": AT_ONCE}, "hm</think>"),
        ("<think>hm</think>Yes.", {"stop": "</think>"}, "<think>hm</think>"),
        (f"<think>hm</think>{BOTH}", {"tools": [WEATHER, CLOCK]}, "<think>hm</think>"),
        ("Yes. <think>hm</think>", {}, ""),
        ("<think>hm</think>", {"extra_body": NO_THINKING}, ""),
    ],
)
def test_usage_has_the_tokens_of_reasoning(
    model: Scripted, text: str, options: dict[str, Any], reasoning: str
) -> None:
    expected = tokens_of(reasoning)
    *sofar, last = usages(model, text, **{"tools": []} | options)
    for usage in (*sofar[:2], last):
        assert usage.completion_tokens_details.reasoning_tokens == expected
        assert usage.reasoning_tokens == expected
    counts = [usage.reasoning_tokens for usage in sofar[2:]]
    assert counts == sorted(counts)
    assert all(each.reasoning_tokens <= each.completion_tokens for each in sofar)


def test_reasoning_that_is_not_closed_is_all_tokens(model: Scripted) -> None:
    for usage in (*usages(model, "<think>hm", tools=[])[:2], usages(model, "<think>", tools=[])[0]):
        assert usage.reasoning_tokens == usage.completion_tokens > 1


def test_the_tokens_of_reasoning_are_of_all_choices(model: Scripted) -> None:
    texts = ("<think>hm</think>Yes.", "No.", "<think>well, well</think>")
    for usage in usages(model, *texts, n=3, tools=[])[:2]:
        assert usage.reasoning_tokens == tokens_of(texts[2]) + tokens_of("<think>hm</think>")


def test_usage_without_a_parser_counts_none(cluster: Cluster, tmp_path: Path) -> None:
    """SGLang's field is always there, and OpenAI's only with a parser."""
    model = Scripted(cluster, tmp_path, QWEN, reasoning_parser="none")
    for usage in usages(model, THOUGHT, tools=[]):
        found = usage.model_dump(exclude_unset=True)
        assert "completion_tokens_details" not in found
        assert found["reasoning_tokens"] == 0


class Pieces:
    """A detokenizer whose token ``i`` is a piece of text."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def add_token(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return ""


PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<th",
        "ink>",
        "</",
        "think>",
        " ",
        "\n" * 40,
        "a",
        "<",
        "",
        "</think>b",
    ]
)


@given(pieces=st.lists(PIECES, max_size=12), stage=st.sampled_from(["before", "inside", "after"]))
def test_tokens_are_counted_as_the_parser_reads_them(pieces: list[str], stage: Stage) -> None:
    counter = ReasoningCounter(Pieces(pieces), ReasoningStart(THINK, stage))
    texts = [counter.add_token(token) for token in range(len(pieces))]
    assert "".join(texts) == "".join(pieces)
    closed = None
    parser = ReasoningParser(THINK, stage, verbatim=True)
    reasoning = ""
    for number, piece in enumerate(pieces, 1):
        if stage == "after":
            break
        events = parser.add_text(piece)
        reasoning += "".join(e.text for e in events if isinstance(e, Reasoning))
        opened = reasoning.lstrip().removeprefix("<think>") if stage == "before" else reasoning
        if closed is None and opened.endswith("</think>"):
            closed = number
    expected = closed
    if expected is None:
        expected = len(pieces) if reasoning or stage == "inside" else 0
    assert counter.count_tokens(len(pieces)) == expected
    assert counter.count_tokens(len(pieces) // 2) == min(len(pieces) // 2, expected)


# ---- grammars begin behind it


def test_a_grammar_begins_after_reasoning(model: Scripted) -> None:
    found = ask(model, "<think>hm</think>{}", response_format=INSTANCE)
    assert found == ("hm", "{}")
    optional, instance = model.structural_tag()["elements"]
    assert optional["type"] == "optional"
    assert optional["content"]["elements"][0]["begin"] == "<think>"
    assert instance["json_schema"] == INSTANCE["json_schema"]["schema"]

    ask(model, "hm</think>{}", response_format=INSTANCE, extra_body=AT_ONCE)
    reasoning, _ = model.structural_tag(2)["elements"]
    assert reasoning["elements"][0]["begin"] == ""

    ask(model, "{}", response_format=INSTANCE, extra_body=NO_THINKING)
    grammar = model.node.wait_generate(3).params.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"

    content = {"type": "any_text", "excludes": ["<n>"]}
    ask(model, "hm</think>a", response_format={"type": "structural_tag", "format": content})
    assert model.structural_tag(4)["elements"][1] == content


@pytest.mark.parametrize(
    ("field", "content"),
    [
        ({"guided_regex": "a+b"}, {"type": "regex", "pattern": "a+b"}),
        ({"guided_choice": ["a"]}, {"type": "grammar", "grammar": 'root ::= "a"'}),
        ({"guided_grammar": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"'}),
        # It is JSON, too, but no schema.
        ({"structured_outputs": {"regex": "true"}}, {"type": "regex", "pattern": "true"}),
    ],
)
def test_so_do_expressions_and_other_grammars(
    model: Scripted, field: dict[str, Any], content: dict[str, Any]
) -> None:
    """Beside calls, too, which may come in their place."""
    ask(model, "hm</think>x", extra_body=field | AT_ONCE)
    assert model.structural_tag()["elements"][1] == content
    model.ask("x", stream=False, extra_body=field | NO_THINKING)
    calls, other = model.structural_tag(2)["elements"]
    assert calls["type"] == "tags_with_separator"
    assert other == content


@pytest.mark.parametrize("written", [json.dumps, lambda tag: tag])
def test_so_do_structures_behind_triggers(model: Scripted, written: Any) -> None:
    """As an object and as its text, whichever field they come in."""
    structures = [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}]
    tag = {"type": "structural_tag", "structures": structures, "triggers": ["<n>"]}
    outputs = {"structured_outputs": {"structural_tag": written(tag)}}
    ask(model, "hm</think><n>1</n>", extra_body=outputs | AT_ONCE)
    ask(model, "hm</think><n>1</n>", response_format=tag, extra_body=AT_ONCE)
    content = model.structural_tag()["elements"][1]
    assert content["triggers"] == ["<n>"]
    assert content["tags"][0]["content"]["json_schema"] == {"type": "integer"}
    assert model.structural_tag(2)["elements"][1] == content


def test_so_do_required_calls(model: Scripted) -> None:
    text = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    answer = model.ask(f"hm</think>\n\n{text}", tool_choice="required", extra_body=AT_ONCE)
    message = answer.choices[0].message
    assert message.reasoning_content == "hm"
    assert calls_of(message) == [("clock", {})]
    reasoning, calls = model.structural_tag()["elements"]
    assert reasoning["elements"][0]["end"] == "</think>"
    assert calls["type"] == "tags_with_separator"


# ---- what the template is given


def test_earlier_reasoning_goes_to_the_template(model: Scripted) -> None:
    for number, name in enumerate(("reasoning_content", "reasoning"), 1):
        messages = [*ASKED, {"role": "assistant", "content": "No.", name: "I think"}, *ASKED]
        ask(model, "Yes.", messages=messages)
        assert "<think>\nI think\n</think>\n\nNo.<|im_end|>" in model.prompt(number)


def test_so_do_parts_with_reasoning(model: Scripted) -> None:
    content = [
        {"type": "thinking", "thinking": "I think", "signature": "x"},
        {"type": "redacted_thinking", "data": "secret"},
        {"type": "reasoning", "reasoning": "so"},
        {"type": "thinking", "thinking": None},
        {"type": "text", "text": "No."},
    ]
    messages = [*ASKED, {"role": "assistant", "content": content}, *ASKED]
    ask(model, "Yes.", messages=messages)
    assert "<think>\nI think\nso\n</think>\n\nNo.<|im_end|>" in model.prompt()
    assert "secret" not in model.prompt()
    # The field goes before parts.
    messages[1]["reasoning"] = "Hm"
    ask(model, "Yes.", messages=messages)
    assert "<think>\nHm\n</think>\n\nNo.<|im_end|>" in model.prompt(2)


def test_parts_with_reasoning_are_the_assistants(model: Scripted) -> None:
    for part in (
        {"type": "thinking", "thinking": "a"},
        {"type": "reasoning", "reasoning": "a"},
        {"type": "redacted_thinking", "data": "a"},
    ):
        text = model.refused(messages=[{"role": "user", "content": [part]}])
        assert "messages[0].content may contain only parts like" in text


def test_the_effort_is_a_variable_of_the_template() -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "low"}'
    variables = ChatRequest.parse(body).template_variables
    assert ChatTemplate("{{ reasoning_effort }}", {}).render([], extra=variables) == "low"
    assert (
        ChatRequest.parse(body.replace(b', "reasoning_effort": "low"', b"")).template_variables
        == {}
    )
    none = ChatRequest.parse(body.replace(b'"low"', b'"none"'))
    assert none.template_variables == {"reasoning_effort": "none", "enable_thinking": False}


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "raise_exception"]
)
def test_variables_that_the_proxy_sets_are_reserved(model: Scripted, name: str) -> None:
    text = model.refused(extra_body={"chat_template_kwargs": {name: "x"}})
    assert f"chat_template_kwargs may not set '{name}'" in text


def test_prompts_that_templates_blow_up_are_refused() -> None:
    source = "{% for a in range(90000) %}{{ messages[0].content }}{% endfor %}"
    message = {"role": "user", "content": "x" * (1 << 16)}
    with pytest.raises(InvalidRequestError, match=str(MAX_PROMPT_CHARACTERS)):
        ChatTemplate(source, {}).render([message])
    with pytest.raises(InvalidRequestError, match="Range too big"):
        ChatTemplate("{{ range(n) | list }}", {}).render([message], extra={"n": 1 << 40})


# ---- which tags a model has


def test_the_template_says_the_tags() -> None:
    assert find_reasoning_tags("auto", PLAIN) is None
    assert find_reasoning_tags("auto", QWEN) == ReasoningTags("<think>", "</think>")
    assert find_reasoning_tags("auto", MISTRAL) == ReasoningTags("[THINK]", "[/THINK]")
    assert find_reasoning_tags("none", QWEN) is None


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_every_tag_that_the_command_line_offers_is_there(name: str) -> None:
    assert (find_reasoning_tags(name, "") is None) == (name in ("auto", "none"))


def test_a_flag_says_them_instead(cluster: Cluster, tmp_path: Path) -> None:
    model = Scripted(cluster, tmp_path, PLAIN, reasoning_parser="deepseek_r1")
    assert ask(model, "hm</think>Yes.") == ("hm", "Yes.")


def test_flags_leave_everything_in_the_text(cluster: Cluster, tmp_path: Path) -> None:
    model = Scripted(cluster, tmp_path, QWEN, reasoning_parser="none", tool_call_parser="none")
    assert ask(model, THOUGHT) == ("", THOUGHT)
    assert "--tool-call-parser" in model.refused(tools=[WEATHER, CLOCK])


def test_reasoning_that_is_held_until_it_is_whole_costs_no_more_per_token_when_it_is_long() -> None:
    new_parser = partial(ReasoningParser, THINK, "inside", verbatim=False)
    plan = OutputPlan(
        None, GrammarFields.from_field("response_format"), new_parser=new_parser, reasoning="whole"
    )
    answer, part, count = ChatReader(plan), "hm" * 100, 20_000
    delta = Delta(part, [], [], None, is_first=False, total=0, pieces=0)
    began = time.process_time()
    for _ in range(count):
        assert answer.make_deltas(delta) == [{"content": ""}]
    found = answer.make_deltas(delta._replace(text="</think>Yes."))
    assert time.process_time() - began < 2.0
    assert [each.get("content") for each in found] == [None, "Yes."]
    assert found[0]["reasoning"] == part * count
