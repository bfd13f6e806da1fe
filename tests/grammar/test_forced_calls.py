"""The embedded model, which has never seen a call, writes those of each family where it must."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from cluster import Cluster
from tokenizers import Tokenizer

from pd.embedded import EMBEDDED_MODEL
from pd.proxy.config import ProxyConfig
from pd.proxy.server import ProxyThread

if TYPE_CHECKING:
    from collections.abc import Iterator

CITIES = ["Oslo", "Rome"]
PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("weather", "clock")
]
# The text before a call of `clock` and after its arguments; the rest is the city.
DEEPSEEK = "<\uff5ctool\u2581%s\uff5c>"
BEGIN, CALL, SEP, END, LAST = (
    DEEPSEEK % tag
    for tag in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
)
FORMATS = {
    "hermes": ('<tool_call>\n{"name": "clock", "arguments": {', "}}\n</tool_call>"),
    "qwen3_coder": (
        "<tool_call>\n<function=clock>\n<parameter=city>\n",
        "\n</parameter>\n</function>\n</tool_call>",
    ),
    "mistral": ('[TOOL_CALLS][{"name": "clock", "arguments": {', "}}]"),
    "pythonic": ("[clock(city=", ")]"),
    "deepseek_v31": (f"{BEGIN}{CALL}clock{SEP}{{", f"}}{END}{LAST}"),
    "glm47": ("<tool_call>clock<arg_key>city</arg_key><arg_value>", "</arg_value></tool_call>"),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:",
        "}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "openai": (
        "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{",
        "}",
    ),
    "functiongemma": (
        "<start_function_call>call:clock{city:<escape>",
        "<escape>}<end_function_call>",
    ),
    "gemma4": ('<|tool_call>call:clock{city:<|"|>', '<|"|>}<tool_call|>'),
    "phi4_mini_json": ('functools[{"name": "clock", "arguments": {', "}}]"),
}


@pytest.fixture(scope="module")
def node_url() -> Iterator[str]:
    size = {"prefill": 0, "decode": 0, "unified": 1, "kv_cache_tokens": 8192}
    with Cluster(EMBEDDED_MODEL, **size) as cluster:
        yield cluster.unified[0].url
        cluster.wait_idle()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))


QUICK = ("qwen3_coder", "kimi_k2")


@pytest.mark.parametrize(
    "family",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.full) for each in FORMATS],
)
def test_each_family_has_its_own_format(node_url: str, tokenizer: Tokenizer, family: str) -> None:
    begin, end = FORMATS[family]
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "What time is it?"}],
        "tools": TOOLS,
        "temperature": 0,
        "max_tokens": 240,
        "parallel_tool_calls": False,
        "return_token_ids": True,
    }
    named = {"type": "function", "function": {"name": "clock"}}
    with ExitStack() as stack:
        config = ProxyConfig(port=0, unified=[node_url], tool_call_parser=family)
        url = stack.enter_context(ProxyThread(config)).url
        client = stack.enter_context(httpx.Client(base_url=url, timeout=60))
        for choice in (named, "required"):
            body = asked | {"tool_choice": choice}
            response = client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            (answer,) = response.json()["choices"]
            (call,) = answer["message"]["tool_calls"]
            name = call["function"]["name"]
            text = tokenizer.decode(answer["token_ids"])
            assert text.startswith(begin.replace("clock", name))
            assert text.endswith(end)
            assert json.loads(call["function"]["arguments"])["city"] in CITIES
            assert name == "clock" if choice == named else name in ("weather", "clock")
