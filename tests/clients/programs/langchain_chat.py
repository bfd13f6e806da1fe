"""LangChain's chat models of OpenAI and Anthropic: `python langchain_chat.py URL`."""

from __future__ import annotations

import sys
from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import BadRequestError
from pydantic import BaseModel, Field

QUESTION = "What is the KV cache?"


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


@tool
def get_weather(city: Literal["Oslo", "Paris"]) -> str:
    """Look up the weather of a city."""
    return f"Rain in {city}"


def check_model(model: ChatOpenAI | ChatAnthropic) -> None:
    """Chat, stream, count tokens, call a tool and give its result back."""
    answer = model.invoke(QUESTION)
    assert "KV" in answer.text, answer
    usage = answer.usage_metadata
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"] > 10, usage
    pieces = list(model.stream(QUESTION))
    assert "".join(piece.text for piece in pieces) == answer.text
    total = sum(p.usage_metadata["total_tokens"] for p in pieces if p.usage_metadata)
    assert total == usage["total_tokens"], (pieces, usage)

    question = HumanMessage("What is the weather in Oslo?")
    calling = model.bind_tools([get_weather], tool_choice="get_weather")
    called = calling.invoke([question])
    (call,) = called.tool_calls
    assert call["name"] == "get_weather" and call["args"]["city"] in ("Oslo", "Paris"), call
    streamed = None
    for piece in calling.stream([question]):
        streamed = piece if streamed is None else streamed + piece
    assert [c["args"] for c in streamed.tool_calls] == [call["args"]], streamed
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    ended = model.bind_tools([get_weather]).invoke([question, called, result])
    assert isinstance(ended, AIMessage)


def main(url: str, *_: str) -> None:
    settings = {"model": "embedded", "temperature": 0, "max_tokens": 96, "max_retries": 0}
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", stream_usage=True, **settings)
    responses = ChatOpenAI(base_url=f"{url}/v1", api_key="none", use_responses_api=True, **settings)
    claude = ChatAnthropic(base_url=url, api_key="none", **settings)
    for model in (chat, responses, claude):
        check_model(model)
    sentence = "Extract name, age as JSON: Anna Berg is a nurse from Oslo and is 33 years old."
    for model, method in (
        (chat, "json_schema"),
        (chat, "function_calling"),
        (responses, "json_schema"),
        (claude, "function_calling"),
        (claude, "json_schema"),
    ):
        found = model.with_structured_output(Person, method=method).invoke(sentence)
        assert isinstance(found, Person), (model, method, found)
    texts = chat.batch([QUESTION, "What is 12 + 30?"])
    assert "42" in texts[1].text, texts
    embeddings = OpenAIEmbeddings(
        model="embedded",
        base_url=f"{url}/v1",
        api_key="none",
        check_embedding_ctx_length=False,
        max_retries=0,
    )
    try:
        embeddings.embed_query("hello")
    except BadRequestError as error:
        assert "embeddings" in str(error), error
    else:
        raise AssertionError("embeddings were not refused")


if __name__ == "__main__":
    main(*sys.argv[1:])
