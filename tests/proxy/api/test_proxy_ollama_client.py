"""Ollama's client works unchanged, and so do the curl calls of its documentation."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import ollama
import pytest
from fake_node import EOS
from proxy_cluster import Cluster
from tool_models import QWEN, tokenizer, write_model

from pd.core.messages import Finish, TokenLogprobs
from pd.proxy.requests.known_fields import (
    KNOWN,
    OBEYED,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    FieldPlace,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.core.messages import Generate

TEXT = "hello world 😀"
THOUGHT, SAID = "Which city?", "I look."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWERS = {"weather?": f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n{CALL}"}
HELLO: Any = [{"role": "user", "content": "hello"}]
ASKED: Any = [{"role": "user", "content": "weather?"}]


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: its name.
    """
    return f"rain in {city}"


class Served:
    """A proxy on a model that thinks, says something, and calls a tool if asked for the weather."""

    def __init__(self, cluster: Cluster, directory: Any) -> None:
        self.prompts: list[str] = []
        self.model = tokenizer()
        identity = {"architecture": "qwen3"}
        info = {"context_length": 4000, "pages": {"total": 2000, "free": 2000}}
        self.node = cluster.node(
            "unified", self._answer, identity=identity, dtype="bfloat16", **info
        )
        names = ["nice", "other"]
        self.proxy = cluster.proxy(
            tokenizer=write_model(directory, QWEN), served_model_name=names, workers=1
        )
        self.client = ollama.Client(self.proxy.url)
        self.http = cluster.client(self.proxy)

    def _answer(self, prompt: list[int], index: int) -> list[int]:
        text = self.model.decode(prompt, skip_special_tokens=False)
        self.prompts.append(text)
        last = text.rsplit("<|im_start|>user", 1)[-1]
        said = next((answer for asked, answer in ANSWERS.items() if asked in last), TEXT)
        return [*self.model.encode(said, add_special_tokens=False).ids, EOS]

    @property
    def last_length(self) -> int:
        """Tokens of the last prompt."""
        return len(np.frombuffer(self.last.token_ids, np.int32))

    @property
    def last(self) -> Generate:
        return self.node.generates[-1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(Cluster(stack, ""), tmp_path_factory.mktemp("ollama") / "model")


def test_a_chat_and_its_figures(served: Served) -> None:
    answer = served.client.chat("nice", messages=HELLO)
    assert (answer.message.role, answer.message.content) == ("assistant", TEXT)
    assert (answer.done, answer.done_reason, answer.model) == (True, "stop", "nice")
    assert answer.prompt_eval_count == served.last_length
    assert answer.eval_count == len(served.model.encode(TEXT).ids) + 1
    assert answer.load_duration == 0
    parts = answer.prompt_eval_duration + answer.eval_duration  # type: ignore[operator]
    assert 0 < parts <= answer.total_duration < 20e9  # type: ignore[operator]


def test_a_stream_is_lines_and_the_default(served: Served) -> None:
    parts = list(served.client.chat("nice", messages=HELLO, stream=True))
    assert "".join(part.message.content or "" for part in parts) == TEXT
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count
    answer = served.http.post("/api/generate", json={"model": "nice", "prompt": "hello"})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["response"] for line in lines) == TEXT
    assert lines[-1]["done_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_and_whole_calls(served: Served, *, stream: bool) -> None:
    given = served.client.chat("nice", ASKED, tools=[get_weather], think=True, stream=stream)
    parts = list(given) if stream else [given]
    messages = [part.message for part in parts]  # type: ignore[union-attr]
    assert "".join(m.thinking or "" for m in messages).strip() == THOUGHT
    assert "".join(m.content or "" for m in messages).strip() == SAID
    (call,) = [call for m in messages for call in m.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Oslo"})
    # The call and its result go back as the client's documentation does it.
    said: Any = messages if stream else messages[:1]
    result = {"role": "tool", "tool_name": "get_weather", "content": "rain"}
    served.client.chat("nice", [*ASKED, *said, result, *HELLO], tools=[get_weather])
    prompt = served.prompts[-1]
    places = [prompt.index(part) for part in ('"city": "Oslo"', "tool call_0", "rain", "hello")]
    assert places == sorted(places)


def test_a_call_that_is_cut_off_is_left_out(served: Served) -> None:
    answer = served.client.chat(
        "nice", ASKED, tools=[get_weather], options={"num_predict": len(ANSWERS["weather?"]) - 20}
    )
    assert (answer.done_reason, answer.message.tool_calls) == ("length", None)


def test_options_and_formats_reach_the_node(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    options = {
        "num_predict": 7,
        "num_ctx": 100,
        "num_gpu": 1,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.75,
        "min_p": 0.25,
        "repeat_penalty": 1.5,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "seed": 5,
    }
    served.client.generate("nice", "hello", options=options, format=schema)
    params = served.last.params
    assert params.grammar is not None
    assert json.dumps(schema) in params.grammar.text, "after the thinking"
    assert (params.max_tokens, params.temperature, params.top_k) == (7, 0.5, 4)
    assert (params.top_p, params.min_p, params.repetition_penalty) == (0.75, 0.25, 1.5)
    assert (params.presence_penalty, params.frequency_penalty, params.seed) == (1.0, -1.0, 5)
    answer = served.client.generate("nice", "hello", options={"stop": ["world"]}, format="json")
    assert (answer.response, answer.done_reason) == ("hello ", "stop")
    assert '{"type": "object"}' in served.last.params.grammar.text  # type: ignore[union-attr]
    served.client.generate("nice", "hello", options={"num_ctx": 90, "num_predict": -1})
    assert served.last.params.max_tokens == 90 - served.last_length


def test_templates_obey_think_system_and_raw(served: Served) -> None:
    served.client.generate("nice", "hello", system="Be brief.", think=False)
    prompt = served.prompts[-1]
    assert prompt.index("Be brief.") < prompt.index("hello") < prompt.index("<think>\n\n</think>")
    assert served.client.generate("nice", "hello", raw=True).response == TEXT
    assert served.prompts[-1] == "hello"


def test_log_probabilities_come_with_their_tokens(served: Served) -> None:
    served.node.auto = False
    try:
        count = len(served.node.generates)
        body = {"model": "nice", "prompt": "hello", "logprobs": True, "top_logprobs": 1}
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(served.http.post, "/api/generate", json=body)
            request = served.node.wait_generate(count + 1)
            assert (request.params.logprobs, request.params.top_logprobs) == (True, 1)
            (token, *_) = served.model.encode("x").ids
            entries = [TokenLogprobs(token, -0.5, [token], [-0.5])]
            finish = Finish("length")
            served.node.say(request, [token], cached_tokens=0, logprobs=entries, finish=finish)
            lines = [json.loads(line) for line in asking.result(20).text.splitlines()]
    finally:
        served.node.auto = True
    (entry,) = [entry for line in lines for entry in line.get("logprobs", ())]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("x", -0.5, [120])
    assert [each["token"] for each in entry["top_logprobs"]] == ["x"]


def test_an_empty_prompt_loads(served: Served) -> None:
    before = len(served.node.generates)
    for keep_alive in ("5m", 0, -1, "1h30m"):
        answer = served.client.generate("nice", keep_alive=keep_alive)
        assert (answer.done, answer.done_reason, answer.response) == (True, "load", "")
        (only,) = served.client.chat("nice", keep_alive=keep_alive, stream=True)
        assert (only.done, only.done_reason, only.message.content) == (True, "load", "")
    assert len(served.node.generates) == before


def test_names(served: Served) -> None:
    for name in ("nice", "nice:latest", "other", "other:latest", "fake:latest"):
        answer = served.client.generate(name, "hello", options={"num_predict": 1})
        assert answer.model == ("fake" if name.startswith("fake") else "nice")
    for name in ("nice:7b", "third", ":latest", "nice:latest:latest"):
        with pytest.raises(ollama.ResponseError, match="there is no model") as missing:
            served.client.generate(name, "hello")
        assert missing.value.status_code == 404


def test_models_are_listed_and_shown(served: Served) -> None:
    models = served.client.list().models
    assert [model.model for model in models] == ["nice:latest", "fake:latest"]
    assert models[0].details.family == "qwen3"  # type: ignore[union-attr]
    assert models[0].details.quantization_level == "BF16"  # type: ignore[union-attr]
    shown = served.client.show(models[0].model)  # type: ignore[arg-type]
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo["qwen3.context_length"] == 4000  # type: ignore[index]
    assert shown.template == QWEN
    assert served.http.post("/api/show", json={"name": "nice"}).status_code == 200
    assert [model.context_length for model in served.client.ps().models] == [4000, 4000]
    with pytest.raises(ollama.ResponseError) as missing:
        served.client.show("third")
    assert missing.value.status_code == 404


def test_the_server_introduces_itself(served: Served) -> None:
    assert served.http.head("/").status_code == 200
    assert served.http.get("/").text == "Ollama is running"
    assert [int(part) for part in served.http.get("/api/version").json()["version"].split(".")]


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (lambda client: client.pull("x"), "/api/pull"),
        (lambda client: client.push("x"), "/api/push"),
        (lambda client: client.create("x", from_="y"), "/api/create"),
        (lambda client: client.embed("nice", "x"), "/api/embed"),
        (lambda client: client.embeddings("nice", "x"), "/api/embeddings"),
        (lambda client: client.delete("x"), "/api/delete"),
        (lambda client: client.copy("x", "y"), "/api/copy"),
    ],
)
def test_other_work_is_refused_by_name(served: Served, call: Any, path: str) -> None:
    with pytest.raises(ollama.ResponseError, match=path):
        call(served.client)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (OLLAMA_CHAT, {"messages": [{"role": "user", "images": ["aGk="]}]}, "messages[0].images"),
        (OLLAMA_CHAT, {"messages": [{"role": 5}]}, "messages[0].role"),
        (OLLAMA_CHAT, {"messages": HELLO, "temperature": 0.5}, "belongs in options"),
        (OLLAMA_CHAT, {"messages": HELLO, "max_tokens": 5}, "options.num_predict"),
        (OLLAMA_CHAT, {"messages": HELLO, "format": "yaml"}, "format"),
        (OLLAMA_CHAT, {"messages": HELLO, "think": "much"}, "think"),
        (OLLAMA_CHAT, {"messages": HELLO, "keep_alive": "soon"}, "keep_alive"),
        (OLLAMA_CHAT, {"messages": HELLO, "tools": [{"function": {}}]}, "tools[0]"),
        (OLLAMA_GENERATE, {"prompt": "x", "images": ["aGk="]}, "images"),
        (OLLAMA_GENERATE, {"prompt": "x", "suffix": "y"}, "suffix"),
        (OLLAMA_GENERATE, {"prompt": "x", "context": [1]}, "context"),
        (OLLAMA_GENERATE, {"prompt": "x", "template": "y"}, "template"),
        (OLLAMA_GENERATE, {"prompt": "x", "raw": True, "system": "y"}, "system"),
        (OLLAMA_GENERATE, {"prompt": "x", "options": {"mirostat": 1}}, "options.mirostat"),
        (OLLAMA_GENERATE, {"prompt": "x", "options": {"num_ctx": 1}}, "num_ctx"),
        (OLLAMA_GENERATE, {"prompt": "x", "options": {"top_k": "a"}}, "options.top_k"),
    ],
)
def test_refused_fields_are_named(
    served: Served, path: str, body: dict[str, Any], message: str
) -> None:
    answer = served.http.post(path, json={"model": "nice"} | body)
    assert answer.status_code == 400, answer.text
    assert answer.json().keys() == {"error"}
    assert message in answer.json()["error"]


