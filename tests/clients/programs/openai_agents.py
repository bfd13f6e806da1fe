"""OpenAI's Agents SDK over responses and over chats: `python openai_agents.py URL`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

QUESTION = "What is the KV cache?"
asked: list[str] = []


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


@function_tool
def get_weather(city: Literal["Oslo", "Paris"]) -> str:
    """Look up the weather of a city."""
    asked.append(city)
    return f"Rain in {city}"


async def check_model(model: Any) -> None:
    settings = ModelSettings(temperature=0, max_tokens=96)
    helper = Agent("helper", instructions=None, model=model, model_settings=settings)
    result = await Runner.run(helper, QUESTION)
    assert "KV" in result.final_output, result
    assert result.context_wrapper.usage.total_tokens > 10, result.context_wrapper.usage
    streamed = Runner.run_streamed(helper, QUESTION)
    deltas = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == result.final_output == streamed.final_output, deltas

    session = SQLiteSession("conversation")
    await Runner.run(helper, QUESTION, session=session)
    await Runner.run(helper, "What is 12 + 30?", session=session)
    assert len(await session.get_items()) == 4

    # The SDK asks for a call in the first turn only.
    forced = ModelSettings(temperature=0, max_tokens=96, tool_choice="required")
    caller = Agent("caller", model=model, model_settings=forced, tools=[get_weather])
    for run in (Runner.run, run_streamed):
        asked.clear()
        result = await run(caller, "What is the weather in Oslo?", max_turns=5)
        assert asked and set(asked) <= {"Oslo", "Paris"}, asked
        assert result.final_output is not None

    # Without this, so small a model repeats its call until its tokens end.
    forced.parallel_tool_calls = False
    boss = Agent("boss", model=model, model_settings=forced, handoffs=[handoff(helper)])
    result = await Runner.run(boss, QUESTION, max_turns=5)
    assert result.last_agent is helper, result.last_agent

    extractor = Agent("extractor", model=model, model_settings=settings, output_type=Person)
    sentence = "Extract name, age as JSON: Anna Berg is a nurse from Oslo and is 33 years old."
    assert isinstance((await Runner.run(extractor, sentence)).final_output, Person)


async def run_streamed(agent: Any, question: str, max_turns: int) -> Any:
    result = Runner.run_streamed(agent, question, max_turns=max_turns)
    async for _ in result.stream_events():
        pass
    return result


async def check_stored_conversation(model: Any) -> None:
    """The server keeps the conversation (`previous_response_id`)."""
    helper = Agent("helper", model=model, model_settings=ModelSettings(temperature=0))
    first = await Runner.run(helper, QUESTION)
    again = await Runner.run(
        helper, "What is 12 + 30?", previous_response_id=first.last_response_id
    )
    counts = [r.context_wrapper.usage.input_tokens for r in (first, again)]
    assert counts[1] > counts[0], counts


async def check_all(url: str) -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    responses = OpenAIResponsesModel("embedded", client)
    for model in (responses, OpenAIChatCompletionsModel("embedded", client)):
        await check_model(model)
    await check_stored_conversation(responses)


def main(url: str, *_: str) -> None:
    set_tracing_disabled(True)
    asyncio.run(check_all(url))


if __name__ == "__main__":
    main(*sys.argv[1:])
