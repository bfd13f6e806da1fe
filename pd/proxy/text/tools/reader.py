"""Base of the parsers of all families."""

from __future__ import annotations

import re
import secrets
import string
from typing import TYPE_CHECKING, NamedTuple

from pd.proxy.text.tools.events import Arguments, CallStart, Content
from pd.proxy.text.tools.incoming import Incoming, MalformedError

if TYPE_CHECKING:
    from pd.proxy.text.tools.events import Event
    from pd.proxy.text.tools.functions import ParameterKind
    from pd.proxy.text.tools.incoming import Steps

# Names of functions, even of unknown ones.
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_LETTERS = string.ascii_letters + string.digits


class CallOptions(NamedTuple):
    """Facts about a request that a parser needs.

    Attributes:
        kinds: for each function, how its parameters are written.
        max_calls: further calls are dropped; None for no limit.
    """

    kinds: dict[str, dict[str, ParameterKind]]
    max_calls: int | None = None


def make_short_id() -> str:
    """Make the id of a call that Mistral's templates accept: nine letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class Reader:
    """An :class:`pd.proxy.text.tools.events.OutputParser` whose ``read_text`` is a generator."""

    def __init__(self) -> None:
        self.call_is_open = False
        self.source = Incoming()
        self.events: list[Event] = []
        self._steps = self.run()

    def read_text(self) -> Steps[None]:
        """Read the whole text."""
        raise NotImplementedError

    def run(self) -> Steps[None]:
        """Return the generator that :meth:`add_text` and :meth:`close` drive."""
        return self.read_text()

    def add_text(self, text: str) -> list[Event]:
        self.source.add_piece(text)
        return self._advance()

    def close(self) -> list[Event]:
        self.source.ended = True
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        events, self.events = self.events, []
        return events


class CallParser(Reader):
    """Base of the parsers of calls. White space after a call is dropped.

    ``read_text`` may raise MalformedError. We emit the held text then, and call it again for the
    rest.
    """

    def __init__(self, options: CallOptions) -> None:
        super().__init__()
        self.options = options
        self._calls = 0
        self._is_after_call = False

    def make_id(self) -> str:
        """Make the id of a call."""
        return f"call_{secrets.token_hex(12)}"

    # ---- Called by subclasses.

    def emit_text(self, text: str) -> None:
        if self._is_after_call:
            text = text.lstrip()
        if text:
            self._is_after_call = False
            self.emit_event(Content(text))

    def begin_call(self, name: str) -> None:
        """Begin a call, so the held text is a part of it.

        Raises MalformedError for anything but a name.
        """
        if not _NAME.fullmatch(name):
            raise MalformedError
        self.source.take_held()
        self._calls += 1
        if self._is_wanted():
            self.call_is_open = True
            self.emit_event(CallStart(self.make_id(), name))

    def emit_arguments(self, text: str) -> None:
        if text and self._is_wanted():
            self.emit_event(Arguments(text))

    def emit_event(self, event: Event) -> None:
        self.events.append(event)

    def end_arguments(self) -> None:
        """Note that the arguments are complete, even if the call is not."""
        self.call_is_open = False

    def end_call(self) -> None:
        self.end_arguments()
        self.leave_call()

    def leave_call(self) -> None:
        """Leave a call whose arguments may be incomplete."""
        self.source.take_held()
        self._is_after_call = True

    def _is_wanted(self) -> bool:
        limit = self.options.max_calls
        return limit is None or self._calls <= limit

    def run(self) -> Steps[None]:
        while True:
            try:
                yield from self.read_text()
            except MalformedError:
                self.emit_text(self.source.take_held())
            if self.source.is_over:
                return
