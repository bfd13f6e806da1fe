"""Names of a chat's fields in other APIs, for errors about the chat into which we translate."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from pd.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator


class FieldNames(NamedTuple):
    """How an API names the fields of a chat.

    Attributes:
        rules: beginnings of a chat's field, and what to write instead. The first match decides.
    """

    rules: tuple[tuple[re.Pattern[str], str], ...] = ()

    def rename_field(self, field: str) -> str:
        """Return this API's name of a chat's field."""
        for pattern, name in self.rules:
            renamed, count = pattern.subn(name, field)
            if count:
                return renamed
        return field

    def rename_error(self, error: InvalidRequestError) -> InvalidRequestError:
        """Let an error about the chat name the field as in this API."""
        if error.param is not None:
            param = self.rename_field(error.param)
            if error.message.startswith(error.param):
                error.message = param + error.message.removeprefix(error.param)
            error.param = param
        return error

    @contextmanager
    def rename_errors(self) -> Iterator[None]:
        """Rename the field of an InvalidRequestError that the block raises."""
        try:
            yield
        except InvalidRequestError as error:
            raise self.rename_error(error) from None


def _make_names(rules: dict[str, str]) -> FieldNames:
    return FieldNames(
        tuple((re.compile(rf"^{field}(?!\w)"), name) for field, name in rules.items())
    )


# Translation may merge and split messages, so these APIs name the list instead of a message.
_MESSAGE = r"messages(\[\d+\][\w.\[\]]*)?"
_LENGTH = "max_(completion_)?tokens"
_SCHEMA = r"response_format(\.json_schema)?\.schema"
_FORMAT = r"response_format(\.json_schema)?"

CHAT_NAMES = FieldNames()
RESPONSES_NAMES = _make_names(
    {
        r"(tools\[\d+\])\.function": r"\1",
        _FORMAT: "text.format",
        r"tool_choice\.function": "tool_choice",
        _MESSAGE: "input",
        _LENGTH: "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
    }
)
ANTHROPIC_NAMES = _make_names(
    {
        r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
        r"(tools\[\d+\])\.function": r"\1",
        _SCHEMA: "output_config.format.schema",
        _FORMAT: "output_config.format",
        r"tool_choice\.function": "tool_choice",
        _MESSAGE: "messages",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "reasoning_effort": "output_config.effort",
        "chat_template_kwargs": "thinking",
        "stop": "stop_sequences",
    }
)
_OLLAMA_RULES = {
    _SCHEMA: "format",
    _FORMAT: "format",
    _LENGTH: "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "(temperature|top_k|top_p|min_p|(presence|frequency)_penalty|seed|stop)": r"options.\1",
    "(reasoning_effort|chat_template_kwargs)": "think",
}
OLLAMA_CHAT_NAMES = _make_names(
    {r"(messages\[\d+\])\.reasoning_content": r"\1.thinking"} | _OLLAMA_RULES
)
OLLAMA_GENERATE_NAMES = _make_names({_MESSAGE: "prompt"} | _OLLAMA_RULES)
