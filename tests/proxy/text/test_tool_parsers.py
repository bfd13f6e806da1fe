"""Parsers of tool calls, with texts as models of each family write them."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import call_texts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd.core.config import TOOL_CALL_PARSERS
from pd.proxy.api.chat_reader import merge_events
from pd.proxy.requests.tools import read_tools
from pd.proxy.text.reasoning import (
    ReasoningParser,
    ReasoningTags,
    find_reasoning_tags,
    make_reasoning_parser,
)
from pd.proxy.text.tools.events import Arguments, CallStart, Content, Reasoning
from pd.proxy.text.tools.families import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    FUNCTIONGEMMA,
    GEMMA4,
    GLM45,
    GLM47,
    HERMES,
    KIMI_K2,
    LLAMA3_JSON,
    MISTRAL,
    OPENAI,
    PHI4_MINI,
    PYTHONIC,
    QWEN3_CODER,
    ToolFamily,
    find_tool_family,
)
from pd.proxy.text.tools.harmony import HarmonyParser
from pd.proxy.text.tools.incoming import MAX_HELD, MAX_UNDECIDED
from pd.proxy.text.tools.reader import CallOptions

if TYPE_CHECKING:
    from pd.proxy.text.tools.events import OutputParser

FAMILIES = [HERMES, QWEN3_CODER, LLAMA3_JSON, PYTHONIC, MISTRAL]
FAMILIES += [DEEPSEEK_V3, DEEPSEEK_V31, GLM45, GLM47, KIMI_K2, OPENAI, PHI4_MINI]
FAMILIES += [FUNCTIONGEMMA, GEMMA4]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer"},
                "places": {"type": "array", "items": {"type": "string"}},
                "note": {"type": ["string", "null"]},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get-time", "parameters": {"type": "object"}}}
_TOOLS = read_tools([WEATHER, CLOCK])
assert _TOOLS is not None
OPTIONS = CallOptions(
    {function.name: function.classify_parameters() for function in _TOOLS.functions}
)


class Found(NamedTuple):
    """What a parser made of a text: all content, and the calls with their arguments."""

    content: str
    calls: list[tuple[str, str]]


def read(parser: OutputParser, text: str, size: int | None = None) -> list[Any]:
    size = size or max(1, len(text))
    events = [e for i in range(0, len(text), size) for e in parser.add_text(text[i : i + size])]
    return [
        (type(e).__name__, e.name if isinstance(e, CallStart) else e.text)
        for e in merge_events(events + parser.close())
    ]


def found(family: ToolFamily, text: str, options: CallOptions = OPTIONS) -> Found:
    events = read(family.parser(options), text)
    assert events == read(family.parser(options), text, 1)
    content = "".join(text for kind, text in events if kind == "Content")
    calls: list[tuple[str, str]] = []
    for kind, value in events:
        if kind == "CallStart":
            calls.append((value, ""))
        elif kind == "Arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + value)
    return Found(content, calls)


PARIS = {"city": "Paris"}
REAL: list[tuple[ToolFamily, str, str, list[tuple[str, Any]]]] = [
    # Qwen 2.5, Qwen 3, Hermes 2 Pro
    (
        HERMES,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "",
        [("get_weather", PARIS)],
    ),
    (
        HERMES,
        'I look it up.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '</tool_call>\n<tool_call>\n{"arguments": {}, "name": "get-time"}\n</tool_call>',
        "I look it up.\n",
        [("get_weather", PARIS), ("get-time", {})],
    ),
    (
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": {"city": "</tool_call> \\"{[\\\\"}}'
        "</tool_call> Done.",
        "Done.",
        [("get_weather", {"city": '</tool_call> "{[\\'})],
    ),
    (
        HERMES,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '{"name": "get-time"}',
        "",
        [("get_weather", PARIS), ("get-time", {})],
    ),
    # Arguments as a text, as OpenAI's API has them.
    (
        HERMES,
        '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"P\\\\u00e4\\ud83d'
        '\\ude00\\"}"}\n</tool_call>\n<tool_call>{"arguments": " {}", "name": "get-time"}',
        "",
        [("get_weather", {"city": "Pä😀"}), ("get-time", {})],
    ),
    (
        HERMES,
        '<tool_call>{"name": "get-time", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>',
        "",
        [("get-time", {"a": "\ud800"})],
    ),
    (
        LLAMA3_JSON,
        '{"name": "get-time", "parameters": "{\\"a\\": 1}"}',
        "",
        [("get-time", {"a": 1})],
    ),
    (HERMES, '<tool_call>{"name": "get-time", "arguments": "[1]"}', "", [("get-time", "[1]")]),
    (HERMES, '<tool_call>{"name": "get-time", "arguments": "{no"}', "", [("get-time", "{no")]),
    # Qwen3-Coder
    (
        QWEN3_CODER,
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSaint-\n Paul\n"
        "</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=places>\n"
        '["a </parameter>", "b"]\n</parameter>\n<parameter=note>\nit\'s "warm"\n</parameter>\n'
        "</function>\n</tool_call>",
        "I look.\n\n",
        [
            (
                "get_weather",
                {
                    "city": "Saint-\n Paul",
                    "days": 3,
                    "places": ["a </parameter>", "b"],
                    "note": 'it\'s "warm"',
                },
            )
        ],
    ),
    (
        QWEN3_CODER,
        "<function=get_weather>\n<parameter=city>\n5\n</parameter>\n<parameter=unit>\ncelsius\n"
        "</parameter>\n<parameter=note>\nNone\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get-time>\n</function>\n</tool_call>",
        "",
        [("get_weather", {"city": "5", "unit": "celsius", "note": None}), ("get-time", {})],
    ),
    # Llama 3.1 and 3.2
    (
        LLAMA3_JSON,
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        "",
        [("get_weather", PARIS)],
    ),
    (
        LLAMA3_JSON,
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}'
        '; {"name": "get-time", "parameters": {}}',
        "",
        [("get_weather", PARIS), ("get-time", {})],
    ),
    # Llama 4, ToolACE
    (
        PYTHONIC,
        "[get_weather(city='Paris', days=2, places=['a', \"b's\"], note=None), get-time()]",
        "",
        [
            ("get_weather", {"city": "Paris", "days": 2, "places": ["a", "b's"], "note": None}),
            ("get-time", {}),
        ],
    ),
    (
        PYTHONIC,
        "<|python_start|>[get_weather(city='P\\'\\u00e4\\n\\x41', deep={'a': (1, {'b': True})}, "
        "x=-.5, y=1_000)]<|python_end|>",
        "",
        [
            (
                "get_weather",
                {"city": "P'ä\nA", "deep": {"a": [1, {"b": True}]}, "x": -0.5, "y": 1000},
            )
        ],
    ),
    (
        PYTHONIC,
        '[get_weather(city="""P"a""\n\\x41""", note=\'\'\'\'\'\', unit=\'\', days=-0x1F), '
        'get_weather(city=r\'\\d\\\'\\\\\', note=R"""\\"""", unit=u\'\\101\\0\', days=0b11)]',
        "",
        [
            ("get_weather", {"city": 'P"a""\nA', "note": "", "unit": "", "days": -31}),
            ("get_weather", {"city": "\\d\\'\\\\", "note": '\\"', "unit": "A\0", "days": 3}),
        ],
    ),
    # Mistral 7B v0.3, Nemo; Mistral Small 3.2, Magistral
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}, '
        '{"name": "get-time", "arguments": {}}]',
        "",
        [("get_weather", PARIS), ("get-time", {})],
    ),
    (
        MISTRAL,
        'Sure. [TOOL_CALLS]get_weather[CALL_ID]VvvODy9mT[ARGS]{"city": "Paris"}'
        "[TOOL_CALLS]get-time[ARGS]{}",
        "Sure. ",
        [("get_weather", PARIS), ("get-time", {})],
    ),
    (MISTRAL, '[TOOL_CALLS]get_weather{"city": "Paris"}', "", [("get_weather", PARIS)]),
    *call_texts.REAL,
]


