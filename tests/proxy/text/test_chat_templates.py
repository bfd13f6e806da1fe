"""Chat templates: what they are given, and that prompts are those of transformers."""

from __future__ import annotations

import copy
import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from proxy_tokenizers import byte_level
from test_proxy_tools import ASKED, CLOCK, WEATHER, Scripted

from pd.core.errors import InvalidRequestError
from pd.proxy.requests.messages import read_messages
from pd.proxy.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from pathlib import Path

    from proxy_cluster import Cluster
    from transformers import PreTrainedTokenizerFast

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [WEATHER, CLOCK]


@pytest.fixture(scope="module")
def transformers_tokenizer() -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), **TOKENS)


def render(source: str, messages: list[Any], **options: Any) -> str:
    return ChatTemplate(source, TOKENS).render(read_messages(copy.deepcopy(messages)), **options)


def call(name: str, arguments: object, number: int = 1) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def turn(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls)} | fields


def result(text: str = "sunny", number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "content": text}


# ---- calls of earlier turns

ARGUMENTS = {"city": "Päris", "days": 2}
AS_JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
# Writes calls where the content is null alone, with arguments as a text, as DeepSeek V3 does.
NULL_AND_TEXT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for c in m['tool_calls'] %}[CALL]{{ c['type'] }}:{{ c['function']['name'] }}\n"
    "{{ '```json\n' + c['function']['arguments'] + '\n```' }}{% endfor %}"
    "{% elif m['role'] == 'assistant' %}[BOT]{{ m['content'] }}</s>"
    "{% else %}[{{ m['role'] }}]{{ m['content'] }}{% endif %}{% endfor %}"
)
HEAD = "{% for m in messages %}[{{ m.role }}]"
TAIL = "{% endfor %}"
TEXT = "{% if m.content %}{{ m.content }}{% endif %}"
NAMES = "{% for c in m.tool_calls or [] %}({{ c.function.name }} "
SHAPES = {
    "null and a text": NULL_AND_TEXT,
    "null and an object": NULL_AND_TEXT.replace(
        "'```json\n' + c['function']['arguments'] + '\n```'", "c['function']['arguments'] | tojson"
    ),
    "text": HEAD + TEXT + NAMES + "{{ '' + c.function.arguments }}){% endfor %}" + TAIL,
    "printed as it is": HEAD + TEXT + NAMES + "{{ c.function.arguments }}){% endfor %}" + TAIL,
    "object": HEAD + TEXT + NAMES + "{{ c.function.arguments | tojson }}){% endfor %}" + TAIL,
    "members": HEAD
    + TEXT
    + NAMES
    + "{{ '{' }}{% for k, v in c.function.arguments.items() %}{{ k | tojson }}: {{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}{{ '}' }}){% endfor %}" + TAIL,
    "either": HEAD
    + TEXT
    + NAMES
    + "{{ c.function.arguments if c.function.arguments is string else "
    "c.function.arguments | tojson }}){% endfor %}" + TAIL,
    "only an object": HEAD
    + TEXT
    + NAMES
    + "{% if c.function.arguments is mapping %}{{ c.function.arguments | tojson }}{% endif %})"
    "{% endfor %}" + TAIL,
    "only a text": HEAD
    + TEXT
    + NAMES
    + "{% if c.function.arguments is string %}{{ c.function.arguments }}{% endif %}){% endfor %}"
    + TAIL,
    "content or calls": HEAD
    + "{% if m.content is defined %}{{ m.content }}{% else %}{{ m.tool_calls | tojson }}{% endif %}"
    + TAIL,
    "content that is a text or calls": HEAD
    + "{% if m.content is string %}{{ m.content }}{% else %}{{ m.tool_calls | tojson }}{% endif %}"
    + TAIL,
    "whole calls": HEAD + TEXT + "{{ (m.tool_calls or []) | tojson }}" + TAIL,
    "refuses null": HEAD
    + "{{ raise_exception('no content') if m.content is not string }}{{ m.content }}"
    + NAMES
    + "{{ c.function.arguments | tojson }}){% endfor %}"
    + TAIL,
    "refuses content": HEAD
    + "{% if m.tool_calls and m.content is not none %}{{ raise_exception('content') }}{% endif %}"
    + TEXT
    + NAMES
    + "{{ c.function.arguments | tojson }}){% endfor %}"
    + TAIL,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("given", [ARGUMENTS, AS_JSON], ids=["object", "text"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=str)
def test_every_template_shows_calls_in_the_form_that_it_knows(
    shape: str, given: object, content: dict[str, Any]
) -> None:
    calls = [call("get_weather", given), call("clock", "{}", 2)]
    history = [*ASKED, turn(*calls, **content), result(), result("noon", 2), *ASKED]
    prompt = render(SHAPES[shape], history, tools=TOOLS)
    assert "get_weather" in prompt
    assert prompt.count(AS_JSON) == 1, prompt
    assert "clock" in prompt
    assert "None" not in prompt
    assert "sunny" in prompt


@pytest.mark.parametrize("shape", SHAPES)
def test_text_beside_calls_is_shown_with_them(shape: str) -> None:
    """By a template that shows one of them alone as two messages."""
    history = [*ASKED, turn(call("get_weather", ARGUMENTS), content="I look."), result()]
    prompt = render(SHAPES[shape], history, tools=TOOLS)
    assert prompt.index("I look.") < prompt.index("get_weather") < prompt.index(AS_JSON)


@pytest.mark.parametrize(
    "source",
    [
        HEAD + "{{ m.content }}" + TAIL,
        HEAD + "{{ m.content }}{% if m.tool_calls %}calls{% endif %}" + TAIL,
        HEAD + "{{ m.content }}" + NAMES + "{% endfor %}" + TAIL,
        HEAD + "{{ m.content }}{{ m.tool_calls | tojson if loop.first and m.tool_calls }}" + TAIL,
    ],
)
def test_a_call_that_a_template_would_drop_is_refused(source: str) -> None:
    history = [*ASKED, turn(call("f", "{}"), call("g", "{}", 2)), result(), result("x", 2)]
    with pytest.raises(InvalidRequestError, match="does not show the calls of earlier messages"):
        render(source, history)
    assert "sunny" in render(source, [*ASKED, result()])


# Shows one call per message, and takes a result as that of the last call, as gpt-oss's.
ONE_AFTER_THE_OTHER = (
    "{% set n = namespace(last=none) %}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.thinking %}<analysis>{{ m.thinking }}{% endif %}"
    "{% set n.last = m.tool_calls[0].function %}<to={{ n.last.name }}>"
    "{{ n.last.arguments | tojson }}"
    "{% elif m.role == 'tool' %}<from={{ n.last.name }}>{{ m.content }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
# Refuses messages with several calls, as Llama 3's.
REFUSES_SEVERAL = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<to={{ c.function.name }}>"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def test_several_calls_are_shown_one_after_the_other() -> None:
    calls = [call("f", {"a": 1}), call("g", {"b": 2}, 2), call("h", {"c": 3}, 3)]
    # The results come in another order, and one has no call.
    results = [result("of g", 2), result("of f"), result("of nothing", 9), result("of h", 3)]
    asked = [{"role": "user", "content": "hi"}]
    history = [*asked, turn(*calls, reasoning_content="hm", thinking="hm"), *results, *asked]
    assert render(ONE_AFTER_THE_OTHER, history) == (
        '<user>hi<analysis>hm<to=f>{"a": 1}<from=f>of f<to=g>{"b": 2}<from=g>of g'
        '<to=h>{"c": 3}<from=h>of h<from=h>of nothing<user>hi'
    )
    assert render(REFUSES_SEVERAL, [*asked, turn(*calls, content="I look."), *results[:2]]) == (
        '<user>hi<assistant>I look.<to=f>{"a": 1}<tool>of f<assistant><to=g>{"b": 2}<tool>of g'
        '<assistant><to=h>{"c": 3}'
    )


def test_what_a_template_says_against_messages_is_said() -> None:
    source = SHAPES["object"] + "{{ raise_exception('one call at a time') }}"
    with pytest.raises(InvalidRequestError, match="one call at a time"):
        render(source, [*ASKED, turn(call("f", "{}"))])


def test_a_message_that_ends_with_calls_is_not_continued() -> None:
    history = [*ASKED, turn(call("f", "{}"), content="I look")]
    with pytest.raises(InvalidRequestError, match="the last message has calls"):
        render(SHAPES["object"], history, add_generation_prompt=False, continue_final_message=True)


def test_a_template_is_tried_once_for_all_requests() -> None:
    template = ChatTemplate(SHAPES["null and a text"], TOKENS)
    rendered: list[object] = []
    generate = template._run_template
    template._run_template = lambda *given: rendered.append(given) or generate(*given)  # type: ignore[method-assign]
    messages = read_messages([*ASKED, turn(call("f", ARGUMENTS)), result()])
    template.render(messages)
    assert len(rendered) > 1
    for number in range(1, 4):
        rendered.clear()
        template.render(messages)
        assert len(rendered) == 1, number
    rendered.clear()
    template.render(read_messages(ASKED))
    assert len(rendered) == 1


@pytest.mark.parametrize("split", [False, True])
def test_a_history_through_the_proxy(cluster: Cluster, tmp_path: Path, split: bool) -> None:
    source = NULL_AND_TEXT + "{{ tools | tojson if tools }}"
    model = Scripted(
        cluster, tmp_path, source, tool_call_parser="hermes", split_special_tokens=split
    )
    history = [*ASKED, turn(call("get_weather", '{"city": "</s>"}'), content=None), result()]
    model.ask("ok", messages=history)
    assert '[CALL]function:get_weather\n```json\n{"city": "</s>"}\n```' in model.prompt()
    (tmp_path / "plain").mkdir()
    source = HEAD + "{{ m.content }}{{ tools }}" + TAIL
    plain = Scripted(cluster, tmp_path / "plain", source, tool_call_parser="hermes")
    assert "does not show the calls" in plain.refused(messages=history)


# ---- the same as transformers

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <b>kind</b>."},
    {"role": "user", "content": "Wie ist's in Zürich?"},
    turn(call("get_weather", ARGUMENTS), content="", reasoning_content="I need the weather."),
    result(),
    {"role": "assistant", "content": "Sunny.", "reasoning": "Easy."},
    {"role": "assistant", "content": "Bye.", "thinking": "Hm."},
    {"role": "user", "content": "Thanks."},
]
COMPARED = [
    HEAD + "{{ m.content }}|{{ m.reasoning_content }}|{{ m.thinking }}" + TAIL,
    HEAD + "{{ m.thinking is defined }}{{ m.reasoning_content is defined }}{{ m | length }}" + TAIL,
    HEAD + "{% if m.thinking %}<analysis>{{ m.thinking }}{% endif %}{{ m.content }}" + TAIL,
    "{{ documents is none }}{{ documents is defined }}{{ tools is none }}",
    "{% for d in documents or [] %}{{ d.title }}: {{ d['text'] }}{% endfor %}",
    "{% if documents %}{{ documents | tojson(indent=1) }}{% endif %}{{ tools | tojson }}",
    "{{ bos_token }}{{ add_generation_prompt }}{{ enable_thinking is defined }}{{ eos_token }}",
    "{% set ns = namespace(a=1) %}{% set d = dict(b=2) %}{{ ns.a }}{{ d | tojson }}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    *SHAPES.values(),
]  # fmt: skip
TAKE_TEXT = {"null and a text", "text", "printed as it is", "only a text"}
TAKE_NO_CONTENT = {"null and a text", "null and an object", "refuses content"}
TAKE_NO_CONTENT |= {"content or calls", "content that is a text or calls"}
DOCUMENTS = [{"title": "Ä", "text": "b"}, {"title": "c", "text": "<d>"}]


@pytest.mark.parametrize("source", COMPARED)
@pytest.mark.parametrize("documents", [None, [], DOCUMENTS], ids=["none", "empty", "two"])
def test_prompts_are_those_of_transformers(
    transformers_tokenizer: PreTrainedTokenizerFast, source: str, documents: Any
) -> None:
    """Given messages in the form that the template shows."""
    given = source
    shape = next((name for name, each in SHAPES.items() if each == source), None)
    chat = CHAT if shape else [message for message in CHAT if "tool_calls" not in message]
    messages = copy.deepcopy(chat)
    if shape in TAKE_TEXT:
        messages[2]["tool_calls"][0]["function"]["arguments"] = AS_JSON
    if shape in TAKE_NO_CONTENT:
        # It drops null, so there is no other way to have it show these calls.
        del messages[2]["content"]
        source = source.replace("m['content'] is none", "m['content'] is undefined")
        source = source.replace("m.content is not none", "m.content is defined")
    extra = {} if documents is None else {"documents": documents}
    expected = transformers_tokenizer.apply_chat_template(
        messages, chat_template=source, tools=TOOLS, tokenize=False, add_generation_prompt=True,
        documents=documents,
    )  # fmt: skip
    assert render(given, chat, tools=TOOLS, extra=extra) == expected


def test_tojson_is_that_of_transformers(transformers_tokenizer: PreTrainedTokenizerFast) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    choices = {
        "ensure_ascii": ["true", "false"],
        "indent": ["none", "0", "1", "4", "'\t'"],
        "separators": ["none", "(',', ':')", "(', ', ' : ')", "[',', ':']"],
        "sort_keys": ["true", "false"],
    }
    value = "{'é': '<&\"', 'b': [1, 2.5, none, true, {}], 'a': {'z': 1, 'c': '\u2028'}}"
    calls = ["", "(false, 2)", "(true, none, (',', ':'), true)"]
    for _ in range(60):
        names = rng.sample(list(choices), rng.randint(1, 4))
        calls.append(f"({', '.join(f'{name}={rng.choice(choices[name])}' for name in names)})")
    source = "".join(f"{{{{ {value} | tojson{each} }}}}\n" for each in calls)
    expected = transformers_tokenizer.apply_chat_template(
        ASKED, chat_template=source, tokenize=False
    )
    assert render(source, ASKED) == expected


# ---- documents


def test_documents_reach_the_template(cluster: Cluster, tmp_path: Path) -> None:
    shows = "{% for d in documents or [] %}<{{ d.title }}: {{ d.text }}>{% endfor %}"
    model = Scripted(cluster, tmp_path, HEAD + "{{ m.content }}" + TAIL + shows)
    model.ask("ok", tools=[], extra_body={"documents": DOCUMENTS})
    assert "<Ä: b><c: <d>>" in model.prompt()
    client = cluster.client(model.proxy)
    body = {"messages": ASKED, "documents": DOCUMENTS}
    assert (
        client.post("/tokenize", json=body).json()["tokens"]
        == np.frombuffer(model.node.wait_generate().token_ids, "<i4").tolist()
    )
    for wrong in ("a", ["a"], [5], {"a": 1}):
        assert "documents" in model.refused(tools=[], extra_body={"documents": wrong})


def test_documents_that_a_template_does_not_show_are_refused(
    cluster: Cluster, tmp_path: Path
) -> None:
    model = Scripted(cluster, tmp_path)
    assert "does not show documents" in model.refused(extra_body={"documents": DOCUMENTS})
    model.ask("ok", extra_body={"documents": []})
    refused = cluster.client(model.proxy).post(
        "/v1/completions", json={"prompt": "a", "documents": DOCUMENTS}
    )
    assert refused.status_code == 400
