"""Texts with calls as models of each family write them, for the tests of their parsers."""

from __future__ import annotations

import json
from typing import Any

from pd.proxy.text.tools.families import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM45,
    GLM47,
    KIMI_K2,
    OPENAI,
    PHI4_MINI,
    ToolFamily,
)

PARIS = {"city": "Paris"}
Case = tuple[ToolFamily, str, str, list[tuple[str, Any]]]


def deepseek(tag: str) -> str:
    return f"<\uff5ctool\u2581{tag.replace(' ', chr(0x2581))}\uff5c>"


BEGIN, END = deepseek("calls begin"), deepseek("calls end")
CALL, CALL_END, SEP = deepseek("call begin"), deepseek("call end"), deepseek("sep")


def deepseek_v3(name: str, arguments: str) -> str:
    return f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}"


def deepseek_v31(name: str, arguments: str) -> str:
    return f"{CALL}{name}{SEP}{arguments}{CALL_END}"


def kimi(call_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
ANALYSIS = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
COMMENTARY = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
FINAL = "<|channel|>final<|message|>"
HARMONY_CLOSERS = json.dumps({"city": "<|end|><|call|><|start|>"})
KIMI_END = "<|tool_call_end|>"
KIMI_CLOSERS = json.dumps({"city": f"<|tool_call_end|>{END_SECTION}"})
PARIS_TEXT = json.dumps(PARIS)
CLOSERS = {"city": f"```{CALL_END}{END}"}
CLOSERS_TEXT = json.dumps(CLOSERS, indent=2, ensure_ascii=False)

# ---- family, text, content, calls
REAL: list[Case] = [
    (
        DEEPSEEK_V3,
        f"I look.{BEGIN}{deepseek_v3('get_weather', PARIS_TEXT)}\n"
        f"{deepseek_v3('get-time', '{}')}{END}",
        "I look.",
        [("get_weather", PARIS), ("get-time", {})],
    ),
    (
        DEEPSEEK_V3,
        BEGIN
        + deepseek_v3("get_weather", json.dumps(CLOSERS, indent=2, ensure_ascii=False))
        + END
        + "Done.",
        "Done.",
        [("get_weather", CLOSERS)],
    ),
    # R1, without the tags around all calls, or without those at the end.
    (DEEPSEEK_V3, deepseek_v3("get-time", ""), "", [("get-time", {})]),
    (DEEPSEEK_V3, f'{CALL}function{SEP}get-time\n{{"a": 1}}', "", [("get-time", {"a": 1})]),
    (
        DEEPSEEK_V31,
        f"I look.{BEGIN}{deepseek_v31('get_weather', PARIS_TEXT)}"
        f"{deepseek_v31('get-time', '')}{END}",
        "I look.",
        [("get_weather", PARIS), ("get-time", {})],
    ),
    (
        DEEPSEEK_V31,
        f"{BEGIN}{deepseek_v31('get_weather', CLOSERS_TEXT)} {END} Done.",
        "Done.",
        [("get_weather", CLOSERS)],
    ),
    (DEEPSEEK_V31, deepseek_v31("get-time", '"{\\"a\\": 1}"'), "", [("get-time", {"a": 1})]),
    (
        GLM45,
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Saint-\n Paul "
        "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>places"
        '</arg_key>\n<arg_value>["a </arg_value>", "b"]</arg_value>\n<arg_key>note</arg_key>\n'
        '<arg_value>it\'s "warm"</arg_value>\n</tool_call>\n<tool_call>get-time\n</tool_call> OK',
        "I look.\nOK",
        [
            (
                "get_weather",
                {
                    "city": "Saint-\n Paul ",
                    "days": 3,
                    "places": ["a </arg_value>", "b"],
                    "note": 'it\'s "warm"',
                },
            ),
            ("get-time", {}),
        ],
    ),
    (
        GLM47,
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>a</arg_value>b</arg_value><arg_key"
        ">unit</arg_key><arg_value>celsius</arg_value></tool_call><tool_call>get-time</tool_call>",
        "",
        [("get_weather", {"city": "a</arg_value>b", "unit": "celsius"}), ("get-time", {})],
    ),
    (
        KIMI_K2,
        f"I look. {SECTION}{kimi('functions.get_weather:0', PARIS_TEXT)}"
        f"{kimi(' functions.get-time:1 ', ' ')}{END_SECTION}",
        "I look. ",
        [("get_weather", PARIS), ("get-time", {})],
    ),
    (
        KIMI_K2,
        f"{SECTION} {kimi('get_weather', KIMI_CLOSERS)}\n"
        f"{kimi('get-time:7', '{}')}{END_SECTION} OK",
        "OK",
        [("get_weather", json.loads(KIMI_CLOSERS)), ("get-time", {})],
    ),
    (
        PHI4_MINI,
        'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "get-time", "arguments": {}}]',
        "",
        [("get_weather", PARIS), ("get-time", {})],
    ),
    (
        PHI4_MINI,
        'I look.<|tool_call|>[{"name": "get_weather", "arguments": {"city": "]<|/tool_call|>"}}]'
        "<|/tool_call|> OK",
        "I look.OK",
        [("get_weather", {"city": "]<|/tool_call|>"})],
    ),
    (OPENAI, f"{ANALYSIS}{COMMENTARY}{PARIS_TEXT}<|call|>", "", [("get_weather", PARIS)]),
    (
        OPENAI,
        f" to=functions.get_weather<|channel|>commentary json<|message|>{HARMONY_CLOSERS}<|end|>"
        "<|start|>assistant<|channel|>commentary to=get-time code<|message|><|call|>",
        "",
        [("get_weather", json.loads(HARMONY_CLOSERS)), ("get-time", {})],
    ),
    (
        OPENAI,
        "<|channel|>commentary<|message|>I call.<|end|><|start|>assistant to=functions.get-time"
        '<|channel|>analysis<|message|> {"a": 1} ',
        "I call.",
        [("get-time", {"a": 1})],
    ),
    (KIMI_K2, kimi("functions.get-time", '{"a": 1}'), "", [("get-time", {"a": 1})]),
    (
        GLM47,
        "<tool_call>get_weather<arg_key>note</arg_key><arg_value>None</arg_value><arg_key>city"
        "</arg_key><arg_value>5</arg_value></tool_call>",
        "",
        [("get_weather", {"note": None, "city": "5"})],
    ),
]

# Content, although it has tags.
MALFORMED: list[tuple[ToolFamily, str]] = [
    (DEEPSEEK_V3, f"{BEGIN}function{SEP}get-time\n```json\n{{}}\n```{END}"),
    (DEEPSEEK_V3, f"{BEGIN}{CALL}function{SEP}get-time\n```json\n"),
    (DEEPSEEK_V3, f"{BEGIN}{CALL}function{SEP}get-time\n```json\nno```"),
    (DEEPSEEK_V31, f"{BEGIN}{CALL}a name{SEP}{{}}{CALL_END}{END}"),
    (DEEPSEEK_V31, f"{BEGIN}{CALL}get-time"),
    (GLM45, "<tool_call>\nget-time"),
    (GLM45, "<tool_call>get-time\nis what I call</tool_call>"),
    (GLM45, '<tool_call>\n{"name": "get-time", "arguments": {}}\n</tool_call>'),
    (GLM47, "<tool_call>get-time<arg_key>a</arg_key>1"),
    (GLM47, "<tool_call>get-time</tool_ca"),
    (GLM47, "<tool_call></tool_call>"),
    (KIMI_K2, f"{SECTION}<|tool_call_begin|>functions.get-time:0"),
    (KIMI_K2, f"{SECTION}{kimi('functions.get?:0', '{}')}{END_SECTION}"),
    (KIMI_K2, f"{SECTION}{kimi('', '{}')}"),
    (PHI4_MINI, "import functools, functools[no"),
    (PHI4_MINI, 'functools[{"name": "get-time", '),
    (OPENAI, "a <|start|>user<|message|>b"),
    (OPENAI, "<|channel|>commentary to=functions.get-time json<|message|>"),
    (OPENAI, "<|channel|>commentary to=functions.get-time json<|message|>no"),
    (OPENAI, 'x<|start|>assistant<|channel|>final {"answer": "hi"}'),
    (OPENAI, '<|start|>assistant {"answer": "hi"}<|return|>'),
    (KIMI_K2, f"{SECTION}no call{END_SECTION}"),
    (DEEPSEEK_V31, f"the tag {END} ends calls {CALL[:-2]}"),
]

# Cut off inside a value: the arguments are ``{"city": "Pa``.
CUT: list[tuple[ToolFamily, str]] = [
    (DEEPSEEK_V3, f'{BEGIN}{CALL}function{SEP}get_weather\n```json\n{{"city": "Pa'),
    (DEEPSEEK_V31, f'{BEGIN}{CALL}get_weather{SEP}{{"city": "Pa'),
    (GLM45, "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Pa"),
    (OPENAI, f'{ANALYSIS}{COMMENTARY}{{"city": "Pa'),
    (PHI4_MINI, 'functools[{"name": "get_weather", "arguments": {"city": "Pa'),
    (KIMI_K2, SECTION + kimi("functions.get_weather:0", '{"city": "Pa').removesuffix(KIMI_END)),
    (GLM47, "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Pa"),
]

# Calls of ``get_weather`` whose brackets stay open, and what is known of their arguments.
BROKEN: list[tuple[ToolFamily, str, str]] = [
    (DEEPSEEK_V3, deepseek_v3("get_weather", '{"city": "Paris"'), '{"city": "Paris"\n```'),
    (DEEPSEEK_V31, deepseek_v31("get_weather", '{"city": [1, <b>'), '{"city": [1, <b>'),
    (KIMI_K2, kimi("functions.get_weather:0", '{"city": {'), '{"city": {'),
    (OPENAI, f'{COMMENTARY}{{"city": [1<|call|>', '{"city": [1'),
]

# Texts that are meant to hurt.
HOSTILE: list[tuple[ToolFamily, str]] = [
    (DEEPSEEK_V3, BEGIN * 20_000),
    (DEEPSEEK_V3, f"{CALL}f{SEP}" + "`" * 200_000),
    (DEEPSEEK_V31, f"{CALL}f{SEP}{{" + "<" * 200_000),
    (DEEPSEEK_V31, f"{CALL}f{SEP}{{" + CALL_END[:-1] * 20_000),
    (GLM45, "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>" + "</arg_value>" * 50_000),
    (KIMI_K2, f"{kimi('f:0', '{}')}" * 5_000),
    (PHI4_MINI, "functools[" * 20_000),
    (OPENAI, "<|start|>" * 20_000),
    (OPENAI, "<|channel|>" + "final " * 30_000),
    (OPENAI, "<|channel|>analysis<|message|>a<|end|>" * 5_000),
    (OPENAI, f"{COMMENTARY}{{" + "<|call" * 30_000),
    (KIMI_K2, "<|tool_call_begin|>" + "f:0" * 50_000),
    (GLM47, "<tool_call>f" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 10_000),
]

# Which words and values to make random texts of.
BITS = (
    {SECTION, "functions.", kimi("functions.get-time:0", "{}"), ":0"}
    | {"<arg_key>city</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>get_weather"}
    | {
        "```json",
        "```",
        "function",
        deepseek_v3("get-time", "{}"),
        f"{CALL}get_weather{SEP}",
    }
)
BITS |= {"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"}
BITS |= {"assistant", " to=functions.get-time", "final", "analysis", FINAL, COMMENTARY}