@pytest.mark.parametrize("path", [OLLAMA_CHAT, OLLAMA_GENERATE])
def test_fields_of_other_apis_are_refused_by_name(served: Served, path: str) -> None:
    whole = {"model": "nice"}
    for name in sorted(KNOWN.keys() - OBEYED[FieldPlace((path,))]):
        answer = served.http.post(path, json=whole | {name: {"a": [1]}})
        assert answer.status_code == 400, (name, answer.text)
        assert answer.json()["error"].startswith(name)
    assert served.http.post(path, json=whole | {"made_up": 1}).status_code == 200


# ---- web pages

BODY = json.dumps({"model": "nice", "prompt": "hello", "stream": False})
# As curl's -d sends it.
FORM = {"Content-Type": "application/x-www-form-urlencoded", "User-Agent": "curl/8.5.0"}
FIREFOX = {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0"}
TEXT_BODY = {"Content-Type": "text/plain"}


@pytest.mark.parametrize("headers", [FORM, {}, {"Content-Type": "text/plain"}])
def test_documented_curl_calls_need_no_content_type(
    served: Served, headers: dict[str, str]
) -> None:
    answer = httpx.post(f"{served.proxy.url}/api/generate", content=BODY, headers=headers)
    assert answer.json()["response"] == TEXT
    shown = httpx.post(f"{served.proxy.url}/api/show", content='{"model": "nice"}', headers=headers)
    assert shown.status_code == 200
    other = httpx.post(f"{served.proxy.url}/v1/completions", content=BODY, headers=headers)
    assert other.status_code == 415


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        # A script of a hostile page, whose request needs no preflight.
        (FIREFOX | TEXT_BODY | {"Origin": "http://evil.example"}, 403),
        (FIREFOX | FORM | {"Origin": "http://evil.example"}, 403),
        # A form of a page that hides its origin.
        (FORM | FIREFOX | {"Origin": "null", "Sec-Fetch-Site": "cross-site"}, 403),
        # A browser without any of these headers.
        (FIREFOX | TEXT_BODY, 415),
        (TEXT_BODY | {"Sec-Fetch-Site": "same-origin"}, 415),
        # A page whose name now resolves to this host.
        (FIREFOX | TEXT_BODY | {"Host": "evil.example:8000"}, 403),
        (
            {
                "Host": "evil.example:8000",
                "Origin": "http://evil.example:8000",
                "Content-Type": "application/json",
            },
            403,
        ),
        ({"Host": "evil.example:8000"} | FORM, 403),
    ],
)
def test_a_hostile_page_reaches_nothing(
    served: Served, headers: dict[str, str], status: int
) -> None:
    before = len(served.node.generates)
    for path in (OLLAMA_CHAT, OLLAMA_GENERATE, "/api/show", "/api/pull"):
        answer = httpx.post(served.proxy.url + path, content=BODY, headers=headers)
        assert answer.status_code == status, (path, answer.text)
        assert answer.json().keys() == {"error"}
    assert len(served.node.generates) == before
    if status == 403:
        assert httpx.get(f"{served.proxy.url}/api/tags", headers=headers).status_code == 403


def test_pages_that_the_operator_let_in_declare_json(served: Served, model_dir: str) -> None:
    with ExitStack() as stack:
        cluster = Cluster(stack, model_dir)
        cluster.node("unified")
        page = "https://chat.example"
        url = cluster.proxy(cors_origins=[page], workers=1).url + "/api/show"
        origin = FIREFOX | {"Origin": page}
        given = {"content": '{"model": "fake"}', "headers": origin | TEXT_BODY}
        assert httpx.post(url, **given).status_code == 415  # type: ignore[arg-type]
        json_type = origin | {"Content-Type": "application/json"}
        assert httpx.post(url, content='{"model": "fake"}', headers=json_type).status_code == 200
