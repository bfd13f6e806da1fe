"""Requests in the shapes that Claude Code sends are answered, through Anthropic's own client."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import anthropic
import pytest
from fake_node import EOS
from proxy_cluster import Cluster
from tool_models import QWEN, tokenizer, write_model

from pd.core.messages import MAX_PREFIX_LEASE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fake_node import FakeNode

NAMES = ["claude-large", "claude-small"]
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={};"
ANSWER = "<think>\nhm\n</think>\n\nok"


def make_schema(number: int) -> dict[str, Any]:
    """A schema as those of Claude Code's tools: nested, with formats, constants and unions."""
    edit = {
        "type": "object",
        "properties": {
            "old_string": {"type": "string", "description": "The text to replace"},
            "replace_all": {"type": "boolean", "default": False},
            "kind": {"const": f"kind-{number}"},
            "where": {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "null"}]},
        },
        "required": ["old_string"],
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "file_path": {"type": "string", "minLength": 1},
            "url": {"type": "string", "format": "uri"},
            "edits": {"type": "array", "items": edit, "minItems": 1},
            "meta": {"type": "object", "propertyNames": {"type": "string"}},
        },
        "required": ["file_path", "edits"],
        "additionalProperties": False,
    }


TOOLS: Any = [
    {"name": name, "description": "What it does. " * 20, "input_schema": make_schema(number)}
    for number, name in enumerate(
        [*(f"Tool{number}" for number in range(18)), f"mcp__server__{'long_' * 20}", "Bash"]
    )
]
TOOLS[0] |= {"eager_input_streaming": True, "input_examples": [{"file_path": "x"}]}
TOOLS[1] |= {"type": "custom", "defer_loading": False}
TOOLS[-1]["cache_control"] = EPHEMERAL
USED = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"file_path": "a"}}
OTHER = {"type": "tool_use", "id": "toolu_2", "name": "Tool3", "input": {}}
PARTS = [{"type": "text", "text": "first part"}, {"type": "text", "text": "second part"}]
RESULTS = [
    {"type": "tool_result", "tool_use_id": "toolu_1", "content": PARTS},
    {
        "type": "tool_result",
        "tool_use_id": "toolu_2",
        "content": "<tool_use_error>no such file</tool_use_error>",
        "is_error": True,
    },
    {"type": "text", "text": "Go on.", "cache_control": EPHEMERAL},
]
MESSAGES: Any = [
    {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "plan", "signature": "EqQB" * 30},
            {"type": "text", "text": "I look."},
            USED,
            OTHER,
        ],
    },
    {"role": "user", "content": RESULTS},
]


