"""Answers of an offline model, compared with transformers and with those over HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from processes import wait_until

from pd import LLM, SamplingParams, StructuredOutputsParams
from pd.core.errors import InvalidRequestError, UsageError
from pd.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    from pd import RequestOutput

PROMPTS = [
    "The prefill node",
    "A page of the KV cache",
    "Speculative decoding",
    "If a decode node dies,",
]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
QUESTION = [{"role": "user", "content": "What does the prefill node do?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}


class ProgressBar:
    """The parts of tqdm's bars that a batch needs."""

    def __init__(self, total: int, **options: object) -> None:
        self.total = total

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc: object) -> None: ...


def list_tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(url + path, json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.full  # importing transformers takes five seconds
def test_greedy_tokens_are_those_of_transformers(llm: LLM) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    for output in outputs:
        prompt = torch.tensor([output.prompt_token_ids])
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
        )
        assert output.outputs[0].token_ids == expected[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.9, top_p=0.9, seed=3, n=3, logprobs=2, max_tokens=8),
        SamplingParams(temperature=0, stop=["cache", "node"], max_tokens=24),
        pytest.param(
            SamplingParams(temperature=0, stop="cache", include_stop_str_in_output=True),
            marks=pytest.mark.full,
        ),
        SamplingParams(temperature=0, prompt_logprobs=2, logprobs=0, max_tokens=4),
        pytest.param(
            SamplingParams(temperature=0, max_tokens=20, min_tokens=5, presence_penalty=1.5),
            marks=pytest.mark.full,
        ),
        pytest.param(
            SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-f]{8}"), seed=1),
            marks=pytest.mark.full,
        ),
    ],
    ids=["greedy", "sampled", "stop", "stop shown", "prompt", "penalties", "regex"],
)
def test_results_over_http_are_those_of_the_engine(
    llm: LLM, remote: LLM, params: SamplingParams
) -> None:
    ours = llm.generate(PROMPTS, params, use_tqdm=False)
    theirs = remote.generate(PROMPTS, params, use_tqdm=False)
    for one, other in zip(ours, theirs, strict=True):
        assert one.prompt == other.prompt
        assert one.prompt_token_ids == other.prompt_token_ids
        assert_same_logprobs(one.prompt_logprobs, other.prompt_logprobs)
        assert len(one.outputs) == params.n
        for answer, expected in zip(one.outputs, other.outputs, strict=True):
            assert answer.token_ids == expected.token_ids
            assert answer.text == expected.text
            assert answer.finish_reason == expected.finish_reason
            assert answer.stop_reason == expected.stop_reason
            assert_same_logprobs(answer.logprobs, expected.logprobs)


def assert_same_logprobs(one: Any, other: Any) -> None:
    assert (one is None) == (other is None)
    for entries, expected in zip(one or [], other or [], strict=True):
        assert (entries is None) == (expected is None)
        assert (entries or {}).keys() == (expected or {}).keys()
        for token, entry in (entries or {}).items():
            assert math.isclose(entry.logprob, expected[token].logprob, abs_tol=1e-4)
            assert entry.decoded_token == expected[token].decoded_token
            assert entry.rank == expected[token].rank


def test_text_is_what_completions_answer(llm: LLM, url: str) -> None:
    (output,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 12}
    answer = post(url, "/v1/completions", body)
    assert output.outputs[0].text == answer["choices"][0]["text"]


def test_batch_results_are_in_order_whatever_takes_longer(llm: LLM) -> None:
    lengths = [24, 1, 12, 2, 6, 1, 18, 3]
    prompts = [PROMPTS[i % 4] for i in range(len(lengths))]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert [output.prompt for output in outputs] == prompts


