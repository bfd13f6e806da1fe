"""Arguments of the offline classes: translated, or refused by name."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from pd import LLM, Engine, SamplingParams, StructuredOutputsParams
from pd.core.errors import SetupError, UsageError
from pd.embedded import EMBEDDED_MODEL
from pd.offline.settings import read_settings

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_parallel_size": 2}, "LLM: tensor_parallel_size=2 is not supported.*give 1"),
        ({"quantization": "awq"}, "quantization='awq' is unknown; give one of auto, fp8"),
        ({"enable_lora": True}, "enable_lora=True"),
        (
            {"enable_prefix_caching": False, "radix_cache": "on"},
            "radix_cache='on' and another argument set radix_cache",
        ),
        ({"swap_space": 4}, "unsupported argument swap_space=4"),
        ({"dtype": "int8"}, "dtype='int8' is unknown; give one of auto, float32"),
        ({"attention_backend": "flash"}, "attention_backend='flash'"),
        ({"port": 8000}, "unsupported argument port=8000"),
        pytest.param(  # the engine process says so
            {"max_model_len": 1 << 20},
            "--context-length 1048576 exceeds the model's 8192",
            marks=pytest.mark.full,
        ),
        ({"page_size": 3}, "--page-size must be one of"),
        ({"speculative_config": {"method": "medusa"}}, "method='medusa'"),
        ({"speculative_config": {"method": "ngram", "prompt_lookup_max": 4}}, "prompt_lookup_max"),
        (
            {"speculative_config": {"method": "ngram"}, "speculative_algorithm": "eagle"},
            "speculative_algorithm='eagle' and another argument",
        ),
        ({"api_key": "secret"}, "api_key is for url"),
    ],
)
def test_unsupported_arguments_of_an_llm_are_refused_by_name(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        LLM(EMBEDDED_MODEL, **arguments)


def test_a_model_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="'no/such' is neither a directory nor in"):
        LLM("no/such")
    with pytest.raises(UsageError, match="give a model"):
        LLM()
    with pytest.raises(UsageError, match="Engine: unsupported argument colour='red'"):
        Engine(EMBEDDED_MODEL, colour="red")


def test_settings_of_the_nodes_are_refused_for_a_running_deployment() -> None:
    with pytest.raises(UsageError, match="dtype='float32' cannot be set for a running deployment"):
        LLM(url="http://127.0.0.1:1", dtype="float32")
    with pytest.raises(
        UsageError, match="url must be like http://HOST:PORT or https://HOST, not ftp"
    ):
        LLM(url="ftp://x")
    for number in ("x", -1):
        with pytest.raises(UsageError, match="max_num_seqs must be a number from 1 on, not"):
            LLM(url="http://127.0.0.1:1", max_num_seqs=number)
    with pytest.raises(UsageError, match="give api_key") as refused:
        LLM(url="http://user:secret@host")
    assert "secret" not in str(refused.value)


def test_a_deployment_that_is_not_there_is_reported_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(SetupError, match=f"no answer from {address}: .*; start a proxy there"):
            LLM(url=address)


def test_names_of_vllm_become_ours(tmp_path: Path) -> None:
    settings = read_settings(
        "LLM",
        EMBEDDED_MODEL,
        {
            "dtype": "half",
            "max_model_len": 512,
            "gpu_memory_utilization": 0.5,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
            "block_size": 32,
            "enforce_eager": True,
            "seed": 3,
            "tokenizer": tmp_path,
            "trust_remote_code": True,
            "tensor_parallel_size": 1,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 5},
            "generation_config": "vllm",
            "quantization": "fp8",
        },
    )
    node = settings.node
    assert (node.role, node.model, node.dtype) == ("unified", EMBEDDED_MODEL, "float16")
    assert node.quantization == "fp8"
    assert (node.context_length, node.mem_fraction, node.page_size) == (512, 0.5, 32)
    assert (node.max_running_requests, node.chunked_prefill_size) == (8, 256)
    assert (node.cuda_graph_batch_sizes, node.seed, node.generation_config) == ((0,), 3, "none")
    assert (node.speculative_algorithm, node.speculative_num_draft_tokens) == ("ngram", 5)
    assert settings.proxy == {"tokenizer": str(tmp_path)}
    assert settings.seed == 3


def test_a_models_own_layer_drafts_without_another_model() -> None:
    given = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    node = read_settings("LLM", EMBEDDED_MODEL, given).node
    assert (node.speculative_algorithm, node.speculative_draft_model) == ("mtp", None)


def test_settings_have_our_own_names_too() -> None:
    given = {"kv_cache_tokens": 4096, "schedule_policy": "fcfs", "cuda_graph_batch_sizes": [1, 2]}
    node = read_settings("LLM", EMBEDDED_MODEL, given).node
    assert (node.kv_cache_tokens, node.schedule_policy) == (4096, "fcfs")
    assert node.cuda_graph_batch_sizes == (1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logprob_token_ids": [1]}, "SamplingParams: logprob_token_ids="),
        ({"best_of": 2}, "best_of=2 is not supported; leave it out or give 1"),
        ({"detokenize": False}, "detokenize=False"),
        ({"logits_processors": [print]}, "logits_processors="),
        ({"logprobs": -1}, "logprobs=-1"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1"),
    ],
)
def test_unsupported_sampling_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**arguments)


def test_sampling_arguments_that_ask_for_nothing_are_fine() -> None:
    params = SamplingParams(best_of=1, bad_words=(), detokenize=True, extra_args={}, stop=("a",))
    assert (params.to_json()["stop"], params.to_json()["bad_words"]) == (["a"], [])
    assert (
        not {"best_of", "allowed_token_ids", "detokenize", "extra_args"} & params.to_json().keys()
    )
    with pytest.raises(TypeError, match="colour"):
        SamplingParams(colour="red")  # type: ignore[call-arg]


def test_a_constraint_is_one_constraint() -> None:
    class Page(BaseModel):
        number: int

    assert StructuredOutputsParams(json=Page).to_json()["json"] == Page.model_json_schema()
    with pytest.raises(UsageError, match="json, regex given; give exactly one"):
        StructuredOutputsParams(json={}, regex="a")
    with pytest.raises(UsageError, match="none given"):
        StructuredOutputsParams()
    with pytest.raises(UsageError, match="whitespace_pattern=' '"):
        StructuredOutputsParams(regex="a", whitespace_pattern=" ")


def test_unsupported_arguments_of_calls_are_refused_by_name(remote: LLM) -> None:
    with pytest.raises(UsageError, match="generate: unsupported argument lora_request="):
        remote.generate("Hello", lora_request=object())
    with pytest.raises(UsageError, match="chat: unsupported argument mm_processor_kwargs="):
        remote.chat([{"role": "user", "content": "Hi"}], mm_processor_kwargs={"a": 1})
    with pytest.raises(UsageError, match="prompt: unsupported argument multi_modal_data="):
        remote.generate({"prompt": "Hello", "multi_modal_data": {"image": 1}})
    with pytest.raises(UsageError, match="tool_choice='auto' needs tools"):
        remote.chat([{"role": "user", "content": "Hi"}], tool_choice="auto")
    with pytest.raises(UsageError, match="a running deployment does not tell"):
        remote.get_default_sampling_params()


def test_seeds_of_a_batch_come_from_the_seed_of_the_model(url: str) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=12)
    batches = []
    for _ in range(2):
        with LLM(url=url, seed=7) as llm:
            outputs = llm.generate(["The prefill node"] * 3, params, use_tqdm=False)
            batches.append([output.outputs[0].token_ids for output in outputs])
    assert batches[0] == batches[1]
    assert batches[0][0] != batches[0][1]


def test_a_closed_model_says_so(url: str) -> None:
    llm = LLM(url=url)
    llm.close()
    llm.close()
    with pytest.raises(UsageError, match="the model is closed"):
        llm.generate("Hello")


@pytest.mark.parametrize(
    "argument",
    [
        {"max_model_len": "abc"},
        {"max_num_seqs": True},
        {"gpu_memory_utilization": "0.9"},
        {"seed": "x"},
        {"log_level": "loud"},
    ],
)
def test_values_of_wrong_types_are_refused_by_name(argument: dict[str, Any]) -> None:
    (value,) = argument.values()
    with pytest.raises(UsageError, match=f"LLM: [a-z_]+={value!r} is"):
        LLM(EMBEDDED_MODEL, **argument)


def test_structured_outputs_need_their_class() -> None:
    with pytest.raises(UsageError, match=r"give a StructuredOutputsParams\("):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
