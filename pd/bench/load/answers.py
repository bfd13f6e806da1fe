"""Reads an answer: its tokens with their times, the server's counts, or why it failed.

Tokens of an event are counted by their ids where the server names them, else by the counts that
every event has (``continuous_usage_stats``, ``meta_info``), else an event with text is one token.
If the last event's usage then says another number, that number holds for the answer and nobody
knows how many tokens each event had.
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

_DONE = b"[DONE]"
_SHOWN_CHARACTERS = 300


@dataclass
class Answer:
    """One answer; times as the pieces have them.

    Attributes:
        times: when each event that holds tokens had come.
        counts: tokens of each of these events; None where only their sum is known.
        num_tokens: tokens of the answer.
        counted_by: "token_ids", "usage" (the server's counts) or "events".
        prompt_tokens, cached_tokens: as the server counts them; None if it does not say.
        end: when the last byte had come; None if none came.
        error_kind: None if all is well; else what went wrong in one word or "http 429".
        done: whether the stream ended as its API says.
    """

    http_status: int = 0
    times: list[float] = field(default_factory=list)
    counts: list[int] | None = field(default_factory=list)
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

    def fail(self, kind: str, error: str) -> None:
        """Note why there is no (whole) answer; the first reason counts."""
        if self.error_kind is None:
            self.error_kind, self.error = kind, error[:_SHOWN_CHARACTERS]


def read_answer(pieces: Sequence[Piece], endpoint: Endpoint) -> Answer:
    """Read what was received. Never raises for what a server sent."""
    http = parse_http(pieces)
    answer = Answer(http.status, end=pieces[-1][0] if pieces else None)
    if http.status != 200:
        _refused(answer, http, pieces)
        return answer
    if http.content_type not in ("text/event-stream", ""):
        content = http.content.decode(errors="replace").strip()
        answer.fail("not a stream", f"{http.content_type}: {content}")
        return answer
    reader = _Reader(answer, endpoint)
    for at, data in parse_events(http.body):
        if data == _DONE:
            answer.done = True
        elif not reader.add(at, data):
            break
    reader.finish()
    if not answer.done:
        answer.fail("cut", "the connection ended in the middle of the stream")
    if not answer.num_tokens:
        answer.fail("empty", "the stream had no token")
    return answer


def _refused(answer: Answer, http: HTTPAnswer, pieces: Sequence[Piece]) -> None:
    if http.status:
        text = http.content.decode(errors="replace").strip()
        answer.fail(f"http {http.status}", f"HTTP status {http.status}: {text}")
    elif pieces:
        began = pieces[0][1][:60].decode(errors="replace")
        answer.fail("not http", f"not an answer of HTTP/1.1: {began!r}")
    else:
        answer.fail("no answer", "the connection ended without an answer")


class _Reader:
    """Adds events to an answer."""

    def __init__(self, answer: Answer, endpoint: Endpoint) -> None:
        self._answer, self._endpoint = answer, endpoint
        # The API whose events may repeat what those before them had.
        self._may_repeat = isinstance(endpoint, NativeGenerate)
        self._texts: list[str] = []
        self._text_size = 0
        self._ids: list[int] = []
        self._total = 0
        self._last_text = ""
        self._counts: list[int] = []

    def add(self, at: float, data: bytes) -> bool:
        """Add an event; whether the stream goes on."""
        try:
            event = self._endpoint.read(json.loads(data))
            if event.error is None:
                self._take_in(at, event)
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            shown = data[:120].decode(errors="replace")
            self._answer.fail("bad event", f"{type(error).__name__} {error} in {shown}")
            return False
        if event.error is not None:
            self._answer.fail("error event", event.error)
            return False
        return True

    def _take_in(self, at: float, event: Event) -> None:
        if self._may_repeat:
            self._drop_repeated(event)
        self._note(event)
        count = self._count(event)
        if count:
            self._answer.times.append(at)
            self._counts.append(count)

    def _drop_repeated(self, event: Event) -> None:
        """Keep what is new in an event of ``/generate``, whose server may send all so far."""
        text, ids = event.text, event.ids
        if ids is not None and self._ids and len(ids) == event.total:
            event.ids = ids[len(self._ids) :]
            event.text = text[self._text_size :]
        elif ids is None and self._last_text and text.startswith(self._last_text):
            event.text = text[len(self._last_text) :]
        self._last_text = text if ids is None else ""

    def _note(self, event: Event) -> None:
        answer = self._answer
        if event.text:
            self._texts.append(event.text)
            self._text_size += len(event.text)
        for name in ("prompt_tokens", "cached_tokens", "finish_reason", "stages"):
            value: Any = getattr(event, name)
            if value is not None:
                setattr(answer, name, value)

    def _count(self, event: Event) -> int:
        """Tokens that an event adds."""
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

    def finish(self) -> None:
        """Settle the counts, once every event was added."""
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