def test_prompts_may_be_texts_or_tokens_in_vllms_forms(llm: LLM) -> None:
    (expected,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    tokens = expected.prompt_token_ids
    prompts: list[Any] = [{"prompt": PROMPTS[0]}, {"prompt_token_ids": tokens}, tokens]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == [PROMPTS[0], None, None]
    for output in [*outputs, *llm.generate(tokens, GREEDY, use_tqdm=False)]:
        assert output.prompt_token_ids == tokens
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_logprobs_rank_the_likeliest_and_name_their_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2, max_tokens=5)
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    answer, tokenizer = output.outputs[0], llm.get_tokenizer()
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 5
    total = 0.0
    for token, entries in zip(answer.token_ids, answer.logprobs, strict=True):
        ranked = sorted(entries.items(), key=lambda item: -item[1].logprob)
        assert ranked[0][0] == token  # it was greedy
        assert [entry.rank for _, entry in ranked] == [1, 2, 3]
        assert entries[token].decoded_token == tokenizer.decode([token])
        total += entries[token].logprob
    assert math.isclose(answer.cumulative_logprob or 0.0, total, abs_tol=1e-6)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for token, known in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert known is not None
        assert token in known


def test_a_sampled_token_outside_the_likeliest_has_no_rank(llm: LLM) -> None:
    params = SamplingParams(temperature=3.0, logprobs=1, max_tokens=12, seed=5)
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    answer = output.outputs[0]
    assert answer.logprobs is not None
    ranks = [e[token].rank for token, e in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert set(ranks) == {1, None}


def test_n_answers_of_a_prompt_differ_and_repeat_with_their_seed(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=2.0, max_tokens=8, seed=11)
    (output,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
    (again,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    assert len({answer.text for answer in output.outputs}) > 1
    assert list_tokens([output]) == list_tokens([again])


def test_stop_strings_end_the_text_and_are_named(llm: LLM) -> None:
    params = SamplingParams(temperature=0, stop=["KV", "zzz"], max_tokens=30)
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    answer = output.outputs[0]
    assert answer.finish_reason == "stop"
    assert answer.stop_reason == "KV"
    assert "KV" not in answer.text
    params.include_stop_str_in_output = True
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert output.outputs[0].text == answer.text + "KV"


def test_answers_without_max_tokens_may_fill_the_context(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, stop=["."])
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) > 16
    assert output.outputs[0].stop_reason == "."


def test_structured_outputs_follow_their_constraint(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"page": {"enum": [7, 8]}, "kind": {"enum": ["free", "cached"]}},
        "required": ["page", "kind"],
        "additionalProperties": False,
    }
    constraints = [
        StructuredOutputsParams(json=schema),
        StructuredOutputsParams(choice=["Positive", "Negative"]),
        StructuredOutputsParams(regex=r"[a-z]{3}@[a-z]{3}\.com"),
        StructuredOutputsParams(grammar='root ::= "SELECT " [a-z]{1,5} " FROM t"'),
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=60, structured_outputs=constraint)
        for constraint in constraints
    ]
    texts = [output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    assert set(json.loads(texts[0])) == {"page", "kind"}
    assert texts[1] in ("Positive", "Negative")
    assert re.fullmatch(r"[a-z]{3}@[a-z]{3}\.com", texts[2])
    assert re.fullmatch(r"SELECT [a-z]{1,5} FROM t", texts[3])


def test_chat_answers_are_those_of_the_chat_api(llm: LLM, remote: LLM, url: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=2)
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 20, "return_token_ids": True}
    expected = post(url, "/v1/chat/completions", body)
    for model in (llm, remote):
        (output,) = model.chat(QUESTION, params, use_tqdm=False)
        answer, choice = output.outputs[0], expected["choices"][0]
        assert output.prompt_token_ids == expected["prompt_token_ids"]
        assert answer.token_ids == choice["token_ids"]
        assert answer.text == choice["message"]["content"]
        assert answer.logprobs is not None
        assert all(len(entries) == 2 for entries in answer.logprobs)
        assert output.prompt is not None
        assert QUESTION[0]["content"] in output.prompt


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    questions = ["What is a page?", "What is a room?", "Hello"]
    chats = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(chats, GREEDY, use_tqdm=False)
    for question, output in zip(questions, outputs, strict=True):
        assert output.prompt is not None
        assert question in output.prompt


