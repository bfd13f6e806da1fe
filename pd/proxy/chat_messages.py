"""Messages of a chat: checked, and rendered as one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, NotRequired

import msgspec
from pydantic import ConfigDict, Field, PlainValidator, with_config
from typing_extensions import TypedDict

from pd.core.errors import InvalidRequestError
from pd.proxy.fields import mismatch, problem, show

if TYPE_CHECKING:
    from pd.proxy.requests.chat import TemplateFields
    from pd.proxy.tokenizer import TextModel

# Templates are programs, which take some time for each.
MAX_MESSAGES = 16_384
MAX_CALLS = 128
# Arguments are parsed, of all messages together. What counts the values of a body sees texts.
MAX_ARGUMENT_CHARACTERS = 1 << 20
# Characters of the end of a prompt that show whether it opens the model's reasoning.
_TAIL = 128
# Templates may know more roles than OpenAI's.
MAX_ROLE_CHARACTERS = 64


# The field that holds the text of a part, by the part's type.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# The same for parts with reasoning of the assistant, whose type and field have one name.
_REASONING_PARTS = ("thinking", "reasoning")
# Reasoning that nobody but its author can read.
_DROPPED_PARTS = ("redacted_thinking",)


class TextPart(TypedDict):
    """A part of a message. One whose text is null is left out."""

    type: Literal["text", "input_text", "output_text"]
    text: str | None


class RefusalPart(TypedDict):
    """A refusal of the assistant, which counts as text."""

    type: Literal["refusal"]
    refusal: str | None


class ThinkingPart(TypedDict):
    """Reasoning of the assistant, which becomes the message's `reasoning_content`."""

    type: Literal["thinking"]
    thinking: str | None


class ReasoningPart(TypedDict):
    """The same as `thinking`, under another name."""

    type: Literal["reasoning"]
    reasoning: str | None


class RedactedPart(TypedDict):
    """Encrypted reasoning of the assistant, which is left out."""

    type: Literal["redacted_thinking"]


_Part = TextPart | RefusalPart | ThinkingPart | ReasoningPart | RedactedPart


class CalledFunction(TypedDict):
    """Function that was called, and its arguments."""

    name: str
    arguments: NotRequired[
        Annotated[
            str | dict[str, object] | None,
            Field(description="JSON of an object; a text that is none counts as `{}`."),
        ]
    ]


class InputCall(TypedDict):
    """A call that the assistant made."""

    id: NotRequired[str | None]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


@with_config(ConfigDict(extra="allow"))
class InputMessage(TypedDict):
    """A message as clients write it. Templates also see the fields that are not named here."""

    role: Annotated[
        str,
        Field(
            description="The author: `system`, `developer`, `user`, `assistant`, `tool`, or what "
            "else the chat template knows."
        ),
    ]
    content: NotRequired[
        Annotated[
            str | list[_Part | str] | None,
            Field(
                description="A text or parts of it; null is the empty text. Parts with reasoning "
                "are only for the assistant's messages."
            ),
        ]
    ]
    tool_calls: NotRequired[
        Annotated[list[InputCall] | None, Field(description="What the assistant called.")]
    ]
    tool_call_id: NotRequired[
        Annotated[str | None, Field(description="The call that a tool's message answers.")]
    ]
    reasoning_content: NotRequired[
        Annotated[str | None, Field(description="The assistant's reasoning; also `reasoning`.")]
    ]


# A message with its content as one text, and all other fields as they came.
ReadMessage = dict[str, object]


def read_messages(messages: object) -> list[ReadMessage]:
    """Messages with their content as text. Raises the error of the first that is wrong."""
    if not isinstance(messages, list) or not messages:
        raise mismatch("a list of at least one message", messages)
    if len(messages) > MAX_MESSAGES:
        raise problem(f"has {len(messages)} messages; at most {MAX_MESSAGES} are taken")
    size = sum(map(_argument_characters, messages))
    if size > MAX_ARGUMENT_CHARACTERS:
        raise problem(
            f"has calls with {size} characters of arguments; at most {MAX_ARGUMENT_CHARACTERS} are "
            "taken"
        )
    return [_read_message(message, number) for number, message in enumerate(messages)]


Messages = Annotated[
    list[ReadMessage], PlainValidator(read_messages, json_schema_input_type=list[InputMessage])
]


class RenderedChat(NamedTuple):
    """A chat as a text for the tokenizer.

    Attributes:
        tail: its end, in which special tokens have their own names.
    """

    text: str
    tail: str


