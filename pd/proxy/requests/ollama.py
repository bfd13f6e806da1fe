"""Bodies in the shape of Ollama's API, and their translation into chats and completions."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, StringConstraints, model_validator

from pd.core.errors import InvalidRequestError
from pd.core.sampling_params import MAX_TOP_LOGPROBS, RANGES
from pd.proxy.requests.chat import ChatRequest
from pd.proxy.requests.common import ModelName, Seed
from pd.proxy.requests.fields import Bounds, Integer, StopStrings, make_mismatch, make_problem
from pd.proxy.requests.known_fields import OLLAMA_CHAT, OLLAMA_GENERATE, FieldPlace
from pd.proxy.requests.messages import MAX_MESSAGES
from pd.proxy.requests.openai import CompletionRequest
from pd.proxy.requests.request_model import RequestModel

_EFFORTS = ("low", "medium", "high", "max")
_MAX_DURATION_CHARACTERS = 64
# A duration as Go writes it, such as 1h30m.
_DURATION = re.compile(r"[-+]?(0|((\d+(\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h))+)")
_Object = dict[str, Any]
# Ollama's options, and the fields of a chat with the same meaning.
_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


def _bound(parameter: str, *, above: bool = False) -> Bounds:
    return Bounds(*RANGES[parameter], above=above)


class OllamaOptions(RequestModel):
    """Options of the answer. Options for how a model is loaded are ignored."""

    place = FieldPlace((OLLAMA_CHAT, OLLAMA_GENERATE), "options")

    num_predict: Annotated[Integer, Bounds(-2, RANGES["max_tokens"][1])] | None = Field(
        None,
        description="Maximum number of tokens of the answer. Default, and below 1: the rest of "
        "the context.",
    )
    num_ctx: Annotated[Integer, Bounds(1, RANGES["max_tokens"][1])] | None = Field(
        None,
        description="Maximum number of tokens of prompt and answer together. The model's context "
        "may be shorter. A longer prompt is a 400.",
    )
    temperature: Annotated[float, _bound("temperature")] | None = Field(
        None, description="0 is greedy, more is more random."
    )
    top_k: Annotated[Integer, Bounds(-1, RANGES["top_k"][1])] | None = Field(
        None, description="Samples from the k likeliest tokens; 0 or -1: from all."
    )
    top_p: Annotated[float, _bound("top_p", above=True)] | None = Field(
        None,
        description="Samples from the smallest set of likeliest tokens with at least this mass.",
    )
    min_p: Annotated[float, _bound("min_p")] | None = Field(
        None,
        description="Samples from tokens with at least this fraction of the likeliest token's "
        "probability.",
    )
    repeat_penalty: Annotated[float, _bound("repetition_penalty")] | None = Field(
        None,
        description="Divides positive logits of tokens that prompt or answer have, and "
        "multiplies negative ones.",
    )
    presence_penalty: Annotated[float, _bound("presence_penalty")] | None = Field(
        None, description="Subtracted from the logits of tokens in the answer."
    )
    frequency_penalty: Annotated[float, _bound("frequency_penalty")] | None = Field(
        None,
        description="Subtracted from the logits of tokens for each occurrence in the answer.",
    )
    seed: Seed | None = Field(None, description="Makes the answer repeatable.")
    stop: StopStrings = Field((), description="Texts that end the answer.")

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of a chat or completion with the same meaning."""
        names = _SAMPLING.items()
        given = {theirs: getattr(self, ours) for ours, theirs in names}
        limit = self.num_predict
        given |= {
            "seed": self.seed,
            "stop": list(self.stop) or None,
            "max_tokens": limit if limit is not None and limit > 0 else None,
        }
        return {name: value for name, value in given.items() if value is not None}


