"""Bodies in the shape of OpenAI's Responses API, and their translation into a chat."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, PlainValidator

from pd.core.errors import InvalidRequestError
from pd.core.sampling_params import RANGES
from pd.proxy.requests.chat import ChatRequest
from pd.proxy.requests.common import (
    MAX_PRIORITY,
    MAX_RID_CHARACTERS,
    MAX_TIMEOUT,
    MIN_PRIORITY,
    ModelName,
)
from pd.proxy.requests.fields import (
    Bounds,
    Integer,
    describe_value,
    make_mismatch,
    make_problem,
)
from pd.proxy.requests.known_fields import RESPONSES, FieldPlace
from pd.proxy.requests.request_model import RequestModel
from pd.proxy.requests.response_items import Message, name_results, read_input

MAX_METADATA, MAX_KEY_CHARACTERS, MAX_VALUE_CHARACTERS = 16, 64, 512
HIDDEN_REASONING = "reasoning.encrypted_content"
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SUMMARIES = ("auto", "concise", "detailed")
_Object = dict[str, Any]


class Translation(NamedTuple):
    """A field of the request.

    Attributes:
        given: the client's value, which the response repeats.
        fields: the fields of a chat that mean the same.
    """

    given: Any
    fields: _Object


def _read_tools(value: object) -> Translation:
    if not isinstance(value, list):
        raise make_mismatch("a list of tools", value)
    tools, shown = [], []
    for number, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise make_mismatch("an object", tool, number)
        if tool.get("type") != "function":
            raise make_problem(
                f"is {describe_value(tool.get('type'))}; this server calls no tools itself, so "
                'describe a function of your own: {"type": "function", "name": …}',
                number,
                "type",
            )
        given = {name: tool.get(name) for name in ("name", "description", "parameters", "strict")}
        function = {name: item for name, item in given.items() if item is not None}
        shown.append({"type": "function"} | given)
        tools.append({"type": "function", "function": function})
    return Translation(shown, {"tools": tools} if tools else {})


def _read_name(value: _Object, *path: str | int) -> str:
    name = value.get("name")
    if not isinstance(name, str):
        raise make_mismatch("the name of a function", name, *path, "name")
    return name


def _read_tool_choice(value: object) -> Translation:
    if value in ("none", "auto", "required"):
        return Translation(value, {"tool_choice": value})
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and kind == "function":
        name = _read_name(value)
        choice = {"type": "function", "function": {"name": name}}
        return Translation({"type": "function", "name": name}, {"tool_choice": choice})
    if isinstance(value, dict) and kind == "allowed_tools":
        mode, tools = value.get("mode"), value.get("tools")
        if mode not in ("auto", "required"):
            raise make_mismatch("'auto' or 'required'", mode, "mode")
        if not isinstance(tools, list) or not tools:
            raise make_mismatch("a list of at least one tool", tools, "tools")
        names = []
        for number, tool in enumerate(tools):
            if not isinstance(tool, dict) or tool.get("type") != "function":
                raise make_mismatch('{"type": "function", "name": "…"}', tool, "tools", number)
            names.append(_read_name(tool, "tools", number))
        shown = [{"type": "function", "name": name} for name in names]
        given = {"type": "allowed_tools", "mode": mode, "tools": shown}
        return Translation(given, {"tool_choice": mode, "allowed": names})
    raise make_problem(
        'must be \'none\', \'auto\', \'required\', {"type": "function", "name": "…"} or '
        f'{{"type": "allowed_tools", …}}, not {describe_value(value)}'
    )


def _read_text(value: object) -> Translation:
    if not isinstance(value, dict):
        raise make_mismatch("an object", value)
    verbosity, form = value.get("verbosity"), value.get("format")
    if verbosity not in (None, "medium"):
        raise make_problem(
            f"is {describe_value(verbosity)}; only 'medium' is supported, so say in instructions "
            "how long the answer should be",
            "verbosity",
        )
    if form is None:
        return Translation({}, {})
    kind = form.get("type") if isinstance(form, dict) else None
    match kind:
        case "text":
            return Translation({}, {})
        case "json_object":
            given = {"type": kind}
            return Translation({"format": given}, {"response_format": given})
        case "json_schema":
            names = ("name", "description", "schema", "strict")
            given = {name: form[name] for name in names if form.get(name) is not None}
            if not isinstance(given.get("schema"), dict):
                raise make_mismatch("an object", form.get("schema"), "format", "schema")
            fields = {"type": "json_schema", "json_schema": {"name": "answer"} | given}
            shown = {"format": {"type": "json_schema"} | given}
            return Translation(shown, {"response_format": fields})
    raise make_mismatch(
        'an object with the type "text", "json_object" or "json_schema"', form, "format"
    )


def _read_reasoning(value: object) -> Translation:
    if not isinstance(value, dict):
        raise make_mismatch("an object", value)
    effort = value.get("effort")
    if effort is not None and effort not in _EFFORTS:
        raise make_mismatch(f"one of {', '.join(_EFFORTS)}", effort, "effort")
    for name in ("summary", "generate_summary"):
        if value.get(name) is not None and value[name] not in _SUMMARIES:
            raise make_mismatch(f"one of {', '.join(_SUMMARIES)}", value[name], name)
    given = {name: value.get(name) for name in ("effort", "summary")}
    return Translation(given, {} if effort is None else {"reasoning_effort": effort})


def _check_include(value: list[str]) -> list[str]:
    for number, name in enumerate(value):
        if name != HIDDEN_REASONING:
            raise make_problem(
                f"is {describe_value(name)}; only {HIDDEN_REASONING!r} is supported", number
            )
    return value


def check_metadata(value: dict[str, str]) -> dict[str, str]:
    """Raise the error of labels that are too many or too long."""
    if len(value) > MAX_METADATA:
        raise make_problem(f"has {len(value)} keys; at most {MAX_METADATA} are allowed")
    for key, text in value.items():
        if len(key) > MAX_KEY_CHARACTERS or len(text) > MAX_VALUE_CHARACTERS:
            raise make_problem(
                f"has the key {describe_value(key)} with {len(text)} characters; keys have at most "
                f"{MAX_KEY_CHARACTERS} characters, and values {MAX_VALUE_CHARACTERS}"
            )
    return value


Metadata = Annotated[dict[str, str], AfterValidator(check_metadata)]
_LABEL = "A label for the client's own use, without effect."


class ResponseStreamOptions(RequestModel):
    """Options of a stream. None of them has an effect here."""

    place = FieldPlace((RESPONSES,), "stream_options")


class ResponsesRequest(RequestModel):
    """Asks for a response."""

    place = FieldPlace((RESPONSES,))

    model: ModelName | None = Field(
        None, description="Name of a served model, see `GET /v1/models`. An unknown name is a 404."
    )
    input: Annotated[
        list[Message],
        PlainValidator(read_input, json_schema_input_type=str | list[dict[str, object]]),
    ] = Field(
        description="A text, or items: `message` (`user`, `assistant`, `system`, `developer`) with "
        "parts of text, `function_call`, `function_call_output` and `reasoning`."
    )
    instructions: str | None = Field(
        None, description="The system prompt. A later response does not inherit it."
    )
    previous_response_id: str | None = Field(
        None,
        description="A stored response of the same key, whose input and output come before `input`."
        " An unknown one is a 400 with the code `previous_response_not_found`.",
    )
    store: bool = Field(
        True,
        description="Keeps the response for `GET /v1/responses/{id}` and `previous_response_id`.",
    )
    stream: bool = Field(False, description="Answers with server-sent events.")
    stream_options: ResponseStreamOptions | None = Field(None, description="Without effect.")
    tools: (
        Annotated[
            Translation,
            PlainValidator(_read_tools, json_schema_input_type=list[dict[str, object]]),
        ]
        | None
    ) = Field(
        None,
        description="Functions: `type`, `name`, `description`, `parameters` and `strict`. Tools "
        "that OpenAI's servers run are refused.",
    )
    tool_choice: (
        Annotated[
            Translation,
            PlainValidator(_read_tool_choice, json_schema_input_type=str | dict[str, object]),
        ]
        | None
    ) = Field(
        None,
        description="`none`, `auto`, `required`, a function's name, or `allowed_tools`, which shows"
        " the model only these.",
    )
    parallel_tool_calls: bool = Field(
        True, description="If false, the model makes at most one call."
    )
    max_output_tokens: Annotated[Integer, Bounds(1, RANGES["max_tokens"][1])] | None = Field(
        None,
        description="Maximum number of tokens with reasoning. The context may end it earlier.",
    )
    max_tool_calls: Annotated[Integer, Bounds(1, 1 << 31)] | None = Field(
        None, description="Without effect, because it counts tools that OpenAI's servers run."
    )
    temperature: Annotated[float, Bounds(0.0, 2.0)] | None = Field(
        None, description="0 is greedy, more is more random."
    )
    top_p: Annotated[float, Bounds(0.0, 1.0, above=True)] | None = Field(
        None,
        description="Samples from the smallest set of likeliest tokens with at least this mass.",
    )
    text: (
        Annotated[
            Translation,
            PlainValidator(_read_text, json_schema_input_type=dict[str, object]),
        ]
        | None
    ) = Field(
        None, description="`format`: `text`, `json_object`, or `json_schema` with a `schema`."
    )
    reasoning: (
        Annotated[
            Translation,
            PlainValidator(_read_reasoning, json_schema_input_type=dict[str, object]),
        ]
        | None
    ) = Field(
        None,
        description="`effort`, which chat templates get as `reasoning_effort`. `summary` has no "
        "effect: reasoning is sent whole.",
    )
    include: Annotated[list[str], AfterValidator(_check_include)] = Field(
        [],
        description=f"`{HIDDEN_REASONING}` adds reasoning in the form that clients send back.",
    )
    metadata: Metadata | None = Field(None, description="Labels, which the response repeats.")
    user: str | None = Field(None, description=_LABEL)
    safety_identifier: str | None = Field(None, description=_LABEL)
    prompt_cache_key: str | None = Field(None, description=_LABEL)
    timeout: Annotated[float, Bounds(0.0, MAX_TIMEOUT, above=True)] | None = Field(
        None, description="Seconds until the request fails. An addition of this server."
    )
    priority: Annotated[Integer, Bounds(MIN_PRIORITY, MAX_PRIORITY)] | None = Field(
        None, description="As at `/v1/chat/completions`. An addition of this server."
    )
    cache_salt: Annotated[str, Field(max_length=MAX_RID_CHARACTERS)] | None = Field(
        None, description="As at `/v1/chat/completions`. An addition of this server."
    )
    chat_template_kwargs: _Object | None = Field(
        None, description="As at `/v1/chat/completions`. An addition of this server."
    )

    @property
    def hides_reasoning(self) -> bool:
        """Whether the client wants ``encrypted_content``."""
        return HIDDEN_REASONING in self.include

    def to_chat(self, messages: list[Message]) -> ChatRequest:
        """Translate the request. Raises InvalidRequestError.

        Args:
            messages: those of the previous response and ``input``.
        """
        messages = name_results(messages)
        if self.instructions:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        fields: _Object = {"messages": messages}
        for part in (self.tools, self.tool_choice, self.text, self.reasoning):
            fields |= {} if part is None else part.fields
        allowed = fields.pop("allowed", None)
        if allowed is not None:
            fields["tools"] = _select_tools(fields.get("tools", []), allowed)
        for name in ("model", "temperature", "top_p", "timeout", "priority", "cache_salt"):
            fields[name] = getattr(self, name)
        fields |= {
            "max_completion_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
            "stream": self.stream,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return ChatRequest.from_object(given)


def _select_tools(tools: list[_Object], allowed: list[str]) -> list[_Object]:
    names = [tool["function"].get("name") for tool in tools]
    for name in allowed:
        if name not in names:
            raise InvalidRequestError(
                f"tool_choice.tools names the function {describe_value(name)}, which is not among "
                "the tools",
                param="tool_choice.tools",
            )
    return [tool for tool, name in zip(tools, names, strict=True) if name in allowed]
