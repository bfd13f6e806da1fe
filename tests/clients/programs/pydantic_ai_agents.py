"""Pydantic AI over chats, responses, Anthropic and Ollama: `python pydantic_ai_agents.py URL`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.direct import model_request
from pydantic_ai.messages import ModelRequest, ToolCallPart, ToolReturnPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.ollama import OllamaProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

QUESTION = "What is the KV cache?"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
    "required": ["city"],
}
SETTINGS: Any = {"temperature": 0, "max_tokens": 96}


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


async def check_model(name: str, model: Any) -> None:
    agent = Agent(model, model_settings=SETTINGS)
    answer = await agent.run(QUESTION)
    assert "KV" in answer.output, (name, answer)
    usage = answer.usage
    assert usage.input_tokens > 0 and usage.output_tokens > 0, (name, usage)
    async with agent.run_stream(QUESTION) as stream:
        text = "".join([piece async for piece in stream.stream_text(delta=True)])
    assert text == answer.output, (name, text)
    again = await agent.run("What is 12 + 30?", message_history=answer.all_messages())
    assert again.usage.input_tokens > usage.input_tokens, (name, again.usage)

    sentence = "Extract name, age as JSON: Anna Berg is a nurse from Oslo and is 33 years old."
    # The package asks Anthropic's servers for a schema only with models that it knows.
    schemas = [] if name == "anthropic" else [NativeOutput(Person)]
    for output in (ToolOutput(Person), *schemas):
        extractor = Agent(model, output_type=output, model_settings=SETTINGS, retries=0)
        found = await extractor.run(sentence)
        assert isinstance(found.output, Person), (name, output, found)
    await check_tools(name, model)


async def check_tools(name: str, model: Any) -> None:
    """The model must call the one tool, whose result goes back to it."""
    weather = ToolDefinition(name="get_weather", parameters_json_schema=WEATHER)
    question = ModelRequest.user_text_prompt("What is the weather in Oslo?")
    tools = ModelRequestParameters(function_tools=[weather])
    forced = SETTINGS | {"tool_choice": "required"}
    called = await model_request(
        model, [question], model_settings=forced, model_request_parameters=tools
    )
    call = next(part for part in called.parts if isinstance(part, ToolCallPart))
    assert call.args_as_dict()["city"] in ("Oslo", "Paris"), (name, call)
    result = ModelRequest([ToolReturnPart(call.tool_name, "rain", call.tool_call_id)])
    ended = await model_request(
        model, [question, called, result], model_settings=SETTINGS, model_request_parameters=tools
    )
    assert ended.usage.input_tokens > called.usage.input_tokens, (name, ended)


def main(url: str, *_: str) -> None:
    openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    anthropic = AnthropicProvider(base_url=url, api_key="none")
    models = {
        "chat": OpenAIChatModel("embedded", provider=openai),
        "responses": OpenAIResponsesModel("embedded", provider=openai),
        "anthropic": AnthropicModel("embedded", provider=anthropic),
        "ollama": OpenAIChatModel("embedded", provider=OllamaProvider(base_url=f"{url}/v1")),
    }
    for name, model in models.items():
        asyncio.run(check_model(name, model))


if __name__ == "__main__":
    main(*sys.argv[1:])