@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    REAL,
    ids=[f"{r[0].name}-{i}" for i, r in enumerate(REAL)],
)
def test_calls_as_models_write_them(
    family: ToolFamily, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    result = found(family, text)
    assert result.content == content
    assert [(name, json.loads(arguments)) for name, arguments in result.calls] == calls


MALFORMED = [
    (HERMES, '<tool_call>\n{"name": "get_wea'),
    (HERMES, "a <tool_call> is a tag, </tool_call> ends it"),
    (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "no name", "arguments": {}}'),
    (HERMES, "text that ends like a tag <tool_c"),
    (QWEN3_CODER, "<tool_call>\n<function=get_wea"),
    (QWEN3_CODER, "<tool_call>\nno function</tool_call>"),
    (QWEN3_CODER, "<function=a b>"),
    (LLAMA3_JSON, '{"name": "Paris", "population": 2000000}'),
    (LLAMA3_JSON, ' {"city": "Paris"}'),
    (LLAMA3_JSON, 'The call is {"name": "get_weather", "parameters": {}}'),
    (LLAMA3_JSON, "  {"),
    (PYTHONIC, "[link](https://example.org)"),
    (PYTHONIC, " [get_weather, get_time]"),
    (PYTHONIC, "[1, 2]"),
    (PYTHONIC, "get_weather(city='Paris')"),
    (PYTHONIC, '[get_weather("Paris")]'),
    (PYTHONIC, "<|python_start|>[get_weather(city='Paris', 5)]<|python_end|>"),
    (PYTHONIC, "[get_weather(city=f'{x}')]"),
    (PYTHONIC, "[get_weather(days=1, city=b'Paris')] ok"),
    (PYTHONIC, "[get_weather(city='Pa' 'ris')]"),
    (PYTHONIC, "[get_weather(city='Paris', days=2 * 3)]"),
    (PYTHONIC, "[get_weather(city=Paris)] is it"),
    (PYTHONIC, "[get_weather(places=['a', x])]"),
    (PYTHONIC, "[get_weather(*places)"),
    (PYTHONIC, "[get_weather(city=rb'Pa"),
    (MISTRAL, "[TOOL_CALLS] nothing"),
    (MISTRAL, '[TOOL_CALLS][{"name": "get_wea'),
    (MISTRAL, "[TOOL_CALLS]get_weather"),
    *call_texts.MALFORMED,
]


@pytest.mark.parametrize(("family", "text"), MALFORMED)
def test_what_is_no_call_comes_out_as_it_is(family: ToolFamily, text: str) -> None:
    assert found(family, text) == Found(text, [])


CUT = [
    (HERMES, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa'),
    (QWEN3_CODER, "<tool_call>\n<function=get_weather>\n<parameter=city>\nPa"),
    (LLAMA3_JSON, '{"name": "get_weather", "parameters": {"city": "Pa'),
    (PYTHONIC, "[get_weather(city='Pa"),
    (MISTRAL, '[TOOL_CALLS]get_weather[ARGS]{"city": "Pa'),
    *call_texts.CUT,
]


@pytest.mark.parametrize(("family", "text"), CUT)
def test_arguments_that_are_cut_off_are_arguments_all_the_same(
    family: ToolFamily, text: str
) -> None:
    assert found(family, text) == Found("", [("get_weather", '{"city": "Pa')])


@pytest.mark.parametrize(("family", "text", "arguments"), call_texts.BROKEN)
def test_a_closing_tag_ends_a_call_with_open_brackets(
    family: ToolFamily, text: str, arguments: str
) -> None:
    """Further calls are read, and it stays open otherwise, because its arguments are not JSON."""
    broken = ("get_weather", arguments)
    assert found(family, text + " Sorry.") == Found("Sorry.", [broken])
    parser = family.parser(OPTIONS)
    parser.add_text(text)
    assert parser.call_is_open
    for other, call, _, calls in REAL:
        # A recipient alone begins a call only at the beginning of an answer.
        if other is family and not _ and not call.startswith(" to="):
            assert found(family, text + call).calls[0] == broken
            assert len(found(family, text + call).calls) == 1 + len(calls)


@pytest.mark.parametrize(
    ("cut", "known"),
    [("", ""), ("\\", ""), (r"\\", "\\"), (r"\u", ""), (r"\u00e", ""), (r"\u00e4", "ä")],
)
def test_a_text_of_arguments_that_is_cut_off_is_read_so_far(cut: str, known: str) -> None:
    text = r'<tool_call>{"name": "get_weather", "arguments": "{\"city\": \"Pa' + cut
    assert found(HERMES, text) == Found("", [("get_weather", '{"city": "Pa' + known)])


def test_parameters_in_tags_that_are_cut_off_are_left_open() -> None:
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</fun"
    assert found(QWEN3_CODER, text) == Found("", [("get_weather", '{"city": "Paris"')])


def test_a_closing_tag_that_is_cut_off_is_no_content() -> None:
    call = '<tool_call>\n{"name": "get-time", "arguments": {}}\n</tool_call>'
    for end in range(1, len("</tool_call>") + 1):
        assert found(HERMES, call[:-end]) == Found("", [("get-time", "{}")])


@pytest.mark.parametrize(
    ("family", "text", "content"),
    [
        (HERMES, '<tool_call>{"name": "get-time", "arguments": {}, junk}</tool_call>', "junk}"),
        (PYTHONIC, f"[get_weather(note='{'a' * 2000}', city=Paris)] is it", "Paris)] is it"),
        (QWEN3_CODER, "<function=get-time>\nnow</function>", "now</function>"),
    ],
)
def test_text_in_a_call_is_not_lost(family: ToolFamily, text: str, content: str) -> None:
    result = found(family, text)
    assert len(result.calls) == 1
    assert content in result.content


def test_only_one_call_where_one_is_allowed() -> None:
    for family, text, _, calls in REAL:
        result = found(family, text, OPTIONS._replace(max_calls=1))
        assert [name for name, _ in result.calls] == [calls[0][0]]
        assert json.loads(result.calls[0][1]) == calls[0][1]


def test_ids_are_new_and_those_of_mistral_have_nine_letters() -> None:
    ids, count = set(), 0
    for family, text, _, calls in REAL:
        mine = ids_of(family, text)
        assert len(set(mine)) == len(calls)
        if family is not KIMI_K2:
            ids |= set(mine)
            count += len(calls)
        assert all(len(i) == 9 and i.isalnum() for i in mine) or family is not MISTRAL
    assert len(ids) == count


def ids_of(family: ToolFamily, text: str) -> list[str]:
    parser = family.parser(OPTIONS)
    return [e.id for e in parser.add_text(text) + parser.close() if isinstance(e, CallStart)]


@pytest.mark.parametrize(
    ("written", "ids"),
    [
        (["functions.f:3", "functions.g:4"], ["functions.f:3", "functions.g:4"]),
        (["f", "functions.g:4", "g"], ["functions.f:0", "functions.g:4", "functions.g:2"]),
        (["functions.f:0", "functions.f:0", "f:1"], [f"functions.f:{n}" for n in (0, 1, 2)]),
    ],
)
def test_kimis_calls_keep_their_ids(written: list[str], ids: list[str]) -> None:
    """Unless one comes twice. Its template shows them to the model, next to the results."""
    assert ids_of(KIMI_K2, "".join(call_texts.kimi(each, "{}") for each in written)) == ids


def test_what_python_would_call_otherwise_is_text_behind_other_calls() -> None:
    result = found(PYTHONIC, '[get-time(), get_weather("Paris"), get-time()] ok')
    assert result == Found(', get_weather("Paris"), get-time()] ok', [("get-time", "{}")])


def test_a_call_that_is_no_call_does_not_count() -> None:
    text = "[get-time(), get_weather(city=x)]"
    assert found(PYTHONIC, text, OPTIONS._replace(max_calls=1)).calls == [("get-time", "{}")]
    parser = PYTHONIC.parser(OPTIONS._replace(max_calls=1))
    parser.add_text("[get_weather(city=x)]")
    assert parser._calls == 0


def test_a_long_call_is_passed_on_before_its_end() -> None:
    parser = PYTHONIC.parser(OPTIONS)
    begin = "[get_weather(city='"
    assert parser.add_text(begin + "a" * (MAX_UNDECIDED - len(begin))) == []
    assert [type(e) for e in parser.add_text("a")][:2] == [CallStart, Arguments]
    assert parser.add_text("b") == [Arguments("b")]


def test_the_name_comes_before_the_arguments_are_there() -> None:
    parser = HERMES.parser(OPTIONS)
    events = parser.add_text('hm <tool_call>\n{"name": "get_weather", "arguments": {"ci')
    assert [type(e) for e in events] == [Content, CallStart, Arguments]
    assert parser.add_text("ty") == [Arguments("ty")]


# ---- closing tags inside values

NEXT = ("<parameter=unit>\ncelsius\n</parameter>\n</function>\n</tool_call>", "</function>", "")


def in_every_cut(family: ToolFamily, text: str) -> list[Any]:
    """The events of a text, which are the same whatever its pieces are."""
    whole = read(family.parser(OPTIONS), text)
    for at in range(1, len(text)):
        parser = family.parser(OPTIONS)
        events = parser.add_text(text[:at]) + parser.add_text(text[at:]) + parser.close()
        assert len(merge_events(events)) == len(whole)
    for size in range(1, 16):
        assert read(family.parser(OPTIONS), text, size) == whole
    return whole


@pytest.mark.sample
@pytest.mark.parametrize("parameter", ["city", "note", "places", "not declared"])
@pytest.mark.parametrize(
    "value",
    [
        "a</parameter>b",
        "</parameter>",
        "a\n</parameter>\nb",
        "</parameter>\n</parameter>",
        "x </parameter> <b> </function> </tool_call>",
        "<function=f></function><tool_call></tool_call>",
        "</parameter><param",
        "</parameter >\n</parameter",
        '"a" or "b</parameter>c',
        'a "quoted </parameter>" text',
        "{'it's </parameter>': 1}",
        "[the </parameter> tag]",
        'The 5" pipe </parameter> is',
        '"The 5" pipe"',
    ],
)
@pytest.mark.parametrize("closer", ["\n</parameter>\n", "\n</parameter>", "\n</parameter>  \n\n"])
def test_a_closing_tag_counts_only_where_a_call_goes_on(
    parameter: str, value: str, closer: str
) -> None:
    for rest in NEXT:
        text = (
            f"<tool_call>\n<function=get_weather>\n<parameter={parameter}>\n{value}{closer}{rest}"
        )
        (kind, name), (_, arguments) = in_every_cut(QWEN3_CODER, text)
        assert (kind, name) == ("CallStart", "get_weather")
        if not rest:  # the text ends before the call does
            assert not is_json(arguments)
            arguments += "}"
        unit = {"unit": "celsius"} if "celsius" in rest else {}
        assert json.loads(arguments) == {parameter: value} | unit


EVERY_CUT = [(case[0], case[1]) for case in REAL] + MALFORMED + CUT


@pytest.mark.parametrize(
    ("family", "text"),
    [
        pytest.param(*case, marks=[] if number % 16 == 0 else pytest.mark.full)
        for number, case in enumerate(EVERY_CUT)
    ],
)
def test_every_cut_of_a_text_and_of_its_beginnings(family: ToolFamily, text: str) -> None:
    """Each beginning is read the same in one piece and cut anywhere; half characters never come,
    because the detokenizer holds them."""
    for end in range(1, len(text) + 1):
        whole = read(family.parser(OPTIONS), text[:end])
        assert read(family.parser(OPTIONS), text[:end], 1) == whole
    in_every_cut(family, text)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


_PARTS = ["</parameter>", "</parameter", "<parameter", "</function", "<tool_call>", "\n", " ", "a"]
_PARTS += ['"', "'", "{", "}", "[", "\\", "ä", "5", "null"]
_VALUES = st.lists(st.sampled_from(_PARTS), max_size=12).map("".join)


@settings(max_examples=150, deadline=None, print_blob=True)
@given(st.lists(_VALUES, min_size=1, max_size=3), st.integers(0, 2**32))
def test_any_texts_come_back_as_they_were_written(values: list[str], seed: int) -> None:
    """In pieces of any lengths, with white space between the tags."""
    rng = random.Random(seed)
    options = CallOptions({"f": {f"p{i}": "text" for i in range(len(values))}})
    text = "<tool_call>\n<function=f>\n"
    for number, value in enumerate(values):
        text += f"<parameter=p{number}>\n{value}\n</parameter>" + rng.choice(["\n", "", "  \n"])
    text += "</function>\n</tool_call>"
    parser = QWEN3_CODER.parser(options)
    events = [e for part in cut(text, rng) for e in parser.add_text(part)] + parser.close()
    start, arguments = merge_events(events)
    assert isinstance(start, CallStart)
    assert isinstance(arguments, Arguments)
    assert list(json.loads(arguments.text).values()) == values


def cut(text: str, rng: random.Random) -> list[str]:
    """A text in pieces of random lengths."""
    ends = sorted(rng.sample(range(len(text)), rng.randint(0, len(text) - 1)))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


# ---- arguments that are no object


NOTHING = ["null", "None", '""', '" "', '"null"', '"None"', '"{}"']


@pytest.mark.parametrize("nothing", NOTHING)
def test_no_arguments_are_an_empty_object(nothing: str) -> None:
    object_of = f'{{"name": "get-time", "arguments": {nothing}}}'
    reversed_of = f'{{"arguments": {nothing}, "name": "get-time"}}'
    for family, text in [
        (HERMES, f"<tool_call>\n{object_of}\n</tool_call>"),
        (HERMES, f"<tool_call>\n{reversed_of}\n</tool_call>"),
        (LLAMA3_JSON, object_of.replace("arguments", "parameters")),
        (LLAMA3_JSON, reversed_of),
        (MISTRAL, f"[TOOL_CALLS][{object_of}, {reversed_of}]"),
        (MISTRAL, f"[TOOL_CALLS]{object_of}"),
        (MISTRAL, f"[TOOL_CALLS]get-time[ARGS]{nothing}[TOOL_CALLS]get-time[ARGS] {nothing}"),
    ]:
        in_every_cut(family, text)
        content, calls = found(family, text)
        assert not content
        assert set(calls) == {("get-time", "{}")}


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (HERMES, '<tool_call>{"name": "get-time", "arguments": '),
        (HERMES, '<tool_call>{"name": "get-time", "arguments": nul'),
        (LLAMA3_JSON, '{"name": "get-time", "parameters":'),
        (MISTRAL, '[TOOL_CALLS][{"name": "get-time", "arguments":'),
        (MISTRAL, "[TOOL_CALLS]get-time[ARGS]"),
        (MISTRAL, "[TOOL_CALLS]get-time[ARGS]nu"),
        (QWEN3_CODER, "<tool_call>\n<function=get-time>"),
        (QWEN3_CODER, "<tool_call>\n<function=get-time>\n<para"),
        (QWEN3_CODER, "<function=get-time>\n</func"),
    ],
)
def test_a_call_that_ends_before_its_arguments_is_content(family: ToolFamily, text: str) -> None:
    assert found(family, text) == Found(text, [])


