"""Reads an answer: its tokens with their times, the server's counts, or the reason of a failure.

We count the tokens of an event by their ids if the server sends ids. Otherwise we use the counts in
each event (``continuous_usage_stats``, ``meta_info``), and without these an event with text is one
token. If the last event's usage has another number, that number counts for the answer, and the
number of tokens in each event is unknown.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pd.bench.load.endpoints import NativeGenerate
from pd.bench.load.stream import parse_events, parse_http

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.bench.load.endpoints import Endpoint, Event
    from pd.bench.load.reception import Piece
    from pd.bench.load.stream import HTTPAnswer

# Error kinds of an answer without its end.
UNFINISHED = ("cut", "no answer", "empty")
_DONE = b"[DONE]"
_SHOWN_CHARACTERS = 300


@dataclass
class Answer:
    """One answer; its times are those of the pieces.

    Attributes:
        times: when each event with tokens had arrived.
        counts: tokens of each of these events; None if only their sum is known.
        characters: length of the text of each of these events.
        num_tokens: tokens of the answer.
        counted_by: "token_ids", "usage" (the server's counts) or "events".
        prompt_tokens, cached_tokens: the server's counts; None if it does not say.
        end: when the last byte had arrived; None without any.
        error_kind: kind of the failure, such as "cut" or "http 429"; None if all is well.
        done: whether the stream ended as its API demands.
    """

    http_status: int = 0
    times: list[float] = field(default_factory=list)
    counts: list[int] | None = field(default_factory=list)
    characters: list[int] = field(default_factory=list)
    num_tokens: int = 0
    counted_by: str = "events"
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    stages: dict[str, float] | None = None
    text: str = ""
    ids: list[int] | None = None
    end: float | None = None
    error_kind: str | None = None
    error: str | None = None
    done: bool = False

    def set_error(self, kind: str, error: str) -> None:
        """Note why the answer is missing or incomplete. The first reason counts."""
        if self.error_kind is None:
            self.error_kind, self.error = kind, error[:_SHOWN_CHARACTERS]


def read_answer(pieces: Sequence[Piece], endpoint: Endpoint) -> Answer:
    """Read the received pieces. Never raises, whatever the server sent."""
    http = parse_http(pieces)
    answer = Answer(http.status, end=pieces[-1][0] if pieces else None)
    if http.status != 200 or http.content_type not in ("text/event-stream", ""):
        _note_failure(answer, http, pieces)
        return answer
    reader = _Reader(answer, endpoint)
    for at, data in parse_events(http.body):
        if data == _DONE:
            answer.done = True
        elif not reader.add_event(at, data):
            break
    reader.settle_counts()
    if not answer.done:
        answer.set_error("cut", "the connection ended in the middle of the stream")
    if not answer.num_tokens:
        answer.set_error("empty", "the stream had no token")
    return answer


def _note_failure(answer: Answer, http: HTTPAnswer, pieces: Sequence[Piece]) -> None:
    """Note why an answer is not a stream of events."""
    content = http.content.decode(errors="replace").strip()
    if http.status == 200:
        answer.set_error("not a stream", f"{http.content_type}: {content}")
    elif http.status:
        answer.set_error(f"http {http.status}", f"HTTP status {http.status}: {content}")
    elif pieces:
        began = pieces[0][1][:60].decode(errors="replace")
        answer.set_error("not http", f"not an answer of HTTP/1.1: {began!r}")
    else:
        answer.set_error("no answer", "the connection ended without an answer")


class _Reader:
    """Adds events to an answer."""

    def __init__(self, answer: Answer, endpoint: Endpoint) -> None:
        self._answer, self._endpoint = answer, endpoint
        # Events of this API may repeat the text of earlier ones.
        self._may_repeat = isinstance(endpoint, NativeGenerate)
        self._texts: list[str] = []
        self._text_size = 0
        self._ids: list[int] = []
        self._total = 0
        self._last_text = ""
        self._counts: list[int] = []

    def add_event(self, at: float, data: bytes) -> bool:
        """Add an event; return whether the stream goes on."""
        try:
            event = self._endpoint.read_event(json.loads(data))
            if event.error is None:
                if self._may_repeat:
                    self._drop_repeated(event)
                if event.text:
                    self._texts.append(event.text)
                    self._text_size += len(event.text)
                for name in ("prompt_tokens", "cached_tokens", "finish_reason", "stages"):
                    value: Any = getattr(event, name)
                    if value is not None:
                        setattr(self._answer, name, value)
                count = self._count_tokens(event)
                if count:
                    self._answer.times.append(at)
                    self._answer.characters.append(len(event.text))
                    self._counts.append(count)
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            shown = data[:120].decode(errors="replace")
            self._answer.set_error("bad event", f"{type(error).__name__} {error} in {shown}")
            return False
        if event.error is not None:
            self._answer.set_error("error event", event.error)
            return False
        return True

    def _drop_repeated(self, event: Event) -> None:
        """Keep only the new part of an event of ``/generate``, whose server may repeat the rest."""
        text, ids = event.text, event.ids
        if ids is not None and self._ids and len(ids) == event.total:
            event.ids = ids[len(self._ids) :]
            event.text = text[self._text_size :]
        elif ids is None and self._last_text and text.startswith(self._last_text):
            event.text = text[len(self._last_text) :]
        self._last_text = text if ids is None else ""

    def _count_tokens(self, event: Event) -> int:
        """Count the new tokens of an event."""
        answer, before = self._answer, self._total
        if event.total is not None:
            self._total = max(self._total, event.total)
        if event.ids is not None:
            self._ids += event.ids
            answer.counted_by = "token_ids"
            return len(event.ids)
        if answer.counted_by == "token_ids":
            return 0
        if event.total is not None and (event.text or answer.counted_by == "usage"):
            answer.counted_by = "usage"
            return self._total - before
        return 1 if event.text else 0

    def settle_counts(self) -> None:
        """Decide about the counts after the last event."""
        answer = self._answer
        answer.text = "".join(self._texts)
        answer.counts = self._counts
        answer.num_tokens = sum(self._counts)
        if answer.counted_by == "token_ids":
            answer.ids = self._ids
        elif self._total and self._total != answer.num_tokens:
            answer.num_tokens, answer.counts, answer.counted_by = self._total, None, "usage"
        elif self._total:
            answer.counted_by = "usage"
