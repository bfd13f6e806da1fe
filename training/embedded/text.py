"""Special tokens, the chat format and its length, without a tokenizer at hand."""

from __future__ import annotations

import re
from typing import NamedTuple

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

# What one token may at most be, as the tokenizer's own pattern has it (tokenizer.py).
# Digits stand alone, and so do letters before a digit: a key or a code always has the same tokens,
# whatever is around it, so recalling it is comparing tokens.
_WORD = re.compile(
    r" ?(?:[A-Z]{2,}(?![A-Za-z0-9])|[A-Z]?[a-z]+|[A-Z](?![A-Za-z0-9]))"
    r"|[0-9]| ?[^\sA-Za-z0-9]|\s|[A-Za-z]"
)
# <|im_start|>, the role, a newline, <|im_end|>, a newline.
TURN_TOKENS = 5


class Message(NamedTuple):
    """``role``: system, user or assistant."""

    role: str
    content: str


def render(messages: list[Message], *, generate: bool = True) -> str:
    """Render messages like the chat template, up to the start of the assistant's answer."""
    text = "".join(f"{TURN_START}{m.role}\n{m.content}{TURN_END}\n" for m in messages)
    return f"{text}{TURN_START}assistant\n" if generate else text


def count_tokens(text: str) -> int:
    """Count the tokens of ASCII ``text``, if the embedded tokenizer knows every word."""
    return len(_WORD.findall(text))


def count_prompt(messages: list[Message]) -> int:
    """Count the tokens of a rendered conversation that waits for an answer."""
    return sum(TURN_TOKENS + count_tokens(m.content) for m in messages) + 3