def _check_keep_alive(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    is_short = isinstance(value, str) and len(value) <= _MAX_DURATION_CHARACTERS
    if is_short and _DURATION.fullmatch(str(value)):
        return value
    raise make_mismatch("a number of seconds or a duration such as '5m'", value)


def _read_format(value: object) -> dict[str, Any]:
    """Translate ``format`` into the chat's fields."""
    if value == "":
        return {}
    if value == "json":
        return {"response_format": {"type": "json_object"}}
    if not isinstance(value, dict):
        raise make_mismatch("'json' or a JSON schema", value)
    described = {"name": "answer", "schema": value}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def _read_think(value: object) -> dict[str, Any]:
    """Translate ``think`` into the chat's fields."""
    if isinstance(value, bool):
        return {"chat_template_kwargs": {"enable_thinking": value}}
    if value not in _EFFORTS:
        raise make_mismatch(f"a boolean or one of {', '.join(_EFFORTS)}", value)
    return {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": value}


class OllamaRequest(RequestModel):
    """Fields of both endpoints that generate."""

    model: Annotated[ModelName, StringConstraints(min_length=1)] = Field(
        description="Name of a served model, see `GET /api/tags`; `NAME:latest` is the same."
    )
    stream: bool = Field(True, description="Answers with lines of JSON.")
    options: OllamaOptions = Field({}, validate_default=True, description="Options of the answer.")
    format: Annotated[
        _Object, PlainValidator(_read_format, json_schema_input_type=str | dict[str, object])
    ] = Field({}, description="`json`, or a JSON schema for the answer.")
    think: (
        Annotated[_Object, PlainValidator(_read_think, json_schema_input_type=bool | str)] | None
    ) = Field(
        None,
        description="Whether the model thinks, or `low`, `medium`, `high` or `max`: the template's "
        "`enable_thinking` and `reasoning_effort`.",
    )
    keep_alive: Annotated[
        float | str,
        PlainValidator(_check_keep_alive, json_schema_input_type=float | str),
    ] = Field("5m", description="Without effect, because nodes never unload a model.")
    logprobs: bool = Field(False, description="Adds the log probability of each token.")
    top_logprobs: Annotated[Integer, Bounds(0, MAX_TOP_LOGPROBS)] = Field(
        0, description="Number of likeliest tokens to show for each token. Needs `logprobs`."
    )
    truncate: bool = Field(True, description="Without effect, because no prompt is ever truncated.")
    shift: bool = Field(True, description="Without effect: the end of the context ends answers.")

    @model_validator(mode="after")
    def _likeliest_tokens_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs needs logprobs to be true", param="top_logprobs"
            )
        return self

    @property
    def top_tokens(self) -> int | None:
        """Number of likeliest tokens to show per token; None if no log probabilities are shown."""
        return self.top_logprobs if self.logprobs else None

    @property
    def only_loads(self) -> bool:
        """Whether the client only wants the model to be ready."""
        raise NotImplementedError

    def _to_fields(self) -> dict[str, Any]:
        fields = {"model": self.model, "stream": self.stream} | self.format
        return fields | (self.think or {}) | self.options.to_fields()

    def _to_chat(self, fields: dict[str, Any]) -> ChatRequest:
        if self.logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return ChatRequest.from_object(self._to_fields() | fields)


class OllamaGenerateRequest(OllamaRequest):
    """Asks for an answer to a prompt."""

    place = FieldPlace((OLLAMA_GENERATE,))

    prompt: str = Field("", description="The prompt. Without it, nothing is generated.")
    system: str = Field("", description="The system prompt.")
    raw: bool = Field(False, description="Takes the prompt as it is, without a chat template.")

    @model_validator(mode="after")
    def _raw_prompts_stand_alone(self) -> Self:
        for name in ("system", "think"):
            if self.raw and getattr(self, name):
                raise InvalidRequestError(
                    f"{name} is for the chat template, which raw leaves out; leave one of them out",
                    param=name,
                )
        return self

    @property
    def only_loads(self) -> bool:
        return not self.prompt

    def to_chat(self) -> ChatRequest:
        """Translate a request that is not raw. Raises InvalidRequestError."""
        messages = [{"role": "user", "content": self.prompt}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return self._to_chat({"messages": messages})

    def to_completion(self) -> CompletionRequest:
        """Translate a raw request. Raises InvalidRequestError."""
        fields = self._to_fields() | {"prompt": self.prompt}
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs
        return CompletionRequest.from_object(fields)


class _MessageReader:
    """Translates the messages of one request.

    Ollama's calls and results have no ids, so we number the calls. A result answers the first open
    call of its tool, or the first open call if it names none.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._calls = 0
        # Ids of calls without a result, with the names of their functions.
        self._open: dict[str, object] = {}

    def read_message(self, message: object, number: int) -> None:
        if not isinstance(message, dict):
            raise make_mismatch("an object", message, number)
        if message.get("images"):
            raise make_problem("has images; this server takes text only", number, "images")
        content = message.get("content")
        if not isinstance(content, str | None):
            raise make_mismatch("a string", content, number, "content")
        kept = {"role": message.get("role"), "content": content}
        if message.get("thinking") is not None:
            kept["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            kept["tool_calls"] = self._read_calls(message["tool_calls"], number)
        if kept["role"] == "tool":
            kept |= self._find_call(message)
        self.messages.append(kept)

    def _read_calls(self, calls: object, number: int) -> list[object]:
        """Give ids to calls without one. The chat checks everything else."""
        if not isinstance(calls, list):
            raise make_mismatch("a list of calls", calls, number, "tool_calls")
        named: list[object] = []
        for call in calls:
            if isinstance(call, dict):
                call = {"id": f"call_{self._calls}"} | call
                function = call.get("function")
                name = function.get("name") if isinstance(function, dict) else None
                if isinstance(call["id"], str):
                    self._open[call["id"]] = name
                self._calls += 1
            named.append(call)
        return named

    def _find_call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Find the call that a result answers."""
        name, call = message.get("tool_name"), message.get("tool_call_id")
        if call is None:
            matching = (i for i, called in self._open.items() if name in (None, called))
            call = next(matching, f"call_{self._calls}")
        called = self._open.pop(call, None) if isinstance(call, str) else None
        return {"tool_call_id": call, "name": called if name is None else name}


def _read_messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise make_mismatch("a list of messages", value)
    if len(value) > MAX_MESSAGES:
        raise make_problem(f"has {len(value)} messages; at most {MAX_MESSAGES} are allowed")
    reader = _MessageReader()
    for number, message in enumerate(value):
        reader.read_message(message, number)
    return reader.messages


class OllamaChatRequest(OllamaRequest):
    """Asks for the next message of a chat."""

    place = FieldPlace((OLLAMA_CHAT,))

    messages: Annotated[
        list[_Object],
        PlainValidator(_read_messages, json_schema_input_type=list[dict[str, object]]),
    ] = Field([], description="The chat so far. Without it, nothing is generated.")
    tools: list[_Object] = Field([], description="Functions that the model may call.")

    @property
    def only_loads(self) -> bool:
        return not self.messages

    def to_chat(self) -> ChatRequest:
        """Translate the request. Raises InvalidRequestError."""
        fields: dict[str, Any] = {"messages": self.messages}
        if self.tools:
            fields["tools"] = self.tools
        last = self.messages[-1]
        if last["role"] == "assistant" and "tool_calls" not in last:
            fields["continue_final_message"] = True
        return self._to_chat(fields)


class OllamaShowRequest(RequestModel):
    """Asks for facts about a model."""

    administrative = True

    model: Annotated[ModelName, StringConstraints(min_length=1)] | None = Field(
        None, description="Name of a served model."
    )
    name: Annotated[ModelName, StringConstraints(min_length=1)] | None = Field(
        None, description="The same as `model`, its older name."
    )

    @property
    def given_name(self) -> str:
        """The name by either field."""
        name = self.model or self.name
        assert name is not None
        return name

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if self.model is None and self.name is None:
            raise InvalidRequestError("model is needed: a name of GET /api/tags", param="model")
        return self
