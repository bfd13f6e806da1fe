"""Messages of a chat: checked, and rendered as one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, NotRequired, get_args

from pydantic import ConfigDict, Field, PlainValidator, with_config
from typing_extensions import TypedDict

from pd.core.errors import InvalidRequestError
from pd.proxy.fields import mismatch, problem, show

if TYPE_CHECKING:
    from pd.proxy.requests import TemplateFields
    from pd.proxy.tokenizer import TextModel

# Templates are programs, which take some time for each.
MAX_MESSAGES = 16_384
MessageRole = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: tuple[MessageRole, ...] = get_args(MessageRole)


class TextPart(TypedDict):
    """A part of a message."""

    type: Literal["text"]
    text: str


@with_config(ConfigDict(extra="allow"))
class InputMessage(TypedDict):
    """A message as clients write it. Templates also see the fields that are not named here."""

    role: Annotated[MessageRole, Field(description="The author.")]
    content: NotRequired[
        Annotated[
            str | list[TextPart] | None,
            Field(description="A text or parts of it; null only beside an assistant's tool calls."),
        ]
    ]


# A message with its content as one text, and all other fields as they came.
ReadMessage = dict[str, object]


def read_messages(messages: object) -> list[ReadMessage]:
    """Messages with their content as text. Raises the error of the first that is wrong."""
    if not isinstance(messages, list) or not messages:
        raise mismatch("a list of at least one message", messages)
    if len(messages) > MAX_MESSAGES:
        raise problem(f"has {len(messages)} messages; at most {MAX_MESSAGES} are taken")
    return [_read_message(message, number) for number, message in enumerate(messages)]


Messages = Annotated[
    list[ReadMessage], PlainValidator(read_messages, json_schema_input_type=list[InputMessage])
]


def render_prompt(fields: TemplateFields, text: TextModel, messages: list[ReadMessage]) -> str:
    """Messages as one prompt for the tokenizer. Raises InvalidRequestError."""
    template, special = text.template(), text.special
    if not template.knows_developer:
        # OpenAI's newer name; a template that ignored it would drop the instructions.
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    extra = fields.chat_template_kwargs
    hidden: list[str] = []
    if special is not None:
        try:
            messages, extra = special.hide_messages(messages, hidden), special.hide(extra, hidden)
        except RecursionError:
            raise InvalidRequestError(
                "messages or chat_template_kwargs are nested too deeply", param="messages"
            ) from None
    prompt = template.render(
        messages,
        add_generation_prompt=fields.opens_turn,
        continue_final_message=fields.continue_final_message,
        extra=extra,
    )
    return prompt if special is None else special.reveal(prompt, hidden)


def _read_message(message: object, number: int) -> ReadMessage:
    if not isinstance(message, dict):
        raise mismatch("an object", message, number)
    role = message.get("role")
    if role not in ROLES:
        raise mismatch(f"one of {', '.join(ROLES)}", role, number, "role")
    content = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        return message | {"content": ""}
    return message | {"content": _read_content(content, number)}


def _read_content(content: object, number: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise mismatch("a string or a list of text parts", content, number, "content")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise problem(
                f'may contain only parts like {{"type": "text", "text": "…"}}, not {show(part)}',
                number,
                "content",
            )
        texts.append(text)
    return "\n".join(texts)
