"""LiteLLM by its routes for OpenAI, vLLM, Anthropic and Ollama: `python litellm_calls.py URL`."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

MESSAGES = [{"role": "user", "content": "What is the KV cache?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Look up the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["age"],
    "additionalProperties": False,
}


def check_route(model: str, base: str, *, streams_usage: bool = True) -> None:
    """Chat, stream and count tokens over one of the routes."""
    common: dict[str, Any] = {
        "model": model,
        "api_base": base,
        "api_key": "none",
        "max_tokens": 96,
        "temperature": 0,
        "num_retries": 0,
    }
    answer = litellm.completion(messages=MESSAGES, **common)
    text = answer.choices[0].message.content
    assert "KV" in text, answer
    assert answer.choices[0].finish_reason == "stop", answer
    usage = answer.usage
    assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens > 10, usage
    chunks = list(
        litellm.completion(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **common
        )
    )
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == text, (model, pieces)
    counted = [c.usage for c in chunks if getattr(c, "usage", None)]
    assert counted and counted[-1].completion_tokens == usage.completion_tokens, (model, counted)


def check_calls(model: str, base: str) -> None:
    """Force a call, and give its result back."""
    common: dict[str, Any] = {
        "model": model,
        "api_base": base,
        "api_key": "none",
        "tools": [WEATHER],
    }
    question: Any = {"role": "user", "content": "What is the weather in Oslo?"}
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = litellm.completion(
        messages=[question], tool_choice=named, max_tokens=64, temperature=0, **common
    )
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "get_weather", call
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Paris"), call
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    ended = litellm.completion(messages=[question, message, result], max_tokens=16, **common)
    assert ended.usage.prompt_tokens > answer.usage.prompt_tokens, ended
    stream = litellm.completion(
        messages=[question],
        tool_choice=named,
        max_tokens=64,
        temperature=0,
        stream=True,
        **common,
    )
    whole = litellm.stream_chunk_builder(list(stream), messages=[question])
    (streamed,) = whole.choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments), streamed


def check_schema(model: str, base: str) -> None:
    """Constrain the answer by a JSON schema."""
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    answer = litellm.completion(
        model=model,
        api_base=base,
        api_key="none",
        messages=[{"role": "user", "content": "Extract age as JSON: Anna is 33 years old."}],
        response_format=schema,
        max_tokens=96,
        temperature=0,
    )
    assert 0 <= json.loads(answer.choices[0].message.content)["age"] <= 150, answer


def main(url: str, *_: str) -> None:
    routes = {
        "openai/embedded": f"{url}/v1",
        "hosted_vllm/embedded": f"{url}/v1",
        "anthropic/embedded": url,
        "ollama_chat/embedded": url,
    }
    for model, base in routes.items():
        check_route(model, base)
        check_schema(model, base)
        if not model.startswith("ollama"):
            # Ollama's API has no tool_choice.
            check_calls(model, base)
    text = litellm.text_completion(
        model="text-completion-openai/embedded",
        api_base=f"{url}/v1",
        api_key="none",
        prompt="What is",
        max_tokens=8,
    )
    assert 0 < text.usage.completion_tokens <= 8, text
    response = litellm.responses(
        model="openai/embedded",
        api_base=f"{url}/v1",
        api_key="none",
        input=MESSAGES[0]["content"],
        max_output_tokens=96,
    )
    assert "KV" in response.output[0].content[0].text, response
    try:
        litellm.embedding(
            model="openai/embedded", api_base=f"{url}/v1", api_key="none", input=["hello"]
        )
    except litellm.BadRequestError as error:
        assert "embeddings" in str(error), error
    else:
        raise AssertionError("embeddings were not refused")
    try:
        litellm.completion(
            model="openai/unknown", api_base=f"{url}/v1", api_key="none", messages=MESSAGES
        )
    except litellm.NotFoundError as error:
        assert "unknown" in str(error), error
    else:
        raise AssertionError("an unknown model was not refused")


if __name__ == "__main__":
    main(*sys.argv[1:])
