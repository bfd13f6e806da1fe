"""Bodies in the shape of Anthropic's Messages API, and their translation into a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, PlainValidator, StringConstraints

from pd.core.messages import MAX_PREFIX_LEASE
from pd.core.sampling_params import RANGES
from pd.proxy.requests.chat import ChatRequest
from pd.proxy.requests.common import MAX_TIMEOUT, ModelName
from pd.proxy.requests.fields import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    Bounds,
    Integer,
    describe_value,
    make_mismatch,
    make_problem,
)
from pd.proxy.requests.known_fields import COUNT_TOKENS, MESSAGES, FieldPlace
from pd.proxy.requests.messages import MAX_MESSAGES
from pd.proxy.requests.request_model import RequestModel

_EFFORTS = ("low", "medium", "high", "xhigh", "max")
# Blocks for which a model would need more than text.
_MEDIA_BLOCKS = ("image", "document")
_THINKING_KINDS = ("enabled", "adaptive", "disabled")
# Claude Code begins the system prompt with a line for billing, which differs in every request. It
# says nothing to the model, but as the beginning of the prompt it would defeat the prefix cache.
_BILLING = "x-anthropic-billing-header:"
_EDITS = ("clear_thinking_", "clear_tool_uses_")


class Conversation(NamedTuple):
    """Messages in the shape of a chat.

    Attributes:
        messages: as ``messages`` of ``/v1/chat/completions``.
        is_leased: the client marked a prefix with ``cache_control``.
    """

    messages: list[dict[str, Any]]
    is_leased: bool


def _read_text(block: dict[str, Any], path: tuple[str | int, ...]) -> str:
    text = block.get("text")
    if not isinstance(text, str):
        raise make_mismatch("a string", text, *path, "text")
    return text


def _refuse_block(block: object, path: tuple[str | int, ...], allowed: str) -> Exception:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in _MEDIA_BLOCKS:
        return make_problem(
            f"is a block of the type {kind!r}; this server takes text only", *path, "type"
        )
    return make_problem(
        f"must be a block of the type {allowed}, not {describe_value(block)}", *path
    )


class _ConversationReader:
    """Translates the messages of one request."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.is_leased = False
        # Names of the called functions by the ids of the calls. Some templates show them.
        self._called: dict[str, str] = {}

    def read_blocks(self, content: object, path: tuple[str | int, ...]) -> list[dict[str, Any]]:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise make_mismatch("a string or a list of blocks", content, *path)
        for number, block in enumerate(content):
            if not isinstance(block, dict):
                raise make_mismatch("an object", block, *path, number)
            self.is_leased = self.is_leased or block.get("cache_control") is not None
        return content

    def read_plain(self, content: object, path: tuple[str | int, ...]) -> str:
        """Read content that may have only text, such as the system prompt."""
        texts = []
        for number, block in enumerate(self.read_blocks(content, path)):
            if block.get("type") != "text":
                raise _refuse_block(block, (*path, number), "'text'")
            texts.append(_read_text(block, (*path, number)))
        return "\n".join(texts)

    def read_message(self, message: object, number: int) -> None:
        if not isinstance(message, dict):
            raise make_mismatch("an object", message, number)
        role = message.get("role")
        path: tuple[str | int, ...] = (number, "content")
        if role == "system":
            text = self.read_plain(message.get("content"), path)
            self.messages.append({"role": "system", "content": text})
            return
        if role not in ("user", "assistant"):
            raise make_mismatch("'user' or 'assistant'", role, number, "role")
        blocks = self.read_blocks(message.get("content"), path)
        if role == "user":
            self._read_user(blocks, path)
        else:
            self._read_assistant(blocks, path)

    def _read_user(self, blocks: list[dict[str, Any]], path: tuple[str | int, ...]) -> None:
        texts: list[str] = []
        for number, block in enumerate(blocks):
            where = (*path, number)
            match block.get("type"):
                case "text":
                    texts.append(_read_text(block, where))
                case "tool_result":
                    self._flush_user(texts)
                    self._read_result(block, where)
                case _:
                    raise _refuse_block(block, where, "'text' or 'tool_result'")
        if texts or not blocks:
            self.messages.append({"role": "user", "content": "\n".join(texts)})

    def _flush_user(self, texts: list[str]) -> None:
        if texts:
            self.messages.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    def _read_result(self, block: dict[str, Any], path: tuple[str | int, ...]) -> None:
        call = block.get("tool_use_id")
        if not isinstance(call, str):
            raise make_mismatch("a string", call, *path, "tool_use_id")
        if not isinstance(block.get("is_error"), bool | None):
            raise make_mismatch("a boolean", block["is_error"], *path, "is_error")
        content = block.get("content")
        text = "" if content is None else self.read_plain(content, (*path, "content"))
        message = {"role": "tool", "tool_call_id": call, "content": text}
        if call in self._called:
            message["name"] = self._called[call]
        self.messages.append(message)

    def _read_assistant(self, blocks: list[dict[str, Any]], path: tuple[str | int, ...]) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for number, block in enumerate(blocks):
            where = (*path, number)
            match block.get("type"):
                case "text":
                    texts.append(_read_text(block, where))
                case "thinking":
                    # We accept any signature, because our own proves nothing to the model.
                    thought = block.get("thinking")
                    if not isinstance(thought, str):
                        raise make_mismatch("a string", thought, *where, "thinking")
                    thoughts.append(thought)
                case "redacted_thinking":
                    pass
                case "tool_use":
                    calls.append(self._read_call(block, where))
                case _:
                    allowed = "'text', 'thinking', 'redacted_thinking' or 'tool_use'"
                    raise _refuse_block(block, where, allowed)
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)

    def _read_call(self, block: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
        call, name, arguments = block.get("id"), block.get("name"), block.get("input")
        if not isinstance(call, str):
            raise make_mismatch("a string", call, *path, "id")
        if not isinstance(name, str) or not name:
            raise make_mismatch("the name of a tool", name, *path, "name")
        if not isinstance(arguments, dict):
            raise make_mismatch("an object", arguments, *path, "input")
        self._called[call] = name
        return {"id": call, "function": {"name": name, "arguments": arguments}}


def _read_conversation(value: object) -> Conversation:
    if not isinstance(value, list) or not value:
        raise make_mismatch("a list of at least one message", value)
    if len(value) > MAX_MESSAGES:
        raise make_problem(f"has {len(value)} messages; at most {MAX_MESSAGES} are allowed")
    reader = _ConversationReader()
    for number, message in enumerate(value):
        reader.read_message(message, number)
    last = reader.messages[-1]
    if last["role"] == "assistant" and "tool_calls" in last:
        raise make_problem(
            "ends with a tool_use block; send the tool_result blocks of its calls after it"
        )
    return Conversation(reader.messages, reader.is_leased)


def _read_system(value: object) -> Conversation:
    reader = _ConversationReader()
    text = reader.read_plain(value, ())
    if text.startswith(_BILLING):
        text = text.partition("\n")[2].lstrip("\n")
    return Conversation([{"role": "system", "content": text}] if text else [], reader.is_leased)


def _read_tools(value: object) -> tuple[list[dict[str, Any]], bool]:
    """Translate tools, and tell whether one of them is marked with ``cache_control``."""
    if not isinstance(value, list):
        raise make_mismatch("a list of tools", value)
    tools, is_leased = [], False
    for number, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise make_mismatch("an object", tool, number)
        kind = tool.get("type")
        if kind not in (None, "custom"):
            raise make_problem(
                f"is {describe_value(kind)}, a tool that Anthropic's servers run or define; "
                "describe a tool of your own with name, description and input_schema",
                number,
                "type",
            )
        if not isinstance(tool.get("input_schema"), dict):
            raise make_mismatch("an object", tool.get("input_schema"), number, "input_schema")
        is_leased = is_leased or tool.get("cache_control") is not None
        function = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool["input_schema"],
            "strict": tool.get("strict"),
        }
        given = {name: item for name, item in function.items() if item is not None}
        tools.append({"type": "function", "function": given})
    return tools, is_leased


