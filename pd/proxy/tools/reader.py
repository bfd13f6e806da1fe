"""Base of the parsers of all families."""

from __future__ import annotations

import re
import secrets
import string
from typing import TYPE_CHECKING, NamedTuple

from pd.proxy.tools.events import Arguments, CallStart, Content
from pd.proxy.tools.incoming import Incoming, MalformedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.proxy.tools.definitions import ParameterKind
    from pd.proxy.tools.events import Event
    from pd.proxy.tools.incoming import Steps

# Names of functions as models write them, also those that do not exist.
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_LETTERS = string.ascii_letters + string.digits


class CallOptions(NamedTuple):
    """Facts about a request that a parser needs.

    Attributes:
        kinds: the functions, each with its parameters and how these are written.
        most_calls: further calls are left out; None for no limit.
    """

    kinds: dict[str, dict[str, ParameterKind]]
    most_calls: int | None = None


def long_id() -> str:
    """A new id of a call, in OpenAI's shape."""
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """A new id of a call that templates of Mistral accept: nine letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class Reader:
    """An :class:`pd.proxy.tools.events.OutputParser` whose ``read`` is a generator."""

    def __init__(self) -> None:
        self.source = Incoming()
        self.events: list[Event] = []
        self._steps = self.run()

    def read(self) -> Steps[None]:
        """Read the whole text."""
        raise NotImplementedError

    def run(self) -> Steps[None]:
        """Return the generator that :meth:`push` and :meth:`close` drive."""
        return self.read()

    def push(self, text: str) -> list[Event]:
        self.source.add(text)
        return self._advance()

    def close(self) -> list[Event]:
        self.source.ended = True
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        events, self.events = self.events, []
        return events


class CallParser(Reader):
    """Base of the parsers of calls. White space behind a call is left out.

    MalformedError may leave ``read``; then it is called again for the rest of the text, of which
    nothing that was held back is a part.
    """

    new_id: Callable[[], str] = staticmethod(long_id)

    def __init__(self, options: CallOptions) -> None:
        super().__init__()
        self.options = options
        self._calls = 0
        self._behind_call = False

    # ---- what subclasses report

    def text(self, text: str) -> None:
        if self._behind_call:
            text = text.lstrip()
        if text:
            self._behind_call = False
            self.emit(Content(text))

    def begin_call(self, name: str) -> None:
        """A call begins, so what was held back is a part of it. Raises MalformedError for what
        is no name."""
        if not _NAME.fullmatch(name):
            raise MalformedError
        self.source.release()
        self._calls += 1
        if self._wanted():
            self.emit(CallStart(self.new_id(), name))

    def arguments(self, text: str) -> None:
        if text and self._wanted():
            self.emit(Arguments(text))

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def end_call(self) -> None:
        self.source.release()
        self._behind_call = True

    def _wanted(self) -> bool:
        most = self.options.most_calls
        return most is None or self._calls <= most

    def run(self) -> Steps[None]:
        while True:
            try:
                yield from self.read()
            except MalformedError:
                self.text(self.source.release())
            if self.source.is_over:
                return
