"""API speculation: one call answers several generations of a program.

A function with ``num_api_spec_tokens=N`` expects the model to follow the program's form by itself.
So a generation asks for N more tokens and does not stop at its stop string. If the program's next
texts and generations agree with the answer, they need no calls of their own. The result is the same
as without speculation. If we cannot be sure of this, we call again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pd.core.errors import ProgramError
from pd.lang.backend import ModelAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from pd.lang.ir import GenSettings

    Ask = Callable[[GenSettings], ModelAnswer]

# How often we ask for a chat's turn until it has the program's form.
_MAX_ATTEMPTS = 3
# A generation with one of these needs a call of its own, because the text alone does not show
# where it would have ended.
_EXACT_SETTINGS = (
    "min_new_tokens",
    "stop_token_ids",
    "stop_regex",
    "return_logprob",
    "dtype",
    "regex",
    "json_schema",
)


class TextSpeculation:
    """Speculates on a model of completions. The state's executor owns it."""

    def __init__(self, extra_tokens: int) -> None:
        """``extra_tokens``: tokens to ask for in addition to a generation's own."""
        self._extra_tokens = extra_tokens
        self._forget()

    def _forget(self) -> None:
        self._text = ""
        # Whether the model ended the text by itself.
        self._is_whole = False

    def match_text(self, text: str) -> None:
        """Drop the rest of the answer if the program says something else."""
        if self._text.startswith(text):
            self._text = self._text[len(text) :]
        else:
            self._forget()

    def generate(self, settings: GenSettings, ask: Ask) -> ModelAnswer:
        """Answer a generation from an earlier answer, or by ``ask``."""
        limit = settings.max_new_tokens
        is_plain = settings.n in (None, 1) and not settings.ignore_eos
        if limit is None or not is_plain or any(getattr(settings, n) for n in _EXACT_SETTINGS):
            self._forget()
            return ask(settings)
        taken = self._take(settings.stops, limit)
        if taken is not None:
            return ModelAnswer((taken,), {})
        self._forget()
        if not settings.stops:
            return ask(settings)
        longer = replace(settings, max_new_tokens=limit + self._extra_tokens, stop=None)
        answer = ask(longer)
        self._text, self._is_whole = answer.texts[0], answer.is_whole
        taken = self._take(settings.stops, limit)
        if taken is not None:
            return ModelAnswer((taken,), answer.meta)
        self._forget()
        return ask(settings)

    def _take(self, stops: Sequence[str], limit: int) -> str | None:
        """Take the answer of a generation from the front, or return None if it may be another.

        A token has a byte at least, so an answer of at most ``limit`` bytes is within the limit.
        """
        end = find_stop(self._text, stops)
        if end is None:
            if not self._is_whole:
                return None
            end = len(self._text)
        taken = self._text[:end]
        if len(taken.encode()) > limit:
            return None
        self._text = self._text[end:]
        return taken


@dataclass
class _GenInTurn:
    """A generation in a turn, to be filled from the model's answer."""

    name: str | None
    settings: GenSettings


class TurnSpeculation:
    """Speculates on a model of chats, because it only answers whole turns.

    We collect the operations of an assistant's turn, and one call at its end answers all of them.
    """

    def __init__(self, max_tokens: int) -> None:
        """``max_tokens``: limit for the whole turn."""
        self._max_tokens = max_tokens
        self._parts: list[str | _GenInTurn] = []

    def add_text(self, text: str) -> None:
        self._parts.append(text)

    def add_gen(self, name: str | None, settings: GenSettings) -> None:
        self._parts.append(_GenInTurn(name, settings))

    def answer_turn(self, ask: Ask) -> tuple[str, list[tuple[str | None, str, Any]]]:
        """Ask for the turn. Return its text, and name, value and facts of each generation.

        Raises ProgramError if no answer has the form of the turn.
        """
        parts, self._parts = self._parts, []
        blanks = [part for part in parts if isinstance(part, _GenInTurn)]
        if not blanks:
            return "".join(map(str, parts)), []
        settings = replace(blanks[0].settings, max_new_tokens=self._max_tokens, stop=None)
        for _ in range(_MAX_ATTEMPTS):
            answer = ask(settings)
            values = _match_parts(parts, answer.texts[0])
            if values is not None:
                pieces = iter(values)
                text = "".join(part if isinstance(part, str) else next(pieces) for part in parts)
                names = [blank.name for blank in blanks]
                return text, [
                    (name, value, answer.meta) for name, value in zip(names, values, strict=True)
                ]
        raise ProgramError(
            f"the model did not answer in the form of the program in {_MAX_ATTEMPTS} attempts; "
            f"its last answer: {answer.texts[0]!r}"
        )


def _match_parts(parts: Sequence[str | _GenInTurn], text: str) -> list[str] | None:
    """Return the text of each blank, or None if the answer has another form."""
    values = []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            if not text.startswith(part):
                return None
            text = text[len(part) :]
            continue
        following = parts[number + 1] if number + 1 < len(parts) else None
        stops = part.settings.stops or ((following,) if isinstance(following, str) else ())
        end = find_stop(text, stops)
        if end is None:
            if following is not None:
                return None
            end = len(text)
        values.append(text[:end])
        text = text[end:]
    return values


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return where the first stop string begins, if there is any."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