# ---- any text, in any pieces

_BITS = sorted(
    {bit for family in FAMILIES for bit in family.special}
    | {"<function=get_weather>", "<parameter=city>", "<parameter=days>", "</parameter>"}
    | {"</function>", "\n", " ", '"', "'", "\\", "{", "}", "[", "]", "(", ")", ",", ":", "=", ";"}
    | {'{"name": "get_weather", ', '"arguments": ', '"parameters": ', "get_weather", "get-time("}
    | {'{"city": "Paris"}', "city=", "null", "None", "5", "ä", "x", "<", "[TOOL_", "</think>"}
    | {"<think>", '{"name": "get-time"}', "\\u00", "<tool_c", "[get_weather(", '"""', "r'", 'f"'}
    | {"0x1", "city='a', ", "x" * MAX_UNDECIDED, '"arguments": "{', '\\"', "'''"}
    | call_texts.BITS
)
texts = st.lists(st.sampled_from(_BITS) | st.text(max_size=3), max_size=25).map("".join)
whole = st.sampled_from([text for _, text, _, _ in REAL] + [text for _, text in MALFORMED + CUT])


@pytest.mark.parametrize("family", FAMILIES, ids=[f.name for f in FAMILIES])
@settings(max_examples=60, deadline=None)
@given(texts | whole | st.tuples(whole, texts, whole).map("".join), st.data())
def test_pieces_do_not_matter(family: ToolFamily, text: str, data: st.DataObject) -> None:
    whole = read(family.parser(OPTIONS), text)
    assert read(family.parser(OPTIONS), text, 1) == whole
    size = data.draw(st.integers(1, 12))
    assert read(family.parser(OPTIONS), text, size) == whole
    for _, arguments in found(family, text).calls:
        assert arguments not in ("", "null", '""')