def render_prompt(
    fields: TemplateFields, text: TextModel, messages: list[ReadMessage]
) -> RenderedChat:
    """Messages as one prompt. Raises InvalidRequestError."""
    shown = fields.tools.shown if fields.tools else None
    template, special = text.template(with_tools=shown is not None), text.special
    if shown is not None and not text.shows_tools(template):
        raise InvalidRequestError(
            "tools: the model's chat template does not show tools to the model; start the proxy "
            "with --tool-call-parser NAME if they are to be called all the same",
            param="tools",
        )
    if not template.knows_developer:
        # OpenAI's newer name; a template that ignored it would drop the instructions.
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    extra = fields.template_variables
    hidden: list[str] = []
    if special is not None:
        try:
            messages, extra = special.hide_messages(messages, hidden), special.hide(extra, hidden)
            shown = special.hide(shown, hidden)
        except RecursionError:
            raise InvalidRequestError(
                "messages, tools or chat_template_kwargs are nested too deeply", param="messages"
            ) from None
    prompt = template.render(
        messages,
        add_generation_prompt=fields.opens_turn,
        continue_final_message=fields.continue_final_message,
        tools=shown,
        extra=extra,
    )
    tail = prompt[-_TAIL:]
    return RenderedChat(prompt if special is None else special.reveal(prompt, hidden), tail)


def _read_message(message: object, number: int) -> ReadMessage:
    if not isinstance(message, dict):
        raise mismatch("an object", message, number)
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= MAX_ROLE_CHARACTERS:
        raise mismatch(f"a string of 1 to {MAX_ROLE_CHARACTERS} characters", role, number, "role")
    content = message.get("content")
    if role == "tool":
        _check_text(message, "tool_call_id", number)
    if role != "assistant":
        return message | {"content": _read_content(content, number, None)}
    thoughts: list[str] = []
    text = _read_content(content, number, thoughts)
    reasoning = _read_reasoning(message, number)
    if thoughts and not reasoning:
        reasoning = {"reasoning_content": "\n".join(thoughts)}
    message = message | reasoning
    calls = _read_calls(message.get("tool_calls"), number)
    if calls:
        message = message | {"tool_calls": calls}
    else:
        message.pop("tool_calls", None)
    return message | {"content": text}


def _read_reasoning(message: dict[str, object], number: int) -> dict[str, object]:
    """The assistant's reasoning under the name that templates know."""
    for name in ("reasoning_content", "reasoning"):
        _check_text(message, name, number)
        if message.get(name):
            return {"reasoning_content": message[name]}
    return {}


def _check_text(message: dict[str, object], name: str, number: int) -> None:
    if not isinstance(message.get(name), str | None):
        raise mismatch("a string", message[name], number, name)


def _read_calls(calls: object, number: int) -> list[dict[str, object]]:
    """Calls with their arguments as objects, which templates loop over."""
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise mismatch("a list of calls", calls, number, "tool_calls")
    if len(calls) > MAX_CALLS:
        raise problem(
            f"has {len(calls)} calls; at most {MAX_CALLS} are taken", number, "tool_calls"
        )
    return [_read_call(call, (number, "tool_calls", i)) for i, call in enumerate(calls)]


def _argument_characters(message: object) -> int:
    """Characters of arguments that will be parsed, whatever else is wrong with a message."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    calls = calls if isinstance(calls, list) else []
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    given = [each.get("arguments") for each in functions if isinstance(each, dict)]
    return sum(len(text) for text in given if isinstance(text, str))


def _read_call(call: object, path: tuple[str | int, ...]) -> dict[str, object]:
    if not isinstance(call, dict):
        raise mismatch("an object", call, *path)
    if not isinstance(call.get("id"), str | None):
        raise mismatch("a string", call["id"], *path, "id")
    if call.get("type", "function") != "function":
        raise mismatch("'function'", call["type"], *path, "type")
    function = call.get("function")
    if not isinstance(function, dict):
        raise mismatch("an object", function, *path, "function")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise mismatch("the name of a function", function.get("name"), *path, "function", "name")
    given = function.get("arguments")
    if not isinstance(given, str | dict | None):
        raise mismatch("an object or a text", given, *path, "function", "arguments")
    arguments = given if isinstance(given, dict) else _parsed_arguments(given or "")
    return call | {"type": "function", "function": function | {"arguments": arguments}}


def _parsed_arguments(text: str) -> dict[str, object]:
    """Arguments as the model wrote them. Those that are no JSON of an object are empty: a client
    can only send back what it got, such as the call of an answer that was cut off."""
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _read_content(content: object, number: int, thoughts: list[str] | None) -> str:
    """A message's content as one text.

    Args:
        thoughts: takes the texts of parts with reasoning; None where there may be none.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise mismatch("a string or a list of text parts", content, number, "content")
    texts: list[str] = []
    for part in content:
        kind = str(part.get("type")) if isinstance(part, dict) else ""
        if isinstance(part, str):
            texts.append(part)
        elif kind in _TEXT_PARTS:
            _add_part(part, _TEXT_PARTS[kind], texts, number)
        elif kind in _REASONING_PARTS and thoughts is not None:
            _add_part(part, kind, thoughts, number)
        elif kind not in _DROPPED_PARTS or thoughts is None:
            raise _unknown_part(part, number)
    return "\n".join(texts)


def _add_part(part: dict[str, object], field: str, texts: list[str], number: int) -> None:
    """Add the text of a part, unless it is null."""
    text = part.get(field, ...)
    if isinstance(text, str):
        texts.append(text)
    elif text is not None:
        raise _unknown_part(part, number)


def _unknown_part(part: object, number: int) -> Exception:
    return problem(
        f'may contain only parts like {{"type": "text", "text": "…"}}, not {show(part)}',
        number,
        "content",
    )
