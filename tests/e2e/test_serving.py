"""The whole system over HTTP: nodes in this process, real sockets between all of them."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import backends
import httpx
import openai
import pytest
from checkpoints import reference_generate
from cluster import Cluster
from tokenizers import Tokenizer

from pd.proxy.config import ProxyConfig
from pd.proxy.server import ProxyThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PAGE = 16


class System:
    """A cluster behind a proxy."""

    def __init__(self, cluster: Cluster, proxy: ProxyThread) -> None:
        self.cluster, self.proxy = cluster, proxy
        self.http = httpx.Client(base_url=proxy.url, timeout=60)

    def generate(self, input_ids: list[int], max_new_tokens: int = 8, **extra: Any) -> Any:
        """One unstreamed /generate of greedy tokens."""
        params = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
        params |= extra.pop("sampling_params", {})
        body = {"input_ids": input_ids, "sampling_params": params, **extra}
        response = self.http.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


def serve(model: Path, **settings: Any) -> Iterator[System]:
    with Cluster(model, **settings) as cluster:
        config = ProxyConfig(
            prefill=[node.url for node in cluster.prefill],
            decode=[node.url for node in cluster.decode],
            unified=[node.url for node in cluster.unified],
            port=0,
        )
        with ProxyThread(config) as proxy:
            yield System(cluster, proxy)
            cluster.wait_idle()


SPLIT = backends.params(backends.IN_PROCESS, sample=[backends.TCP])


@pytest.fixture(scope="module", params=[*SPLIT, pytest.param(None, id="unified")])
def system(model: Path, request: pytest.FixtureRequest) -> Iterator[System]:
    """Over each backend, and unified."""
    if request.param is None:
        yield from serve(model, prefill=0, decode=0, unified=1)
    else:
        request.param.require()
        yield from serve(model, transfer_backend=request.param.flag)


def tokens(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def predicted_cached(seen: list[list[int]], prompt: list[int]) -> int:
    """The contract: whole pages of a known prefix, at most ⌊(n-1)/page⌋·page."""
    best = 0
    for known in seen:
        shared = 0
        while shared < min(len(known), len(prompt)) and known[shared] == prompt[shared]:
            shared += 1
        best = max(best, min(shared, len(known) // PAGE * PAGE))
    return min(best, len(prompt) - 1) // PAGE * PAGE


def test_tokens_equal_transformers(system: System, model: Path) -> None:
    prompts = [tokens(i, n) for i, n in enumerate((1, 16, 33, 200, 500))]
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda p: system.generate(p, 24), prompts))
    expected = reference_generate(model, prompts, 24)
    assert [answer["output_ids"] for answer in answers] == expected


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 100])
def test_cached_tokens_are_what_the_contract_predicts(system: System, length: int) -> None:
    prompt = tokens(1000 + length, length)
    first, second = (system.generate(prompt, 2) for _ in range(2))
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] == predicted_cached([prompt], prompt)
    longer = [*prompt, 7, 8, 9]
    extended = system.generate(longer, 2)
    # A unified node also holds the KV of all output tokens but the last.
    held = prompt if system.cluster.prefill else prompt + first["output_ids"][:-1]
    cached = predicted_cached([held], longer)
    found = {cached}
    if any(server.node.core.config.is_elastic for server in system.cluster.prefill):
        found.add(0)  # at the other node, where that is predicted to be as fast
    assert extended["meta_info"]["cached_tokens"] in found


def test_the_namespace_separates_tenants(system: System) -> None:
    prompt = tokens(2000, 64)
    system.generate(prompt, 2, cache_salt="a")
    other = system.generate(prompt, 2, cache_salt="b")
    same = system.generate(prompt, 2, cache_salt="a")
    assert other["meta_info"]["cached_tokens"] == 0
    assert same["meta_info"]["cached_tokens"] == 48


@pytest.mark.parametrize("system", SPLIT, indirect=True)
def test_the_second_turn_sends_only_what_decode_lacks(system: System) -> None:
    decode = system.cluster.decode[0].node
    if decode.core.config.is_elastic:
        pytest.skip("where elastic nodes compute a prompt is decided for each")
    metric = decode.core.metrics.transferred_bytes

    def bytes_of(turn: list[int], new: int) -> tuple[list[int], float]:
        before = metric._value.get()
        output = system.generate(turn, new)["output_ids"]
        return output, metric._value.get() - before

    token_bytes = decode.engine.layout.token_bytes
    first_turn = tokens(3000, 90)
    answer, sent = bytes_of(first_turn, 30)
    assert sent == 90 * token_bytes
    # D holds the KV of the prompt and of all output tokens but the last.
    held = (90 + 29) // PAGE * PAGE
    second_turn = first_turn + answer + tokens(3001, 25)
    _, sent = bytes_of(second_turn, 5)
    assert sent == (len(second_turn) - held) * token_bytes
    _, sent = bytes_of(second_turn, 5)
    assert sent == (len(second_turn) - len(second_turn) // PAGE * PAGE) * token_bytes


def test_log_probabilities_have_the_shape_of_the_contract(system: System) -> None:
    prompt = tokens(4000, 20)
    answer = system.generate(
        prompt, 4, return_logprob=True, logprob_start_len=0, top_logprobs_num=2
    )
    info = answer["meta_info"]
    assert [entry[1] for entry in info["input_token_logprobs"]] == prompt
    assert [entry[1] for entry in info["output_token_logprobs"]] == answer["output_ids"]
    assert all(len(top) == 2 for top in info["output_top_logprobs"])
    assert info["finish_reason"]["type"] == "length"
    needed = {"queue", "prefill", "decode"}
    needed |= {"bootstrap", "transfer"} if system.cluster.prefill else set()
    assert needed <= {name for name, value in info["stages"].items() if value is not None}


def test_the_openai_client_chats_and_streams(system: System, model: Path) -> None:
    client = openai.OpenAI(base_url=f"{system.proxy.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "the thing and the ring — 日本語 🎉"}]
    options: Any = {"temperature": 0, "max_tokens": 40, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(model=model.name, messages=messages, **options)
    stream = client.chat.completions.create(
        model=model.name,
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content[0].top_logprobs) == 2


def test_stop_strings_end_both_nodes(system: System, model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompt = tokens(5000, 30)
    output = system.generate(prompt, 60)["output_ids"]
    text = tokenizer.decode(output)
    stop = text[12:15]
    answer = system.generate(prompt, 60, sampling_params={"stop": [stop]})
    assert answer["text"] == text[: text.index(stop)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) < 60
    system.cluster.wait_idle()


def test_token_one_may_be_the_last(system: System) -> None:
    prompt = tokens(6000, 30)
    first = system.generate(prompt, 1)["output_ids"]
    stopped = system.generate(prompt, 10, sampling_params={"stop_token_ids": first})
    assert stopped["output_ids"] == first
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": first[0]}
    system.cluster.wait_idle()


def first_and_last_token(system: System, prompt: list[int]) -> tuple[float, float]:
    """Seconds from sending a streamed request to the proxy until its first and its last token."""
    params = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "stream": True}
    begin = time.monotonic()
    with system.http.stream("POST", "/generate", json=body) as response:
        assert response.status_code == 200, response.read()
        events = (line for line in response.iter_lines() if line.startswith("data: {"))
        times = [time.monotonic() - begin for _ in events]
    return times[0], times[-1]


@pytest.mark.parametrize("rule", ["delay_write", "delay_reservation"])
def test_token_one_comes_as_fast_as_without_a_slow_hand_off(
    model: Path, tmp_path: Path, rule: str
) -> None:
    """Two deployments behind a proxy each, asked in turn, so that noise hits both alike.

    Other work of the machine delays some first tokens; the least delayed of each show what the
    hand-off adds to all of them.
    """
    delay, allowance = 0.5, 0.05
    script = tmp_path / "script.yaml"
    script.write_text(f"rules: [{{do: {rule}, seconds: {delay}}}]")
    prompts = [tokens(7000 + i, 50) for i in range(7)]
    settings = {"usual": {}, "slow": {"fake_script": script}}
    with contextlib.ExitStack() as stack:
        systems = {
            name: stack.enter_context(
                contextlib.contextmanager(serve)(model, transfer_backend="fake", **more)
            )
            for name, more in settings.items()
        }
        for system in systems.values():
            first_and_last_token(system, tokens(7100, 50))  # handshake and warm-up
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
        for prompt in prompts:
            for name, system in systems.items():
                measured[name].append(first_and_last_token(system, prompt))
    assert all(last >= delay for _, last in measured["slow"]), "the delay did not happen"
    usual, slow = (sorted(first for first, _ in measured[name]) for name in settings)
    assert slow[0] < usual[0] + allowance, measured
    assert statistics.median(slow) < statistics.median(usual) + delay / 2, measured
