"""Types of Ollama's answers, for the API's description."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict


class OllamaAnswer(TypedDict):
    """An answer in Ollama's shape, or a line of one. The last line has the figures."""

    model: str
    created_at: str
    message: NotRequired[Annotated[dict[str, object], Field(description="Only of a chat.")]]
    response: NotRequired[Annotated[str, Field(description="Only of a prompt.")]]
    thinking: NotRequired[str]
    logprobs: NotRequired[list[dict[str, object]]]
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load"]]
    total_duration: NotRequired[Annotated[int, Field(description="In nanoseconds.")]]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class OllamaModels(TypedDict):
    """Models in Ollama's shape."""

    models: list[dict[str, object]]


class OllamaFacts(TypedDict):
    """Facts about a model in Ollama's shape."""

    modelfile: str
    parameters: str
    template: Annotated[str, Field(description="The model's chat template, in Jinja.")]
    details: dict[str, object]
    model_info: dict[str, object]
    capabilities: list[str]
    modified_at: str