@pytest.mark.parametrize(("family", "text"), CUT + [(case[0], case[1]) for case in REAL])
def test_arguments_are_json_exactly_where_the_call_is_whole(family: ToolFamily, text: str) -> None:
    for end in range(len(text) + 1):
        parser = family.parser(OPTIONS)
        events = merge_events(parser.add_text(text[:end]) + parser.close())
        last = next((e for e in reversed(events) if isinstance(e, Arguments)), None)
        assert last is not None or not parser.call_is_open
        assert last is None or is_json(last.text) != parser.call_is_open


@settings(max_examples=50, deadline=None)
@given(texts, st.sampled_from(["before", "inside"]), st.booleans(), st.integers(1, 9))
def test_pieces_do_not_matter_to_reasoning(
    text: str, stage: Any, verbatim: bool, size: int
) -> None:
    tags = ReasoningTags("<think>", "</think>")
    whole = read(ReasoningParser(tags, stage, verbatim=verbatim), text)
    assert read(ReasoningParser(tags, stage, verbatim=verbatim), text, size) == whole
    if verbatim:
        assert "".join(part for _, part in whole) == text


# Answers of gpt-oss, their reasoning and their content.
CHANNELS = [
    (f"{call_texts.ANALYSIS}{call_texts.FINAL}Yes.<|return|>", "I look.", "Yes."),
    (call_texts.ANALYSIS * 2 + f"{call_texts.FINAL}Y<b>es", "I look.\nI look.", "Y<b>es"),
    (
        f"<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant{call_texts.ANALYSIS}"
        '<|channel|>final <|constrain|>json<|message|>{"a": 1}',
        "I look.",
        'Let me see.\n{"a": 1}',
    ),
    (" to=python<|channel|>analysis code<|message|>1 + 1<|call|>", "1 + 1", ""),
    ("<|channel|>analysis<|message|>thin", "thin", ""),
    (f"{call_texts.ANALYSIS}<|channel|>fin", "I look.", ""),
    (call_texts.ANALYSIS[:-4], "I look.", ""),
    (f"{call_texts.ANALYSIS} t", "I look.", ""),
    ("<|message|>Yes.<|return|>", "", "Yes."),
    ("no channels", "", "no channels"),
]


