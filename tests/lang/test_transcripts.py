"""Turns in the text of a state look as the model's chat template shows them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pd.core.errors import ProgramError
from pd.lang.transcript import Transcript, make_plain_template
from pd.proxy.text.chat_template import ChatTemplate

# Shows the system's message within the first turn of the user.
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = none %}{% endif %}"
    "{% for message in messages %}{% if message.role == 'user' %}<s>[INST] "
    "{% if loop.first and system is not none %}<<SYS>>{{ system }}<</SYS>> {% endif %}"
    "{{ message.content | trim }} [/INST]{% else %} {{ message.content | trim }} </s>{% endif %}"
    "{% endfor %}"
)
# Drops the reasoning of earlier turns, and has a system message of its own.
QWEN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content if loop.last else message.content.split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
TURNS = [
    ("system", "Be brief."),
    ("user", "One?"),
    ("assistant", "I think.</think>First."),
    ("user", "Two?"),
]


@pytest.mark.parametrize("source", [LLAMA2, QWEN])
@pytest.mark.parametrize("begin", [0, 1])
def test_a_turn_of_the_assistant_opens_as_the_template_opens_it(source: str, begin: int) -> None:
    template = ChatTemplate(source, {})
    transcript = Transcript(template)
    for role, content in TURNS[begin:]:
        transcript.open_turn(role)
        transcript.append(content)
        transcript.close_turn(role)
    transcript.open_turn("assistant")
    messages = [{"role": role, "content": content} for role, content in TURNS[begin:]]
    assert transcript.messages == messages
    assert transcript.text == template.render(messages)
    prompt = transcript.make_prompt()
    assert prompt.is_rendered
    assert prompt.is_assistant_turn


def test_text_outside_turns_stays_where_it_is() -> None:
    transcript = Transcript(make_plain_template())
    transcript.append("Before.\n")
    transcript.open_turn("user")
    transcript.append("Hello")
    transcript.close_turn("user")
    transcript.append("Between.\n")
    transcript.open_turn("assistant")
    assert transcript.text == "Before.\nuser: Hello\nBetween.\nassistant: "
    assert not transcript.make_prompt().is_rendered


def test_text_outside_turns_is_refused_if_the_template_changes_turns() -> None:
    transcript = Transcript(ChatTemplate(QWEN, {}))
    for role, content in TURNS[1:3]:
        transcript.open_turn(role)
        transcript.append(content)
        transcript.close_turn(role)
    transcript.append("outside")
    with pytest.raises(ProgramError, match="put all text into turns"):
        transcript.open_turn("user")


def test_turns_do_not_nest() -> None:
    transcript = Transcript(make_plain_template())
    with pytest.raises(ProgramError, match="no turn is open"):
        transcript.close_turn("user")
    transcript.open_turn("user")
    with pytest.raises(ProgramError, match="close that of user first"):
        transcript.open_turn("assistant")
    with pytest.raises(ProgramError, match="that of user is open"):
        transcript.close_turn("assistant")


def test_copies_are_independent() -> None:
    transcript = Transcript(make_plain_template())
    transcript.open_turn("user")
    copied = transcript.copy()
    copied.append("more")
    copied.close_turn("user")
    assert (transcript.turn, transcript.messages) == ("", [])


def test_the_language_imports_neither_torch_nor_openai() -> None:
    program = (
        "import pd.lang, sys; print([m for m in ('torch', 'openai', 'zmq') if m in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, text=True).strip() == "[]"
