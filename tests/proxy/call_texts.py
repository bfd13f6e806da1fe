"""Texts with calls as models of each family write them, for the tests of their parsers."""

from __future__ import annotations

import json
from typing import Any

from pd.proxy.text.tools.families import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    FUNCTIONGEMMA,
    GEMMA4,
    GLM45,
    GLM47,
    KIMI_K2,
    LLAMA3_JSON,
    OPENAI,
    PHI4_MINI,
    PYTHONIC,
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
FUNCTION_CALL, END_FUNCTION = "<start_function_call>call:", "<end_function_call>"
TOOL_CALL, END_TOOL = "<|tool_call>call:", "<tool_call|>"
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
    # Gemma 3's blocks.
    (
        PYTHONIC,
        "I look.\n```tool_code\n[get_weather(city='```'), get-time()]\n```\nand\n"
        "```tool_code\nget_weather(city='Paris')\nget-time()\n```",
        "I look.\nand\n",
        [
            ("get_weather", {"city": "```"}),
            ("get-time", {}),
            ("get_weather", PARIS),
            ("get-time", {}),
        ],
    ),
    (PYTHONIC, "```tool_code\nget-time()\n``` OK", "OK", [("get-time", {})]),
    (
        LLAMA3_JSON,
        '```json\n{"name": "get_weather", "parameters": {"city": "```"}}\n```\nOK',
        "OK",
        [("get_weather", {"city": "```"})],
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
        FUNCTIONGEMMA,
        f"I look.{FUNCTION_CALL}get_weather{{city:<escape>Paris<escape>}}{END_FUNCTION}"
        f"{FUNCTION_CALL}get-time{{}}{END_FUNCTION}",
        "I look.",
        [("get_weather", PARIS), ("get-time", {})],
    ),
    (
        FUNCTIONGEMMA,
        f'{FUNCTION_CALL}get_weather{{city:<escape>}}{END_FUNCTION}<esc\n{{"<escape>,days:3,places:['
        f"<escape>a<escape>,<escape><escape>]}}{END_FUNCTION} OK",
        "OK",
        [
            (
                "get_weather",
                {"city": f'}}{END_FUNCTION}<esc\n{{"', "days": 3, "places": ["a", ""]},
            )
        ],
    ),
    (
        GEMMA4,
        f'I look. {TOOL_CALL}get_weather{{city:<|"|>Paris<|"|>,days:2,deep:{{a:[1,{{b:true}}],'
        f'c d:<|"|>{END_TOOL}}}<|"<|"|>}},note:null}}{END_TOOL}{TOOL_CALL}get-time{{}}{END_TOOL}',
        "I look. ",
        [
            (
                "get_weather",
                {
                    "city": "Paris",
                    "days": 2,
                    "deep": {"a": [1, {"b": True}], "c d": f'{END_TOOL}}}<|"'},
                    "note": None,
                },
            ),
            ("get-time", {}),
        ],
    ),
    # Deviations that users of the models have reported: a text without its first delimiter, quotes
    # of JSON and Python, names in quotes, other signs after names, and spaces.
    (
        GEMMA4,
        f'{TOOL_CALL}get_weather{{city:Paris, in France<|"|>,days:5,"unit":\'celsius\','
        f'<|"|>note<|"|>: "a\\"\\u00e4\\ud83d\\ude00", places=["x", \'y\', z, 5]}} {END_TOOL}',
        "",
        [
            (
                "get_weather",
                {
                    "city": "Paris, in France",
                    "days": 5,
                    "unit": "celsius",
                    "note": 'a"ä😀',
                    "places": ["x", "y", "z", 5],
                },
            )
        ],
    ),
    (
        GEMMA4,
        f'{TOOL_CALL}get_weather{{city:5,a:None,b c:x, at 5:30, y,<|"|>d<|"|>:True,}}{END_TOOL}',
        "",
        [("get_weather", {"city": "5", "a": None, "b c": "x, at 5:30, y", "d": True})],
    ),
    (
        GEMMA4,
        f'{TOOL_CALL}get_weather{{places:[a b<|"|>,1,],city:}}{END_TOOL}'
        f"{TOOL_CALL}get-time{END_TOOL}",
        "",
        [("get_weather", {"places": ["a b", 1], "city": ""}), ("get-time", {})],
    ),
    # A call whose closing tag is missing.
    (GEMMA4, f"{TOOL_CALL}get-time{{a:[],b:{{}}}}", "", [("get-time", {"a": [], "b": {}})]),
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
    (PYTHONIC, "```tool_code\nprint(1)\n``` ```tool_code\nget-time"),
    (LLAMA3_JSON, '```json\n{"name": "Paris", "population": 2000000}\n```'),
    (LLAMA3_JSON, "```json\n[1]\n``` ```json"),
    (FUNCTIONGEMMA, f"{FUNCTION_CALL}get-time"),
    (FUNCTIONGEMMA, f"<start_function_call>get-time{{}}{END_FUNCTION}"),
    (GEMMA4, f"{TOOL_CALL}{{}}{END_TOOL}"),
    (GEMMA4, f"{TOOL_CALL}get time{{}}{END_TOOL}"),
    (GEMMA4, "the tag <|tool_call> and <|tool_c"),
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
    (FUNCTIONGEMMA, f"{FUNCTION_CALL}get_weather{{city:<escape>Pa"),
    (GEMMA4, f'{TOOL_CALL}get_weather{{city:<|"|>Pa'),
    (GEMMA4, f'{TOOL_CALL}get_weather{{city:"Pa'),
    (KIMI_K2, SECTION + kimi("functions.get_weather:0", '{"city": "Pa').removesuffix(KIMI_END)),
    (GLM47, "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Pa"),
]