@pytest.mark.parametrize(("text", "reasoning", "content"), CHANNELS)
def test_channels_are_reasoning_or_content(text: str, reasoning: str, content: str) -> None:
    for tags in (find_reasoning_tags("openai_gptoss", ""), find_reasoning_tags("auto", text)):
        if tags is None:
            continue
        for size in (1, 5, None):
            events = read(make_reasoning_parser(tags, "before", verbatim=False), text, size)
            assert "".join(part for kind, part in events if kind == "Reasoning") == reasoning
            assert "".join(part for kind, part in events if kind == "Content") == content


def test_a_channel_without_reasoning_parser_is_content_with_its_tags() -> None:
    verbatim = HarmonyParser(OPTIONS, verbatim=True)
    text = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{call_texts.FINAL}Yes."
    assert read(verbatim, text) == [
        ("Content", "<|channel|>analysis<|message|>hm<|end|>Yes."),
    ]
    assert read(HarmonyParser(None), f"{call_texts.COMMENTARY}{{}}") == [
        ("Content", f"{call_texts.COMMENTARY}{{}}")
    ]


def test_kimis_calls_end_its_reasoning() -> None:
    tags = find_reasoning_tags("kimi_k2", "")
    assert tags is not None
    assert find_reasoning_tags("auto", f"<think></think>{call_texts.SECTION}") == tags
    for text in ("hm <tool", "hm "):
        for verbatim in (True, False):
            for size in (1, None):
                parser = ReasoningParser(tags, "inside", verbatim=verbatim)
                assert read(parser, f"{text}{call_texts.SECTION} x", size) == [
                    ("Reasoning", text),
                    ("Content", f"{call_texts.SECTION} x"),
                ]


