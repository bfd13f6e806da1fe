"""Outputs allowed by the structural tags of each family, checked with xgrammar."""

# xgrammar has no types.
# mypy: disable-error-code="no-any-unimported, no-untyped-call"

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import xgrammar

from pd.core.errors import InvalidRequestError
from pd.core.grammar import Grammar
from pd.proxy.requests.tools import read_tools
from pd.proxy.text.reasoning import ReasoningTags, find_reasoning_tags
from pd.proxy.text.tools.families import find_tool_family
from pd.proxy.text.tools.reader import CallOptions
from pd.proxy.text.tools.tags import UnfitError, make_choice, make_format, make_grammar, make_text

if TYPE_CHECKING:
    from pd.proxy.text.tools.families import ToolFamily
    from pd.proxy.text.tools.functions import Function
    from pd.proxy.text.tools.tags import Format

EOS = 256
FAMILIES = {
    name: find_tool_family(name.split()[0], "[ARGS]" if "names" in name else "")
    for name in (
        *("hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "mistral names"),
        *("deepseek_v3", "deepseek_v31", "glm45", "glm47", "kimi_k2", "phi4_mini_json"),
        *("functiongemma", "gemma4"),
    )
}
# The tags of DeepSeek, in their order in a call.
BEGIN, CALL, SEP, END, LAST = (
    f"<\uff5ctool\u2581{tag}\uff5c>"
    for tag in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
)
ADD: Any = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "to": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


def _list_calls(
    add: str, stop: str, opening: str, separator: str, closing: str
) -> tuple[str, str, str]:
    """A call, another one, and both, with texts around them."""
    calls = (add, stop, f"{add}{separator}{stop}")
    one, other, both = (f"{opening}{each}{closing}" for each in calls)
    return one, other, both


# A call as each family writes it, with `%s` for the value of `a`, and one of a function `stop`.
CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "add", "arguments": {"a": %s, "to": "x"}}\n</tool_call>',
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
        "%s\n%s",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=add>\n<parameter=a>\n%s\n</parameter>\n<parameter=to>\nx\n"
        "</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
        "%s\n%s",
    ),
    "llama3_json": (
        '{"name": "add", "parameters": {"a": %s, "to": "x"}}',
        '{"name": "stop", "parameters": {}}',
        "%s; %s",
    ),
    "pythonic": ('[add(a=%s, to="x")]', "[stop()]", '[add(a=%s, to="x"), stop()]'),
    "mistral": (
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": %s, "to": "x"}}]',
        '[TOOL_CALLS][{"name": "stop", "arguments": {}}]',
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": %s, "to": "x"}}, '
        '{"name": "stop", "arguments": {}}]',
    ),
    "mistral names": (
        '[TOOL_CALLS]add[ARGS]{"a": %s, "to": "x"}',
        "[TOOL_CALLS]stop[ARGS]{}",
        "%s%s",
    ),
    "glm45": (
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value>\n<arg_key>to</arg_key>\n"
        "<arg_value>x</arg_value>\n</tool_call>",
        "<tool_call>stop\n</tool_call>",
        "%s\n%s",
    ),
    "glm47": (
        "<tool_call>add<arg_key>a</arg_key><arg_value>%s</arg_value><arg_key>to</arg_key>"
        "<arg_value>x</arg_value></tool_call>",
        "<tool_call>stop</tool_call>",
        "%s%s",
    ),
    "phi4_mini_json": _list_calls(
        '{"name": "add", "arguments": {"a": %s, "to": "x"}}',
        '{"name": "stop", "arguments": {}}',
        "functools[",
        ", ",
        "]",
    ),
    "kimi_k2": _list_calls(
        '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": %s, "to": "x"}'
        "<|tool_call_end|>",
        "<|tool_call_begin|>functions.stop:12<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "functiongemma": (
        "<start_function_call>call:add{a:%s,to:<escape>x<escape>}<end_function_call>",
        "<start_function_call>call:stop{}<end_function_call>",
        "%s%s",
    ),
    "gemma4": (
        '<|tool_call>call:add{a:%s,to:<|"|>x<|"|>}<tool_call|>',
        "<|tool_call>call:stop{}<tool_call|>",
        "%s%s",
    ),
    "deepseek_v3": _list_calls(
        f'{CALL}function{SEP}add\n```json\n{{"a": %s, "to": "x"}}\n```{END}',
        f"{CALL}function{SEP}stop\n```json\n{{}}\n```{END}",
        BEGIN,
        "\n",
        LAST,
    ),
    "deepseek_v31": _list_calls(
        f'{CALL}add{SEP}{{"a": %s, "to": "x"}}{END}', f"{CALL}stop{SEP}{{}}{END}", BEGIN, "", LAST
    ),
}