# Calls of ``get_weather`` whose brackets stay open, and what is known of their arguments.
BROKEN: list[tuple[ToolFamily, str, str]] = [
    (DEEPSEEK_V3, deepseek_v3("get_weather", '{"city": "Paris"'), '{"city": "Paris"\n```'),
    (DEEPSEEK_V31, deepseek_v31("get_weather", '{"city": [1, <b>'), '{"city": [1, <b>'),
    (KIMI_K2, kimi("functions.get_weather:0", '{"city": {'), '{"city": {'),
    (OPENAI, f'{COMMENTARY}{{"city": [1<|call|>', '{"city": [1'),
    (FUNCTIONGEMMA, f"{FUNCTION_CALL}get_weather{{days:[1{END_FUNCTION}", '{"days": [1'),
    (GEMMA4, f'{TOOL_CALL}get_weather{{city:<|"|>a<|"|>{END_TOOL}', '{"city": "a"'),
    (GEMMA4, f"{TOOL_CALL}get_weather{{a:{{b:c,{END_TOOL}", '{"a": {"b": "c,"'),
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
    (FUNCTIONGEMMA, "<start_function_call>" * 20_000),
    (FUNCTIONGEMMA, f"{FUNCTION_CALL}f{{a:" + "<escape" * 30_000),
    (GEMMA4, f"{TOOL_CALL}f{{a:" + "b," * 50_000),
    (GEMMA4, f"{TOOL_CALL}f{{" + "a:1," * 30_000),
    (GEMMA4, f"{TOOL_CALL}f{{a:" + "[" * 100_000),
    (GEMMA4, f"{TOOL_CALL}f{{a:[" + "x," * 50_000),
    (GEMMA4, f"{TOOL_CALL}f{{" + " " * 100_000),
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
BITS |= {FUNCTION_CALL, END_FUNCTION, "<escape>", TOOL_CALL, END_TOOL, '<|"|>', "get_weather{"}
BITS |= {"```tool_code", "get_weather(", ")"}
BITS |= {"city:", "days=", f"{TOOL_CALL}get_weather{{", f"{TOOL_CALL}get-time{{}}{END_TOOL}"}
BITS |= {"assistant", " to=functions.get-time", "final", "analysis", FINAL, COMMENTARY}