def make_body(nonce: str = "eb6c6", **fields: Any) -> dict[str, Any]:
    system = [
        {"type": "text", "text": BILLING.format(nonce)},
        {"type": "text", "text": "You are Claude Code.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "Rules. " * 500, "cache_control": EPHEMERAL},
    ]
    user = json.dumps({"device_id": "0" * 64, "account_uuid": "", "session_id": "1"})
    body = {
        "model": NAMES[0],
        "max_tokens": 32000,
        "system": system,
        "messages": MESSAGES,
        "tools": TOOLS,
        "metadata": {"user_id": user},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "extra_body": {"temperature": 1},
        "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14", "new-2031-01-01"],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    return body | fields


class Served(NamedTuple):
    client: anthropic.Anthropic
    node: FakeNode

    @property
    def prompt(self) -> str:
        """The last prompt that the model got."""
        ids = memoryview(self.node.generates[-1].token_ids).cast("i").tolist()
        return tokenizer().decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    answer = [*tokenizer().encode(ANSWER, add_special_tokens=False).ids, EOS]
    with ExitStack() as stack:
        cluster = Cluster(stack, write_model(tmp_path_factory.mktemp("model") / "model", QWEN))
        pages = {"total": 20_000, "free": 20_000}
        node = cluster.node("unified", lambda *_: answer, context_length=60_000, pages=pages)
        proxy = cluster.proxy(served_model_name=NAMES, workers=1)
        options: Any = {"api_key": "k", "max_retries": 0, "timeout": 60}
        yield Served(anthropic.Anthropic(base_url=proxy.url, **options), node)


def test_a_turn_of_an_agent(served: Served) -> None:
    with served.client.beta.messages.stream(**make_body()) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.stop_reason == "end_turn"
    prompt = served.prompt
    parts = [
        "You are Claude Code.\nRules. ",
        "<system-reminder>",
        "plan",
        "I look.",
        '{"file_path": "a"}',
    ]
    parts += ["first part\nsecond part", "no such file", "Go on."]
    places = [prompt.index(part) for part in parts]
    assert places == sorted(places)


def test_the_line_for_billing_is_no_part_of_the_prompt(served: Served) -> None:
    """It differs in every request, so nothing would be found in the prefix cache."""
    prompts = []
    for nonce in ("aaaaa", "bbbbb"):
        served.client.beta.messages.create(**make_body(nonce))
        prompts.append(served.prompt)
    text = f"{BILLING.format('ccccc')}\nYou are Claude Code."
    served.client.beta.messages.create(**make_body(system=text))
    assert prompts[0] == prompts[1]
    assert "billing" not in prompts[0] + served.prompt
    assert "You are Claude Code." in served.prompt


@pytest.mark.parametrize("name", NAMES)
def test_both_names_of_the_model_are_served(served: Served, name: str) -> None:
    message = served.client.beta.messages.create(**make_body(model=name))
    assert message.content[-1].text == "ok"


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "xhigh"}},
        {"thinking": {"type": "disabled"}, "tools": [], "max_tokens": 1},
        {"thinking": {"type": "enabled"}},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"mcp_servers": [], "service_tier": "auto", "inference_geo": "us", "speed": "fast"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_its_options_are_taken(served: Served, fields: dict[str, Any]) -> None:
    assert served.client.beta.messages.create(**make_body(**fields)).stop_reason


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "edits[0].type"),
        ({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "mcp_servers"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else each,
)
def test_requests_that_we_cannot_obey_are_refused(
    served: Served, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        served.client.beta.messages.create(**make_body(**fields))
    assert field in str(refused.value)


def test_tokens_are_counted_with_tools(served: Served) -> None:
    body = make_body()
    names = ("model", "messages", "tools", "system", "thinking", "betas", "context_management")
    asked = {name: body[name] for name in names}
    count = served.client.beta.messages.count_tokens(**asked).input_tokens
    served.client.beta.messages.create(**body)
    assert count == len(served.node.generates[-1].token_ids) // 4
    assert served.client.beta.messages.count_tokens(**asked | {"tools": []}).input_tokens < count


MARKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "the request": {"cache_control": EPHEMERAL},
    "the system prompt": {
        "system": [{"type": "text", "text": "s", "cache_control": EPHEMERAL}],
    },
    "a tool": {"tools": TOOLS[-1:]},
    "a message": {"messages": [*MESSAGES[:2], {"role": "user", "content": RESULTS}]},
    "within a result": {
        "messages": [
            *MESSAGES[:2],
            {
                "role": "user",
                "content": [
                    RESULTS[0] | {"content": [PARTS[0] | {"cache_control": EPHEMERAL}]},
                    RESULTS[1],
                ],
            },
        ]
    },
}


@pytest.mark.parametrize("marked", MARKED)
def test_a_marked_prompt_is_leased_and_its_tokens_add_up(served: Served, marked: str) -> None:
    hello = [{"role": "user", "content": "hello"}]
    body: dict[str, Any] = {"model": NAMES[0], "max_tokens": 9, "messages": hello}
    for cached in (0, 16):
        served.node.cached_tokens = cached
        usage = served.client.beta.messages.create(**body | MARKED[marked]).usage
        request = served.node.generates[-1]
        assert request.prefix_lease == (0 if marked == "nothing" else MAX_PREFIX_LEASE)
        assert usage.cache_read_input_tokens == cached
        created = usage.cache_creation_input_tokens or 0
        total = usage.input_tokens + created + cached
        assert total == len(request.token_ids) // 4
        assert (usage.input_tokens == 0) == (marked != "nothing")
    served.node.cached_tokens = 0