def _read_tool_choice(value: dict[str, Any]) -> dict[str, Any]:
    """Translate ``tool_choice`` into the chat's fields."""
    fields: dict[str, Any] = {}
    match value.get("type"):
        case "auto" | "none" as mode:
            fields["tool_choice"] = mode
        case "any":
            fields["tool_choice"] = "required"
        case "tool":
            if not isinstance(value.get("name"), str):
                raise make_mismatch("the name of a tool", value.get("name"), "name")
            fields["tool_choice"] = {"type": "function", "function": {"name": value["name"]}}
        case kind:
            raise make_mismatch("'auto', 'any', 'tool' or 'none'", kind, "type")
    single = value.get("disable_parallel_tool_use")
    if not isinstance(single, bool | None):
        raise make_mismatch("a boolean", single, "disable_parallel_tool_use")
    if single:
        fields["parallel_tool_calls"] = False
    return fields


def _read_thinking(value: dict[str, Any]) -> dict[str, Any]:
    kind = value.get("type")
    if kind not in _THINKING_KINDS:
        raise make_mismatch("'enabled', 'adaptive' or 'disabled'", kind, "type")
    budget = value.get("budget_tokens")
    if not isinstance(budget, int | None) or isinstance(budget, bool):
        raise make_mismatch("an integer", budget, "budget_tokens")
    return {"chat_template_kwargs": {"enable_thinking": kind != "disabled"}}