# Templates of Gemma 4 name its channel and its calls.
GEMMA4_TEMPLATE = "{{ '<|channel>thought\\n' + text + '<channel|>' }}<|tool_call>call:"


@pytest.mark.parametrize("size", [1, 4, None])
def test_gemmas_thoughts_end_at_their_tag_or_at_a_call(size: int | None) -> None:
    tags = find_reasoning_tags("gemma4", "")
    assert tags is not None
    assert find_reasoning_tags("auto", GEMMA4_TEMPLATE) == tags
    call = f"{call_texts.TOOL_CALL}f{{}}{call_texts.END_TOOL}"
    for text, reasoning, content in (
        ("<|channel>thought\nI <think>.\n<channel|>Yes.", "I <think>.\n", "Yes."),
        ("<|channel>thought\n<channel|>Yes.", "", "Yes."),
        (f"<|channel>thought\nI look.\n{call}", "I look.\n", call),
        ("<|channel>thought\nI look.<chan", "I look.<chan", ""),
        ("<|channel>thou", "", "<|channel>thou"),
        ("Yes.<channel|>", "", "Yes.<channel|>"),
    ):
        events = read(ReasoningParser(tags, "before", verbatim=False), text, size)
        assert "".join(part for kind, part in events if kind == "Reasoning") == reasoning
        assert "".join(part for kind, part in events if kind == "Content") == content
        verbatim = read(ReasoningParser(tags, "before", verbatim=True), text, size)
        assert "".join(part for _, part in verbatim) == text


def test_the_prompt_says_whether_gemma_thinks() -> None:
    tags = find_reasoning_tags("gemma4", "")
    assert tags is not None
    stages = [
        tags.find_stage(tail, None)
        for tail in (
            "<|turn>model\n",
            "<|turn>model\n<|channel>thought\n<channel|>",
            "<tool_response|><|channel>thought\n",
            "<tool_response|>",
        )
    ]
    assert stages == ["before", "after", "inside", "before"]


def test_reasoning_ends_at_its_tag() -> None:
    tags = ReasoningTags("<think>", "</think>")
    for stage, text in (
        ("before", " <think>\nhm\n</think>\n\nYes"),
        ("inside", "\nhm\n</think>Yes"),
    ):
        events = read(ReasoningParser(tags, stage, verbatim=False), text)  # type: ignore[arg-type]
        assert events == [("Reasoning", "hm\n"), ("Content", "Yes")]
    assert read(ReasoningParser(tags, "before", verbatim=False), "a <think> b") == [
        ("Content", "a <think> b")
    ]
    assert ReasoningParser(tags, "inside", verbatim=False).add_text("hm </thi") == [
        Reasoning("hm ")
    ]


# ---- texts that are meant to hurt

