"""The text of a state, and the messages of its chat."""

from __future__ import annotations

import copy
import functools
import secrets

from pd.core.errors import InvalidRequestError, ProgramError
from pd.lang.backend import ProgramPrompt
from pd.proxy.text.chat_template import ChatTemplate

# For models without a chat template.
_PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@functools.cache
def make_plain_template() -> ChatTemplate:
    """Make the template for models without any: a line for each turn."""
    return ChatTemplate(_PLAIN, {})


class Transcript:
    """The text of a state. Only the thread that performs the state's operations changes it.

    Turns look as in the model's chat template, which is only defined for whole chats. So we render
    the chat again when a turn opens, and append the new part. Some templates show a turn
    differently once another one follows, for example without its reasoning. Then we replace the
    text, unless the program has put text of its own between the turns.

    Attributes:
        text: the whole text.
        messages: the closed turns.
        role: whose turn is open, if any.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.text = ""
        self.messages: list[dict[str, str]] = []
        self.role: str | None = None
        self._turn_start = 0
        # The text of the turns alone, without the program's own between them.
        self._rendered = ""
        self._begins_rendered = False

    def copy(self) -> Transcript:
        """Return an independent copy."""
        copied = copy.copy(self)
        copied.messages = list(self.messages)
        return copied

    @property
    def turn(self) -> str:
        """The text of the open turn so far."""
        return self.text[self._turn_start :]

    def make_prompt(self) -> ProgramPrompt:
        return ProgramPrompt(
            self.text,
            tuple(self.messages),
            is_rendered=self._begins_rendered,
            is_assistant_turn=self.role == "assistant" and not self.turn,
        )

    def append(self, text: str) -> None:
        self.text += text
        if self.role is not None:
            self._rendered += text

    def open_turn(self, role: str) -> bool:
        """Open a turn. Return whether earlier text was replaced.

        Raises ProgramError if a turn is open already, and InvalidRequestError if the template
        refuses the chat.
        """
        if self.role is not None:
            raise ProgramError(f"cannot open a turn of {role}: close that of {self.role} first")
        rendered = self._render_open(role)
        replaces = not rendered.startswith(self._rendered)
        if replaces:
            if self.text != self._rendered:
                raise ProgramError(
                    "the model's chat template changes earlier turns when another one follows, so "
                    "a program cannot say anything outside turns: put all text into turns"
                )
            self.text = self._rendered = ""
        if not self.text:
            self._begins_rendered = True
        self.text += rendered[len(self._rendered) :]
        self._rendered = rendered
        self.role = role
        self._turn_start = len(self.text)
        return replaces

    def close_turn(self, role: str) -> None:
        """Close the turn of a role. Raises ProgramError if it is not open."""
        if self.role != role:
            open_now = "no turn is" if self.role is None else f"that of {self.role} is"
            raise ProgramError(f"cannot close a turn of {role}: {open_now} open")
        message = {"role": role, "content": self.turn}
        _, suffix = self._render_around(role)
        self.text += suffix
        self._rendered += suffix
        self.messages.append(message)
        self.role = None

    def _render_open(self, role: str) -> str:
        """Render the chat up to the content of a new turn."""
        if role == "assistant" and self.messages:
            return self._template.render(self.messages)
        return self._render_around(role)[0]

    def _render_around(self, role: str) -> tuple[str, str]:
        """Render the chat with a new turn. Return the text before its content and after it.

        Some templates show the system's turn only as part of the next one. Until then we show its
        content alone.
        """
        mark = secrets.token_hex(16)
        messages = [*self.messages, {"role": role, "content": mark}]
        try:
            rendered = self._template.render(messages, add_generation_prompt=False)
        except InvalidRequestError:
            if role != "system":
                raise
            rendered = ""
        before, found, after = rendered.rpartition(mark)
        if not found and role == "system":
            return self._rendered, ""
        if not found:
            raise ProgramError(f"the model's chat template does not show turns of {role}")
        return before, after
