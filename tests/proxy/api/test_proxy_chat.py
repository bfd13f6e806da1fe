"""``/v1/chat/completions`` and chat templates."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fake_node import EOS
from proxy_cluster import read_events
from proxy_tokenizers import byte_level

from pd.core.errors import InvalidRequestError, UsageError
from pd.proxy.text.chat_template import ChatTemplate, load_templates, read_config

if TYPE_CHECKING:
    from pathlib import Path

    import httpx
    from fake_node import FakeNode
    from proxy_cluster import Cluster

PATH = "/v1/chat/completions"
TOKENS = byte_level()
HELLO = [{"role": "user", "content": "hello"}]


def ids(text: str) -> list[int]:
    return list(TOKENS.encode(text).ids)


def chat(client: httpx.Client, **body: Any) -> Any:
    response = client.post(PATH, json={"messages": HELLO} | body)
    assert response.status_code == 200, response.text
    return response.json()


def prompt_of(node: FakeNode, count: int = 1) -> str:
    tokens = np.frombuffer(node.wait_generate(count).token_ids, "<i4").tolist()
    return str(TOKENS.decode(tokens, skip_special_tokens=False))


def test_the_shape_of_an_answer(cluster: Cluster) -> None:
    prefill, _ = cluster.pair(lambda p, i: [*ids("hello world"), EOS])
    body = chat(cluster.client())
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "hello world",
        "refusal": None,
        "reasoning_content": None,
        "reasoning": None,
    }
    assert choice["finish_reason"] == "stop"
    assert prompt_of(prefill) == "<s><user>hello</user><assistant>"
    # By default the answer may be as long as the context allows.
    prompt_tokens = body["usage"]["prompt_tokens"]
    assert prefill.wait_generate().params.max_tokens == 200 - prompt_tokens


def test_max_completion_tokens_is_the_newer_name(cluster: Cluster) -> None:
    cluster.pair()
    body = chat(cluster.client(), max_completion_tokens=3, max_tokens=50)
    assert body["usage"]["completion_tokens"] == 3
    assert body["choices"][0]["finish_reason"] == "length"


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(cluster: Cluster) -> None:
    cluster.pair(lambda p, i: [*ids("hello 😀 world"), EOS])
    asked = {"messages": HELLO, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
    with cluster.client().stream("POST", PATH, json=asked) as response:
        *chunks, usage, done = read_events(response)
    assert done == "DONE"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2 * (len(ids("hello 😀 world")) + 1)
    for index in (0, 1):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        opening = {"role": "assistant", "content": "", "reasoning_content": None}
        assert mine[0]["delta"] == opening
        assert "".join(c["delta"].get("content", "") for c in mine) == "hello 😀 world"
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_token_ids_of_prompt_and_answer(cluster: Cluster) -> None:
    prefill, _ = cluster.pair(lambda p, i: ids("abc"))
    asked = {"messages": HELLO, "max_tokens": len(ids("abc")), "return_token_ids": True}
    body = chat(cluster.client(), **asked)
    prompt = list(memoryview(prefill.wait_generate().token_ids).cast("i"))
    assert body["prompt_token_ids"] == prompt
    assert body["choices"][0]["token_ids"] == ids("abc")
    with cluster.client().stream("POST", PATH, json=asked | {"stream": True}) as response:
        first, *rest, _ = read_events(response)
    assert first["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in chunk for chunk in rest)


def test_token_ids_of_the_prompt_alone(cluster: Cluster) -> None:
    prefill, _ = cluster.pair(lambda p, i: [*ids("abc"), EOS])
    client = cluster.client()
    body = chat(client, return_prompt_token_ids=True)
    prompt = list(memoryview(prefill.wait_generate().token_ids).cast("i"))
    assert body["prompt_token_ids"] == prompt
    assert body["choices"][0]["token_ids"] is None
    asked = {"messages": HELLO, "return_prompt_token_ids": True, "stream": True}
    with client.stream("POST", PATH, json=asked) as response:
        first, *rest, _ = read_events(response)
    assert first["prompt_token_ids"] == prompt
    for chunk in rest:
        assert "prompt_token_ids" not in chunk
        assert "token_ids" not in chunk["choices"][0]
    assert chat(client, return_prompt_token_ids=False)["prompt_token_ids"] is None


def test_logprobs_have_bytes(cluster: Cluster) -> None:
    cluster.pair(lambda p, i: ids("é😀"))
    body = chat(cluster.client(), logprobs=True, top_logprobs=2, max_tokens=len(ids("é😀")))
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-t / 100 for t in ids("é😀")]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "é😀"
    for entry in content:
        assert set(entry) == {"token", "token_id", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 2
        own = {key: value for key, value in entry.items() if key != "top_logprobs"}
        assert entry["top_logprobs"][0] == own
    assert [entry["token_id"] for entry in content] == ids("é😀")


def test_all_roles_and_text_parts(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "x", "name": "me"},
        {"role": "tool", "content": "5"},
        {"role": "developer", "content": "hm"},
    ]
    chat(cluster.client(), messages=messages, max_tokens=1)
    assert prompt_of(prefill) == (
        "<s><system>be kind</system><user>a\nb</user><assistant>x</assistant><tool>5</tool>"
        "<system>hm</system><assistant>"
    )


def test_the_last_message_can_be_continued(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    client = cluster.client()
    messages = [*HELLO, {"role": "assistant", "content": "the quick"}]
    chat(client, messages=messages, continue_final_message=True, max_tokens=1)
    assert prompt_of(prefill) == "<s><user>hello</user><assistant>the quick"
    chat(client, add_generation_prompt=False, max_tokens=1)
    assert prompt_of(prefill, 2) == "<s><user>hello</user>"


def test_chat_and_tokenize_agree(cluster: Cluster) -> None:
    prefill, _ = cluster.pair()
    client = cluster.client()
    chat(client, max_tokens=1)
    tokens = client.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    assert np.frombuffer(prefill.wait_generate().token_ids, "<i4").tolist() == tokens


class TestTemplates:
    def render(self, source: str, **options: Any) -> str:
        return ChatTemplate(source, {"bos_token": "<s>"}).render(HELLO, **options)

    def test_blocks_leave_no_white_space(self) -> None:
        source = (
            "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}"
        )
        assert self.render(source) == "hello\n"

    def test_the_usual_extras(self) -> None:
        assert self.render("{{ {'é': '<'} | tojson }}") == '{"é": "<"}'
        assert self.render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'
        assert len(self.render("{{ strftime_now('%Y') }}")) == 4
        broken = "{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        assert self.render(broken) == "1"
        assert self.render("{% generation %}{{ messages[0].role }}{% endgeneration %}") == "user"
        assert self.render("{{ bos_token }}{{ eos_token }}") == "<s>"
        assert self.render("{{ thinking }}", extra={"thinking": True}) == "True"

    def test_a_refusal_of_the_template_is_the_clients_error(self) -> None:
        with pytest.raises(InvalidRequestError, match="must alternate"):
            self.render("{{ raise_exception('roles must alternate') }}")
        with pytest.raises(InvalidRequestError):
            self.render("{{ messages[7].content.nothing }}")

    def test_templates_are_sandboxed(self) -> None:
        with pytest.raises(InvalidRequestError):
            self.render("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")

    def test_a_template_that_does_not_compile_is_a_usage_error(self) -> None:
        with pytest.raises(UsageError, match="does not compile"):
            self.render("{% if %}")

    def test_what_cannot_be_continued_says_so(self) -> None:
        with pytest.raises(InvalidRequestError, match="cannot be continued"):
            self.render("{{ messages[0].content | upper }}", continue_final_message=True)

    @pytest.mark.parametrize(
        ("content", "end"),
        [("user", "user"), ("s", "s"), ("", ""), (" a b \n", "a b"), ("/user", "/user")],
    )
    def test_what_is_continued_ends_the_prompt(self, content: str, end: str) -> None:
        """Even where the template writes the same text behind it."""
        template = ChatTemplate(
            "{% for m in messages %}<user>{{ m.content | trim }}</user>\n{% endfor %}", {}
        )
        messages = [{"role": "user", "content": "s"}, {"role": "user", "content": content}]
        rendered = template.render(messages, continue_final_message=True)
        assert rendered == f"<user>s</user>\n<user>{end}"
        assert messages[-1]["content"] == content

    @pytest.mark.parametrize(
        ("first", "last"),
        [
            ("</think>x" * 80_000, "<?think>x" + "</think>x" * 8000),
            ("a" * 1_001_000, "a" * 1_000_000 + "</think>" + "a" * 1_000_000),
        ],
        ids=["periodic", "almost all of the text"],
    )
    def test_a_content_that_the_template_changes_is_refused_at_once(
        self, first: str, last: str
    ) -> None:
        """Searching for it would hold up all threads for as long as the square of its length."""
        template = ChatTemplate(
            "{{ messages[0].content }}{{ messages[1].content.split('</think>')[-1] }}", {}
        )
        messages = [{"role": "user", "content": first}, {"role": "assistant", "content": last}]
        began = time.thread_time()
        with pytest.raises(InvalidRequestError, match="cannot be continued"):
            template.render(messages, continue_final_message=True)
        assert time.thread_time() - began < 0.25

    def test_templates_come_from_the_config_or_a_file(self, tmp_path: Path) -> None:
        assert load_templates(tmp_path, read_config(tmp_path)) == {}
        named = [
            {"name": "default", "template": "{{ eos_token }}1"},
            {"name": "tool_use", "template": "2"},
        ]
        config = {"chat_template": named, "eos_token": {"content": "</s>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        templates = load_templates(tmp_path, read_config(tmp_path))
        assert {name: t.render(HELLO) for name, t in templates.items()} == {
            "default": "</s>1",
            "tool_use": "2",
        }
        (tmp_path / "chat_template.jinja").write_text("3")
        assert load_templates(tmp_path, read_config(tmp_path))["default"].render(HELLO) == "3"

    def test_a_model_without_one_points_to_completions(
        self, cluster: Cluster, tmp_path: Path
    ) -> None:
        byte_level().save(str(tmp_path / "tokenizer.json"))
        cluster.pair()
        response = cluster.client(tokenizer=str(tmp_path)).post(PATH, json={"messages": HELLO})
        assert response.status_code == 400
        assert "/v1/completions" in response.json()["error"]["message"]