HOSTILE = [
    (HERMES, "<tool_call>" * 60_000),
    (HERMES, "<tool_call>{" + '"a": [' * 100_000),
    (HERMES, '<tool_call>{"name": "f", "arguments": ' + "[" * 500_000),
    (HERMES, '<tool_call>{"name": "f", "arguments": "' + "\\" * 500_000),
    (HERMES, "<tool_call>" + " " * 500_000),
    (HERMES, '<tool_call>{"name": "f"}' * 25_000),
    (QWEN3_CODER, "<function=f><parameter=a>" + "</parameter" * 50_000),
    (QWEN3_CODER, "<function=f><parameter=a>[" + '"</parameter>' * 50_000),
    (QWEN3_CODER, "<function=f>" + "<parameter=a>1</parameter>" * 20_000),
    (QWEN3_CODER, "<function=" + "f" * 500_000),
    (LLAMA3_JSON, "{" + '"name": ' * 70_000),
    (LLAMA3_JSON, '{"name": "get-time", "parameters": {}};' * 15_000),
    (PYTHONIC, "[get_weather(a=" + "[" * 500_000),
    (PYTHONIC, "[get_weather(a='" + "\\" * 500_001),
    (PYTHONIC, "[get_weather(a=" + "9" * 500_000),
    (PYTHONIC, "[" + "get_weather(a=1)," * 30_000),
    (MISTRAL, "[TOOL_CALLS]" * 50_000),
    (MISTRAL, "[TOOL_CALLS][" + "," * 500_000),
    *call_texts.HOSTILE,
]


