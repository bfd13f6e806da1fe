"""Models of random weights call functions, and their constrained calls always validate."""

from __future__ import annotations

import functools
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import jsonschema
import openai
import pytest
from grammar_model import make_model
from grammar_nodes import cluster_of, share_grammars
from random_schemas import FORMATS, random_schema
from tokenizers import Tokenizer

from pd.proxy.config import ProxyConfig
from pd.proxy.server import ProxyThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SEED = int(os.environ.get("PD_TEST_SEED", random.randrange(1 << 31)))
# One token of the models here, or reasoning of random tokens would not end.
CLOSE = "</think>"
ASKED: Any = [{"role": "user", "content": "hello"}]
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}!{% endif %}"
# Families, and what their templates say.
MODELS = {
    "hermes": PLAIN,
    "llama3_json": PLAIN,
    "mistral": PLAIN,
    "mistral with names": PLAIN + "[TOOL_CALLS]f[ARGS]",
    "pythonic": PLAIN,
    "qwen3_coder": PLAIN,
    # The generation prompt leaves it open whether the model reasons first, or has it do so.
    "hermes that may reason": PLAIN + "{# <think></think> #}",
    "hermes that reasons": PLAIN + "{% if add_generation_prompt %}<think>\n{% endif %}",
}
# Those that `make test` leaves out.
MORE_MODELS = dict.fromkeys(
    (
        *("deepseek_v3", "deepseek_v31", "functiongemma", "gemma4", "glm45", "glm47", "kimi_k2"),
        *("openai", "phi4_mini_json"),
    ),
    PLAIN,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_model(tmp_path_factory.mktemp("model"))
    file = path / "tokenizer.json"
    assert "<unused0>" in file.read_text()
    file.write_text(file.read_text().replace("<unused0>", CLOSE))
    return path


@pytest.fixture(scope="module")
def client_of(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], openai.OpenAI]]:
    """Return a function that makes a client of a family's proxy, all on one node."""
    with ExitStack() as stack:
        stack.enter_context(share_grammars(model_dir))
        cluster = stack.enter_context(cluster_of(model_dir, "unified"))

        @functools.cache
        def make_client(name: str) -> openai.OpenAI:
            template = (MODELS | MORE_MODELS)[name]
            directory = _with_template(model_dir, tmp_path_factory.mktemp("tokenizer"), template)
            config = ProxyConfig(
                unified=[cluster.unified[0].url],
                port=0,
                tokenizer=directory,
                tool_call_parser=name.split()[0],
            )
            url = stack.enter_context(ProxyThread(config)).url
            return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        yield make_client
        cluster.wait_idle()


def _with_template(model: Path, directory: Path, template: str) -> str:
    (directory / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    config = {"chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory)


def random_function(rng: random.Random, number: int) -> Any:
    names = rng.sample(["city", "unit", "days", "_x", "Name2"], rng.randrange(1, 5))
    definitions: dict[str, Any] = {}
    schema = {
        "type": "object",
        "$defs": definitions,
        "properties": {name: random_parameter(rng, name, definitions) for name in names},
        "required": [name for name in names if rng.random() < 0.5],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": f"f-{number}", "parameters": schema}}


def random_parameter(rng: random.Random, name: str, definitions: dict[str, Any]) -> Any:
    kind = rng.randrange(6)
    if kind == 0:
        return {"enum": rng.sample(["red", " blue ", "ä\n", "<b>", '"'], 2)}
    if kind == 1:
        return {"type": "string", "pattern": "^[a-c]{2,4}$"}
    if kind == 2:
        low = rng.randrange(3)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(5)}
    if kind == 3:
        return {"type": "boolean"}
    # Never a string alone, whose form in tags has limits of its own.
    items = random_schema(rng)
    definitions |= {f"{name}-{key}": each for key, each in items.pop("$defs", {}).items()}
    items = json.loads(json.dumps(items).replace("#/$defs/", f"#/$defs/{name}-"))
    return {"type": "array", "items": items, "maxItems": 2}


def validate(message: Any, tools: list[Any]) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    assert not message.content
    assert message.tool_calls
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, schemas[call.function.name], format_checker=FORMATS)


def random_request(rng: random.Random, logit_bias: dict[str, float]) -> Any:
    tools = [random_function(rng, i) for i in range(rng.randrange(1, 4))]
    named = {"type": "function", "function": {"name": "f-0"}}
    return {
        "model": "grammar-model",
        "messages": ASKED,
        "tools": tools,
        "tool_choice": rng.choice(["required", named]),
        "parallel_tool_calls": rng.random() < 0.5,
        "temperature": 1.0,
        "seed": rng.randrange(1 << 31),
        "n": 2,
        "max_tokens": 400,
        "logit_bias": logit_bias,
    }


@pytest.mark.parametrize("count", [1, pytest.param(40, marks=pytest.mark.full)], ids=["1", "40"])
@pytest.mark.parametrize(
    "name", [*MODELS, *(pytest.param(name, marks=pytest.mark.full) for name in MORE_MODELS)]
)
def test_random_models_call_random_functions(
    client_of: Callable[[str], openai.OpenAI], model_dir: Path, name: str, count: int
) -> None:
    print(f"PD_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    logit_bias = {}
    if "reason" in name:
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        logit_bias = {str(tokenizer.token_to_id(CLOSE)): 4.0}
    ended, client = 0, client_of(name)
    with ThreadPoolExecutor(8) as pool:
        # Some functions take more than ``max_tokens`` of random tokens to call; another comes then.
        for _ in range(20):
            asked = [random_request(rng, logit_bias) for _ in range(count)]
            answers = pool.map(lambda each: client.chat.completions.create(**each), asked)
            for each, answer in zip(asked, answers, strict=True):
                ended += checked(each, answer)
            if ended:
                break
    assert ended > 0


def checked(asked: Any, answer: Any) -> int:
    """Check the choices of ``answer`` that ended before ``max_tokens``, and return their number."""
    ended = 0
    for choice in answer.choices:
        one = asked["tool_choice"] != "required" or not asked["parallel_tool_calls"]
        assert len(choice.message.tool_calls or []) <= 1 or not one
        if choice.finish_reason == "length":
            continue
        ended += 1
        is_named = asked["tool_choice"] != "required"
        assert choice.finish_reason == ("stop" if is_named else "tool_calls")
        validate(choice.message, asked["tools"])
    return ended