@functools.cache
def compiler() -> Any:
    """Make a compiler for a vocabulary of bytes."""
    info = xgrammar.TokenizerInfo(
        [bytes([byte]) for byte in range(EOS)] + [b"<eos>"],
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=EOS + 1,
        stop_token_ids=[EOS],
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def accepts(tag: Format, *texts: str) -> list[bool]:
    compiled = compiler().compile_structural_tag(make_grammar(tag, "tools").text)
    found = []
    for each in texts:
        matcher = xgrammar.GrammarMatcher(compiled)
        found.append(matcher.accept_string(each) and matcher.is_completed())
    return found


def functions(*described: Any) -> list[Function]:
    tools = read_tools([{"type": "function", "function": each} for each in described])
    assert tools is not None
    return tools.functions


def family_and_calls(name: str) -> tuple[ToolFamily, str, str, str, str]:
    family = FAMILIES[name]
    assert family is not None
    call, other, both = CALLS[name]
    right, wrong = call % "5", call % '"five"'
    return family, right, wrong, other, both % ((right, other) if both.count("%s") > 1 else ("5",))


@pytest.mark.parametrize("name", FAMILIES)
def test_required_calls_are_the_whole_output(name: str) -> None:
    family, right, wrong, other, both = family_and_calls(name)
    declared = functions(ADD, {"name": "stop"})
    tag = family.form.make_calls(declared, several=True)
    texts = (right, both, wrong, "", "text", "text" + right, right + "text", right[:-1])
    assert accepts(tag, *texts) == [True, True] + [False] * 6
    assert accepts(family.form.make_calls(declared, several=False), right, both) == [True, False]
    assert accepts(family.form.make_calls(declared[1:], several=False), other, right) == [
        True,
        False,
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_within_text_are_valid_or_absent(name: str) -> None:
    family, right, wrong, _, both = family_and_calls(name)
    tag = family.form.make_calls_or_text(functions(ADD, {"name": "stop"}), several=True)
    assert accepts(tag, "", "text", right, both, wrong) == [True, True, True, True, False]
    if family.form.trigger:
        assert accepts(tag, "text" + right, "text" + wrong) == [True, False]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_parser_reads_what_the_tags_allow(name: str) -> None:
    family, *_, both = family_and_calls(name)
    parser = family.parser(CallOptions({"add": {"a": "json", "to": "text"}, "stop": {}}))
    events = parser.add_text(both) + parser.close()
    assert [event[-1] for event in events if event[-1] in ("add", "stop")] == ["add", "stop"]


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_blocks_of_code_are_no_way_around_the_grammar(name: str) -> None:
    """The parsers read calls in them."""
    family, _, wrong, *_ = family_and_calls(name)
    tag = family.form.make_calls_or_text(functions(ADD, {"name": "stop"}), several=True)
    texts = (f"```tool_code\n{wrong}\n```", f"```json\n{wrong}\n```", "I see: `a`")
    assert accepts(tag, *texts) == [False, False, True]
    assert name == "llama3_json" or accepts(tag, f"I see:\n{texts[0]}") == [False]


def test_gpt_oss_writes_reasoning_and_then_one_call_or_a_final_message() -> None:
    family = find_tool_family("openai", "")
    tags = find_reasoning_tags("openai_gptoss", "")
    assert family is not None
    assert tags is not None
    declared = functions(ADD, {"name": "stop"})
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": %s, "to": "x"}'
    start, final = "<|start|>assistant", "<|channel|>final<|message|>"
    analysis = f"<|channel|>analysis<|message|>a <b> {{<|end|>{start}"
    preamble = f"<|channel|>commentary<|message|>I call.<|end|>{start}"
    right, wrong = call % 5, call % '"five"'
    calls = tags.prepend_reasoning("before", family.form.make_calls(declared, several=True))
    texts = (right, analysis + right, analysis * 2 + right, wrong, f"{right}{start}{right}")
    others = (preamble + right, f"{final}hi", analysis, f"<|channel|>analysis<|message|>{right}")
    assert accepts(calls, *texts, *others) == [True] * 3 + [False] * 6
    mixed = family.form.make_calls_or_text(declared, several=True)
    mixed = tags.prepend_reasoning("before", mixed)
    assert accepts(mixed, *texts, *others) == [True] * 3 + [False] * 2 + [True] * 2 + [False] * 2
    assert accepts(mixed, f"{analysis}{final}{wrong}", "text") == [False, False]
    yes = tags.prepend_reasoning("before", tags.begin_answer(make_text("yes")))
    assert accepts(yes, f"{analysis}{final}yes", f"{final}yes", "yes", f"{final}no") == [
        *(True, True),
        *(False, False),
    ]


def test_optional_parameters_may_be_left_out_anywhere() -> None:
    whole = {"type": "object", "properties": {n: {"type": "integer"} for n in ("a", "b", "c")}}
    for required, good, bad in (
        ([], ["", "a=1", "b=1", "a=1, c=1", "b=1, c=1"], [", a=1", "c=1, a=1", "a=1,"]),
        (["b"], ["b=1", "b=1, a=1", "b=1, a=1, c=1", "b=1, c=1"], ["", "a=1"]),
        (["a", "b", "c"], ["a=1, b=1, c=1"], ["a=1, b=1", "a=1, c=1"]),
    ):
        pythonic = FAMILIES["pythonic"]
        assert pythonic is not None
        declared = functions({"name": "f", "parameters": whole | {"required": required}})
        tag = pythonic.form.make_calls(declared, several=False)
        texts = [f"[f({arguments})]" for arguments in good + bad]
        assert accepts(tag, *texts) == [True] * len(good) + [False] * len(bad)


def test_formats_that_grow_beyond_the_request_are_refused() -> None:
    shared = {"$defs": {"d": {"const": "x" * 60_000}}}
    names = [f"a{i}" for i in range(65)]
    properties = {name: {"$ref": "#/$defs/d"} for name in names}
    (large,) = functions({"name": "f", "parameters": shared | {"properties": properties}})
    for name in ("qwen3_coder", "pythonic"):
        family = FAMILIES[name]
        assert family is not None
        required = large._replace(schema=large.schema | {"required": names})
        with pytest.raises(InvalidRequestError, match="has more than 262144 bytes"):
            make_grammar(family.form.make_calls([required], several=False), "tools")
    assert family is FAMILIES["pythonic"]
    with pytest.raises(UnfitError, match="65 parameters of which none is required"):
        family.form.make_calls([large], several=False)


def test_tags_may_contain_texts() -> None:
    coder = FAMILIES["qwen3_coder"]
    assert coder is not None

    def allowed(schema: Any, *values: str, strict: bool | None = None) -> list[bool]:
        parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        declared = functions({"name": "f", "parameters": parameters, "strict": strict})
        tag = coder.form.make_calls(declared, several=False)
        head, tail = "<tool_call>\n<function=f>\n<parameter=a>\n", "</function>\n</tool_call>"
        return accepts(tag, *(f"{head}{value}\n</parameter>\n{tail}" for value in values))

    assert allowed({"type": "string"}, "", 'a\n"b"', "<b>", "a</parameter>\n") == [True] * 3 + [
        False
    ]
    short = {"type": "string", "minLength": 1, "maxLength": 2}
    assert allowed(short, "a", "ä漢", "", "abc") == [True, True, False, False]
    assert allowed({"type": "string", "pattern": "^[ab]+$"}, "ab", "abc") == [True, False]
    assert allowed({"enum": ["a", "b c"]}, "a", "b c", '"a"') == [True, True, False]
    assert allowed({"type": ["string", "null"]}, '"a"', "null", "a") == [True, True, False]
    assert allowed({"type": "string", "format": "date"}, "2024-02-29", "2023-02-29") == [
        True,
        False,
    ]
    for schema in ({"type": "string", "format": "uri"}, {"type": "string", "pattern": ".*"}):
        with pytest.raises(UnfitError):
            allowed(schema, "x")
        assert allowed(schema, "x", strict=False) == [True]


def test_unwritable_names_are_refused_or_dropped() -> None:
    for name, parameter in (("qwen3_coder", "a>b"), ("pythonic", "a b"), ("pythonic", "größe")):
        family = FAMILIES[name]
        assert family is not None
        schema = {"type": "object", "properties": {parameter: {"type": "integer"}}}
        for strict in (None, False):
            declared = functions({"name": "f", "parameters": schema, "strict": strict})
            if strict is None:
                with pytest.raises(UnfitError, match="name cannot be written"):
                    family.form.make_calls(declared, several=False)
            else:
                assert family.form.make_calls(declared, several=False)


def test_reasoning_precedes_the_grammar() -> None:
    tags = ReasoningTags("<think>", "</think>")
    texts = ("<think>a<b</think>\n\nyes", "a</think>yes", "yes", "<think>yes", "</think> yes")
    for stage, found in (
        ("before", [True, False, True, False, False]),
        ("inside", [True, True, False, False, False]),
        ("after", [False, False, True, False, False]),
    ):
        assert accepts(tags.prepend_reasoning(stage, make_text("yes")), *texts) == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (Grammar("regex", "(ab)+|x"), "abab", "aba"),
        (Grammar("ebnf", 'root ::= "a" rest\nrest ::= "b" rest | ""'), "abb", "ba"),
        (Grammar("json_schema", '{"enum": [1]}'), "1", "2"),
        (
            Grammar("structural_tag", '{"format": {"type": "const_string", "value": "c"}}'),
            "c",
            "d",
        ),
    ],
)
def test_grammars_of_every_kind_work_after_reasoning_and_next_to_calls(
    grammar: Grammar, right: str, wrong: str
) -> None:
    content = make_format(grammar)
    behind = ReasoningTags("<think>", "</think>").prepend_reasoning("inside", content)
    texts = [f"hm</think>{each}" for each in (right, wrong)]
    assert accepts(behind, *texts) == [True, False]
    family, call, *_ = family_and_calls("hermes")
    calls = family.form.make_calls(functions(ADD, {"name": "stop"}), several=True)
    assert accepts(make_choice(calls, content), right, call, wrong) == [True, True, False]
