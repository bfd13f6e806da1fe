"""Events that are written by a template have the bytes that encoding them whole gives."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fake_node import EOS, FakeNode
from hypothesis import given
from hypothesis import strategies as st
from proxy_cluster import read_events
from proxy_tokenizers import byte_level
from tool_models import QWEN, write_model

from pd.core.messages import Finish
from pd.proxy.api.event_stream import PLAIN_EVENTS, EventWriter, encode_event
from pd.proxy.dispatch.generation import Delta

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from proxy_cluster import Cluster

TEXT = 'the quick "brown"\n fox \\ 😀 \u2028 \x85 jumps over \x00 <b> ünd'


class PlainRenderer:
    event_form = PLAIN_EVENTS

    def is_plain(self, choice: Any) -> bool:
        return True

    def render_delta(self, choice: Any, delta: Delta) -> Iterable[object]:
        yield {"id": f'"{choice}"', "choices": [{"text": delta.text, "finish_reason": None}]}


def part(text: str) -> Delta:
    return Delta(text, [], [], None, False, 0, 0)


@given(texts=st.lists(st.text(), min_size=1), name=st.text())
def test_any_text_is_written_as_json_would(texts: list[str], name: str) -> None:
    renderer: Any = PlainRenderer()
    writer, choice = EventWriter(renderer), name
    deltas: Any = [(choice, part(text)) for text in texts]
    whole = b"".join(
        encode_event(each) for c, delta in deltas for each in renderer.render_delta(c, delta)
    )
    assert writer.encode_deltas(deltas) == whole
    lines = whole.decode().splitlines()
    assert [json.loads(line[6:])["choices"][0]["text"] for line in lines[::2]] == texts


def test_choices_have_templates_of_their_own() -> None:
    renderer: Any = PlainRenderer()
    writer = EventWriter(renderer)
    written = writer.encode_deltas([("a", part("x")), ("b", part("y")), ("a", part("z"))])  # type: ignore[list-item]
    ids = [json.loads(line[6:])["id"] for line in written.decode().splitlines()[::2]]
    assert ids == ['"a"', '"b"', '"a"']


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Compares every plain event with the one that is encoded whole."""
    found: list[bool] = []
    write = EventWriter.encode_deltas

    def both(self: EventWriter, deltas: Any) -> bytes:
        parts = []
        for choice, delta in deltas:
            parts.append(write(self, [(choice, delta)]))
            is_outer = delta.is_first or delta.finish is not None
            if not is_outer and self._renderer.is_plain(choice):
                events = self._renderer.render_delta(choice, delta)
                found.append(parts[-1] == b"".join(map(encode_event, events)))
        return b"".join(parts)

    monkeypatch.setattr(EventWriter, "encode_deltas", both)
    yield found
    assert all(found)


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "several": {"n": 2},
    "usage": {"stream_options": {"include_usage": True}},
    "usage so far": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "log probabilities": {"logprobs": 1},
    "token ids": {"return_token_ids": True},
    "token ids of the prompt": {"return_prompt_token_ids": True},
    "stop strings": {"stop": ["jumps", "\u2028 x"]},
    "echo": {"echo": True},
    "a name": {"rid": 'a "name" \u2028 {}'},
}


def tell(node: FakeNode, choices: int) -> None:
    """Answer the first request token by token, with a pause in which each is written."""
    ids = [*byte_level().encode(TEXT).ids, EOS]
    request = node.wait_generate()
    prompt = np.frombuffer(request.token_ids, "<i4").tolist()
    for position, token in enumerate(ids):
        for index in range(choices):
            extra: dict[str, Any] = {}
            if position == 0:
                extra["cached_tokens"] = 0
                if request.params.prompt_logprobs_start is not None:
                    extra["prompt_logprobs"] = node.logprobs(prompt, 0)
            if request.params.logprobs:
                extra["logprobs"] = node.logprobs([token], request.params.top_logprobs)
            finish = Finish("stop", EOS) if token == EOS else None
            node.say(request, [token], position=position, index=index, finish=finish, **extra)
        time.sleep(0.004)


@pytest.mark.one_process("compares each event where it is written")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_option_of_a_stream(
    cluster: Cluster, compared: list[bool], path: str, options: dict[str, Any]
) -> None:
    node = cluster.node("unified", auto=False)
    client = cluster.client()
    teller = threading.Thread(target=tell, args=(node, options.get("n", 1)))
    teller.start()
    body: dict[str, Any] = {"prompt": "hello"} | options
    if "chat" in path:
        body = {"messages": [{"role": "user", "content": "hello"}]} | options
        body.pop("echo", None)
        if "logprobs" in body:
            body["logprobs"] = True
    else:
        body.pop("return_prompt_token_ids", None)
    asked = body | {"stream": True, "max_tokens": 100}
    with client.stream("POST", path, json=asked) as response:
        assert response.status_code == 200
        events = read_events(response)
    teller.join()
    text = "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for each in events
        if each != "DONE"
        for choice in each["choices"]
        if choice["index"] == 0
    )
    assert text.endswith(TEXT.split("jumps")[0] if "stop" in options else TEXT)
    is_plain = not {"logprobs", "return_token_ids"} & options.keys()
    if "continuous_usage_stats" in options.get("stream_options", {}):
        is_plain = False
    assert bool(compared) == is_plain


@pytest.mark.one_process("compares each event where it is written")
def test_a_model_that_reasons(cluster: Cluster, compared: list[bool], tmp_path: Path) -> None:
    """Its events have the field of reasoning, also where the prompt has switched that off."""
    node = cluster.node("unified", auto=False)
    client = cluster.client(tokenizer=write_model(tmp_path / "model", QWEN))
    teller = threading.Thread(target=tell, args=(node, 1))
    teller.start()
    asked = {
        "messages": [{"role": "user", "content": "hello"}],
        "chat_template_kwargs": {"enable_thinking": False},
        "stream": True,
        "max_tokens": 100,
    }
    with client.stream("POST", "/v1/chat/completions", json=asked) as response:
        *events, _ = read_events(response)
    teller.join()
    deltas = [each["choices"][0]["delta"] for each in events]
    assert "".join(delta["content"] for delta in deltas) == TEXT
    assert all(delta["reasoning_content"] is None for delta in deltas)
    assert compared