@pytest.mark.parametrize(("family", "text"), HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("size", [7, None], ids=["small pieces", "one piece"])
def test_hostile_texts_take_time_in_proportion_to_their_length(
    family: ToolFamily, text: str, size: int | None
) -> None:
    """At a microsecond for each character they take a moment; a parser that read anything again
    and again would take hours."""
    read(family.parser(OPTIONS), text[: 1 << 15 if size else 1 << 17], size)


def test_little_is_held_back() -> None:
    for text in ('<tool_call>{"x": "' + "a" * 100_000, "<tool_call>" + " " * 100_000):
        parser = HERMES.parser(OPTIONS)
        shown = sum(len(e.text) for e in parser.add_text(text) if isinstance(e, Content))
        assert shown >= len(text) - MAX_HELD


def test_what_is_held_too_long_comes_out_at_the_same_character() -> None:
    call = '<tool_call>{"name": "get-time"}</tool_call>'
    for length in range(MAX_HELD - 40, MAX_HELD + 10):
        text = '<tool_call>{"x": "' + "a" * length + '"}' + call
        whole = read(HERMES.parser(OPTIONS), text)
        assert read(HERMES.parser(OPTIONS), text, 97) == whole
        assert whole[-2:] == [("CallStart", "get-time"), ("Arguments", "{}")]


# ---- which family a template is of

HERMES_CALL = '{{- \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}'
DEEPSEEK_CALL = "{{ '" + call_texts.CALL + "' + name + '" + call_texts.SEP + "' + "
# What is characteristic of public templates, by the models that have it.
TEMPLATES: list[tuple[str, str | None, str]] = [
    ("Qwen 2.5, Qwen 3", "hermes", '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": '),
    ("the calls of a history", "hermes", HERMES_CALL),
    ("Hermes 3", "hermes", '<tool_call>\n{"arguments": <args-dict>, "name": <function-name>}'),
    ("Hermes 2 Pro", "hermes", "<tool_call>\\n{'arguments': <args-dict>, 'name': "),
    ("EXAONE 4", "hermes", '{{ "<tool_call>" + \'{"name": function_name, "arguments": {\' }}'),
    ("ERNIE 4.5", "hermes", "{{ '<tool_call>\n' }}{{- '{\"name\": \"' }}"),
    ("Falcon H1", "hermes", "json object with function name and arguments within <tool_call>"),
    ("Qwen3-Coder", "qwen3_coder", "<tool_call>\\n<function=f>\\n<parameter=a>\\nvalue"),
    ("Qwen 3.5", "qwen3_coder", "'<tool_call>\\n<function=' + name + '>\\n' }}{{ '<parameter='"),
    ("Nemotron 3", "qwen3_coder", "<tool_call>\n<function=example>\n<parameter=a>\nvalue_1"),
    ("Llama 3.1", "llama3_json", '{"name": function name, "parameters": dictionary of argument'),
    ("Llama 3.2", "llama3_json", '{\\"name\\": function name, \\"parameters\\": dictionary of'),
    ("Llama 4", "llama3_json", '{"name": function name, "parameters": x}<|python_start|>'),
    ("Llama 3.2, in Python", "pythonic", "of [func_name1(params_name1=params_value1)]"),
    ("Llama 4, in Python", "pythonic", "<|python_start|>[func_name1(a=1)]<|python_end|>"),
    ("Mistral 7B", "mistral", "[TOOL_CALLS][{"),
    ("Mistral Small", "mistral", "[TOOL_CALLS]' + name + '[ARGS]"),
    ("no calls", None, "{{ messages }}"),
    ("MiniMax M1", None, '<tool_calls>\n{"name": "f", "arguments": {}}\n</tool_calls>'),
    ("MiniMax M2", None, '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">'),
    ("MiniMax M3", None, "{{ ns }}<tool_call>\n{{ ns }}<invoke name=\"' + f + '\">{{ ns }}<a>1"),
    ("MiniMax M3 with its own names", None, "]<]minimax[>[<tool_call> ]<]minimax[>[<invoke name="),
    ("GLM 4.7", "glm47", "<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"),
    ("GLM 4.5", "glm45", "<tool_call>{function-name}\n<arg_key>{arg-key}</arg_key>\n<arg_value>"),
    ("Seed-OSS", None, "<seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>"),
    ("Apriel", None, "within <tool_call></tool_call>: <tool_calls>[{{ tools }}]</tool_calls>"),
    ("Hunyuan", None, "<tool_calls><tool_call>f<tool_sep>\n```json\n{}\n```</tool_call>"),
    ("Hunyuan, small", None, "<tool_call>f\n```json\n{}\n```</tool_call>"),
    ("Functionary 3.1", None, '<function=f>{"a": 1}</function> <|python_tag|>'),
    ("Functionary 3.2", None, ">>>f\n{} <|python_tag|>"),
    ("a tag of Llama 3 alone", None, "<|python_tag|>"),
    ("Nemotron Nano", None, '<TOOLCALL>[{"name": function name, "parameters": {}}]</TOOLCALL>'),
    ("LFM2", None, "<|tool_call_start|>[func_name1(a=1)]<|tool_call_end|>"),
    ("Granite 3", None, '<|tool_call|>[{"name": "f", "arguments": {}}]'),
    ("Phi 4 mini, in vLLM", "phi4_mini_json", 'as functools[{"name": [name], "arguments": []}]'),
    ("Phi 4 mini", "phi4_mini_json", '<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>'),
    ("Kimi K2", "kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"),
    (
        "DeepSeek V3",
        "deepseek_v3",
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>f\n```json",
    ),
    ("DeepSeek R1", "deepseek_v3", DEEPSEEK_CALL + "'\\n' + '```json' + '\\n' + arguments }}"),
    ("DeepSeek V3.1", "deepseek_v31", DEEPSEEK_CALL + "arguments | tojson }}"),
    ("DeepSeek V3.2", None, '<\uff5cDSML\uff5cfunction_calls>\n<\uff5cDSML\uff5cinvoke name="f">'),
    ("Step 3", None, '<\uff5ctool_calls_begin\uff5c><steptml:invoke name="f">'),
    ("LongCat", None, '<longcat_tool_call>{"name": "f", "arguments": {}}</longcat_tool_call>'),
    ("OLMo 3", None, "<function_calls>f(a=1)</function_calls>"),
    ("InternLM", None, '<|action_start|><|plugin|>{"name": "f", "parameters": {}}'),
    ("Command R", None, 'Action: ```json\n[{"tool_name": "f", "parameters": {}}]'),
    ("Command A", None, '<|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>'),
    (
        "FunctionGemma",
        "functiongemma",
        "{{- '<start_function_call>call:' + function['name'] + '{' -}}",
    ),
    ("Gemma 4", "gemma4", "{{- '<|tool_call>call:' + function['name'] + '{' -}}"),
    ("Gemma 3, in JSON", "llama3_json", '{"name": function name, "parameters": dictionary of'),
    ("Gemma 3, in Python", "pythonic", "[func_name1(params_name1=params_value1...), func_name2("),
    ("Gemma 3, without calls", None, "{{ '<start_of_turn>' + role + '\n' }}<end_of_turn>"),
    (
        "gpt-oss",
        "openai",
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}",
    ),
    ("Apertus", None, '<|tools_prefix|>[{"f": {}}]<|tools_suffix|>'),
    ("xLAM", None, '[{"name": "f", "arguments": {}}]'),
    ("only a tag", None, "Write calls within <tool_call></tool_call>."),
    ("another format in the tag", None, "<tool_call>f(a=1)</tool_call>"),
    ("XML in the tag", None, "<tool_call><name>f</name><arguments>{}</arguments></tool_call>"),
]


def test_the_command_line_offers_the_families_that_are_there() -> None:
    """All families, and the names that they have in other servers."""
    shown = {family for _, family, _ in TEMPLATES if family is not None}
    offered = {name: find_tool_family(name, "") for name in TOOL_CALL_PARSERS}
    assert {name for name, family in offered.items() if family is None} == {"auto", "none"}
    assert {family.name for family in offered.values() if family is not None} == shown
    assert shown <= set(TOOL_CALL_PARSERS)


@pytest.mark.parametrize(("model", "name", "template"), TEMPLATES, ids=[t[0] for t in TEMPLATES])
def test_auto_knows_a_template_by_its_calls_or_not_at_all(
    model: str, name: str | None, template: str
) -> None:
    template = f"{{% if tools %}}{{{{ tools }}}}{{% endif %}}{template}"
    family = find_tool_family("auto", template)
    assert name == (None if family is None else family.name), model
    assert find_tool_family("none", template) is None
    for chosen in FAMILIES:
        named = find_tool_family(chosen.name, template)
        assert named is not None
        assert named.name == chosen.name


def test_what_a_template_asks_for_counts_more_than_its_tokens() -> None:
    """That of Llama 4."""
    asked = '{"name": function name, "parameters": dictionary of argument name}'
    assert find_tool_family("auto", f"{asked}<|python_start|><|python_end|>") is LLAMA3_JSON
    assert find_tool_family("auto", "{{ tools }}<|python_start|>") is PYTHONIC