def test_chat_with_tools_shows_them_and_returns_what_the_model_wrote(llm: LLM, url: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    (output,) = llm.chat(QUESTION, params, use_tqdm=False, tools=[WEATHER])
    assert output.prompt is not None
    assert "get_weather" in output.prompt
    body = {"messages": QUESTION, "tools": [WEATHER], "temperature": 0, "max_tokens": 12}
    expected = post(url, "/v1/chat/completions", body | {"return_token_ids": True})
    assert output.prompt_token_ids == expected["prompt_token_ids"]
    assert output.outputs[0].token_ids == expected["choices"][0]["token_ids"]
    assert output.outputs[0].text.startswith(expected["choices"][0]["message"]["content"] or "")


def test_chat_with_a_tool_choice_returns_parsed_calls(llm: LLM) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    params = SamplingParams(temperature=0, max_tokens=60)
    (output,) = llm.chat(QUESTION, params, use_tqdm=False, tools=[WEATHER], tool_choice=choice)
    (call,) = output.outputs[0].tool_calls
    assert call["function"]["name"] == "get_weather"
    assert set(json.loads(call["function"]["arguments"])) == {"city"}


def test_async_calls_give_the_same_answers(llm: LLM) -> None:
    async def ask() -> tuple[list[RequestOutput], list[RequestOutput]]:
        return await asyncio.gather(
            llm.async_generate(PROMPTS, GREEDY), llm.async_chat(QUESTION, GREEDY)
        )

    generated, chatted = asyncio.run(ask())
    assert list_tokens(generated) == list_tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert list_tokens(chatted) == list_tokens(llm.chat(QUESTION, GREEDY, use_tqdm=False))


@pytest.mark.parametrize("name", ["llm", "remote"])
def test_cancelling_a_batch_aborts_its_requests(name: str, request: pytest.FixtureRequest) -> None:
    model: LLM = request.getfixturevalue(name)
    long = SamplingParams(temperature=0, max_tokens=2600, ignore_eos=True)
    params = [SamplingParams(max_tokens=1), *[long] * 3]

    def count_running() -> int:
        (worker,) = model._get("/workers")["workers"]
        return int(worker["running"])

    async def cancel() -> None:
        under_way = asyncio.Event()
        loop = asyncio.get_running_loop()

        class Bar(ProgressBar):
            def update(self) -> None:
                loop.call_soon_threadsafe(under_way.set)

        batch = asyncio.create_task(model.async_generate(PROMPTS, params, use_tqdm=Bar))
        await under_way.wait()
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch

    asyncio.run(cancel())
    wait_until(lambda: count_running() == 0, 5.0)


def test_the_tokenizer_renders_and_converts_as_the_model_does(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (output,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert tokenizer.encode(PROMPTS[0]) == output.prompt_token_ids
    assert tokenizer.decode(output.prompt_token_ids) == PROMPTS[0]
    (chat,) = llm.chat(QUESTION, GREEDY, use_tqdm=False)
    assert chat.prompt_token_ids == tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True
    )
    assert chat.prompt == tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, tokenize=False
    )


def test_prefixes_are_cached_until_the_cache_is_reset(llm: LLM) -> None:
    prompt = "A prompt of more than one page, which is therefore cached. " * 3
    llm.generate(prompt, GREEDY, use_tqdm=False)
    (cached,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert cached.num_cached_tokens >= 16
    assert llm.reset_prefix_cache()
    (fresh,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert fresh.num_cached_tokens == 0
    assert list_tokens([cached]) == list_tokens([fresh])


def test_an_error_names_the_prompt_and_ends_the_batch(llm: LLM, remote: LLM) -> None:
    for model in (llm, remote):
        with pytest.raises(InvalidRequestError, match=r"prompt 1: .*out of vocabulary"):
            model.generate([[1, 2], [1 << 20]], GREEDY, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="prompt 0: temperature"):
            model.generate("Hello", SamplingParams(temperature=-1), use_tqdm=False)
        with pytest.raises(UsageError, match="sampling_params: 1 for 2 prompts"):
            model.generate(["a", "b"], [GREEDY], use_tqdm=False)


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_progress_is_reported_for_each_prompt(llm: LLM) -> None:
    updates: list[int] = []

    class Bar(ProgressBar):
        def update(self) -> None:
            updates.append(self.total)

    llm.generate(PROMPTS, GREEDY, use_tqdm=Bar)
    assert updates == [4, 4, 4, 4]