def _read_output_config(value: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    effort, form = value.get("effort"), value.get("format")
    if effort is not None:
        if effort not in _EFFORTS:
            raise make_mismatch(f"one of {', '.join(_EFFORTS)}", effort, "effort")
        fields["reasoning_effort"] = effort
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise make_mismatch('{"type": "json_schema", "schema": …}', form, "format")
        if not isinstance(form.get("schema"), dict):
            raise make_mismatch("an object", form.get("schema"), "format", "schema")
        described = {"name": "answer", "schema": form["schema"]}
        fields["response_format"] = {"type": "json_schema", "json_schema": described}
    return fields


def _check_edits(value: dict[str, Any]) -> dict[str, Any]:
    edits = value.get("edits")
    if not isinstance(edits, list | None):
        raise make_mismatch("a list of edits", edits, "edits")
    for number, edit in enumerate(edits or ()):
        kind = edit.get("type") if isinstance(edit, dict) else edit
        if not isinstance(kind, str) or not kind.startswith(_EDITS):
            wanted = "'clear_thinking_…' or 'clear_tool_uses_…'"
            raise make_mismatch(wanted, kind, "edits", number, "type")
    return value


def _check_stops(value: list[str]) -> list[str]:
    if len(value) > MAX_STOP_STRINGS:
        raise make_problem(f"has {len(value)} strings; at most {MAX_STOP_STRINGS} are allowed")
    if "" in value:
        raise make_problem("may not contain an empty string")
    if (size := sum(map(len, value))) > MAX_STOP_CHARACTERS:
        raise make_problem(f"must have at most {MAX_STOP_CHARACTERS} characters in all, not {size}")
    return value


_Object = dict[str, Any]


class AnthropicPrompt(RequestModel):
    """Fields that become the prompt."""

    model: Annotated[ModelName, StringConstraints(min_length=1)] = Field(
        description="Name of a served model, see `GET /v1/models`. An unknown name is a 404."
    )
    messages: Annotated[
        Conversation,
        PlainValidator(_read_conversation, json_schema_input_type=list[dict[str, object]]),
    ] = Field(
        description="Turns of `user` and `assistant`. Their content is a text or a list of blocks: "
        "`text`, `tool_result`, and of the assistant `tool_use`, `thinking` and "
        "`redacted_thinking`. If the last turn is the assistant's, the answer continues it."
    )
    system: (
        Annotated[
            Conversation,
            PlainValidator(_read_system, json_schema_input_type=str | list[dict[str, object]]),
        ]
        | None
    ) = Field(None, description="The system prompt, as a text or a list of `text` blocks.")
    tools: (
        Annotated[
            tuple[list[_Object], bool],
            PlainValidator(_read_tools, json_schema_input_type=list[dict[str, object]]),
        ]
        | None
    ) = Field(
        None,
        description="Tools of the client: `name`, `description`, `input_schema` and `strict`. "
        "Tools that Anthropic's servers run are refused.",
    )
    tool_choice: (
        Annotated[
            _Object,
            AfterValidator(_read_tool_choice),
        ]
        | None
    ) = Field(
        None,
        description="`auto`, `any`, `none`, or `tool` with a `name`; "
        "`disable_parallel_tool_use` allows one call at most.",
    )
    thinking: Annotated[_Object, AfterValidator(_read_thinking)] | None = Field(
        None,
        description="`enabled`, `adaptive` or `disabled`: the template's `enable_thinking`. "
        "`budget_tokens` is not enforced.",
    )
    output_config: Annotated[_Object, AfterValidator(_read_output_config)] | None = Field(
        None,
        description="`format` with a JSON schema for the answer, and `effort`, which chat "
        "templates get as `reasoning_effort`.",
    )
    cache_control: _Object | None = Field(
        None, description="Asks for a prefix lease of a minute, as it does in any block."
    )
    context_management: Annotated[_Object, AfterValidator(_check_edits)] | None = Field(
        None,
        description="`edits` that clear thinking or results of tools are without effect, because "
        "the chat template decides which thinking it shows. Other edits are refused.",
    )

    @property
    def is_leased(self) -> bool:
        """Whether ``cache_control`` marks the prompt or a part of it."""
        parts = (self.messages.is_leased, self.system is not None and self.system.is_leased)
        tools = bool(self.tools and self.tools[1])
        return any(parts) or tools or self.cache_control is not None

    def _to_fields(self) -> dict[str, Any]:
        """Return the fields of a chat request that become the prompt."""
        messages = [*(self.system.messages if self.system else ()), *self.messages.messages]
        fields: dict[str, Any] = {"model": self.model, "messages": messages}
        if self.tools is not None:
            fields["tools"] = self.tools[0]
        if messages[-1]["role"] == "assistant":
            fields |= {"continue_final_message": True}
        for part in (self.tool_choice, self.thinking, self.output_config):
            fields |= part or {}
        return fields

    def to_chat(self) -> ChatRequest:
        """Translate the request. Raises InvalidRequestError."""
        return ChatRequest.from_object(self._to_fields())


class CountTokensRequest(AnthropicPrompt):
    """Asks for the number of tokens of a prompt."""

    place = FieldPlace((COUNT_TOKENS,))


class AnthropicRequest(AnthropicPrompt):
    """Asks for the assistant's next turn."""

    place = FieldPlace((MESSAGES,))

    max_tokens: Annotated[Integer, Bounds(1, RANGES["max_tokens"][1])] = Field(
        description="Maximum number of tokens of the answer. The context may end it earlier."
    )
    stream: bool = Field(False, description="Answers with server-sent events.")
    temperature: Annotated[float, Bounds(0.0, 1.0)] | None = Field(
        None, description="0 is greedy, 1 the model's own distribution."
    )
    top_p: float | None = Field(
        None,
        description="Samples from the smallest set of likeliest tokens with at least this mass.",
        json_schema_extra={"exclusiveMinimum": 0.0, "maximum": 1.0},
    )
    top_k: Annotated[Integer, Bounds(0, RANGES["top_k"][1])] | None = Field(
        None, description="Samples from the k likeliest tokens; 0: from all."
    )
    stop_sequences: Annotated[list[str], AfterValidator(_check_stops)] = Field(
        [], description="Texts that end the answer. It does not include them."
    )
    metadata: dict[str, object] | None = Field(
        None, description="Labels for the client's own use, without effect."
    )
    service_tier: Literal["auto", "standard_only"] | None = Field(
        None, description="Without effect, because there is one tier."
    )
    timeout: Annotated[float, Bounds(0.0, MAX_TIMEOUT, above=True)] | None = Field(
        None, description="Seconds until the request fails. An addition of this server."
    )

    def to_chat(self) -> ChatRequest:
        given = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
            "stream": self.stream or None,
            "timeout": self.timeout,
            "prefix_lease": MAX_PREFIX_LEASE if self.is_leased else None,
        }
        fields = {name: value for name, value in given.items() if value is not None}
        return ChatRequest.from_object(self._to_fields() | fields)
