"""LlamaIndex's class for servers with OpenAI's API: `python llama_index_chat.py URL`."""

import asyncio
import sys
from typing import Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

QUESTION = "What is the KV cache?"
asked: list[str] = []


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


def get_weather(city: Literal["Oslo", "Paris"]) -> str:
    """Look up the weather of a city."""
    asked.append(city)
    return f"Rain in {city}"


def make_model(url: str, **more: object) -> OpenAILike:
    return OpenAILike(
        model="embedded",
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=4096,
        max_tokens=96,
        temperature=0,
        max_retries=0,
        **more,
    )


async def check_agent(model: OpenAILike) -> None:
    """A chat, and an agent whose first answer must be a call. Both on one event loop, because the
    model keeps its connections."""
    answer = await model.achat([ChatMessage(role="user", content=QUESTION)])
    assert "KV" in answer.message.content
    agent = FunctionAgent(
        tools=[get_weather],
        llm=model,
        system_prompt="You look up the weather.",
        initial_tool_choice="get_weather",
        streaming=True,
    )
    result = await agent.run("What is the weather in Oslo?", max_iterations=4)
    assert asked, "the agent never called its tool"
    assert result.response.role == "assistant", result


def main(url: str, *_: str) -> None:
    model = make_model(url)
    messages = [ChatMessage(role="user", content=QUESTION)]
    answer = model.chat(messages)
    assert "KV" in answer.message.content, answer
    assert answer.raw.usage.total_tokens > 10, answer.raw
    pieces = [piece.delta or "" for piece in model.stream_chat(messages)]
    assert "".join(pieces) == answer.message.content, pieces

    plain = OpenAILike(
        model="embedded", api_base=f"{url}/v1", api_key="none", is_chat_model=False, max_tokens=8
    )
    assert plain.complete("What is").text
    assert "".join(piece.delta for piece in plain.stream_complete("What is"))

    weather = FunctionTool.from_defaults(get_weather)
    called = model.chat_with_tools([weather], "The weather in Oslo?", tool_required=True)
    (call,) = model.get_tool_calls_from_response(called)
    assert call.tool_name == "get_weather" and call.tool_kwargs["city"] in ("Oslo", "Paris"), call
    asyncio.run(check_agent(model))

    sentence = "Extract name, age as JSON: Anna Berg is a nurse from Oslo and is 33 years old."
    for structured in (True, False):
        strict = make_model(url, should_use_structured_outputs=structured)
        found = strict.as_structured_llm(Person).chat([ChatMessage(role="user", content=sentence)])
        assert isinstance(found.raw, Person), found


if __name__ == "__main__":
    main(*sys.argv[1:])
