"""Renders responses of OpenAI's Responses API, whole or as events."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from pd.core.brief import shorten_text
from pd.core.errors import MAX_MESSAGE_CHARACTERS
from pd.proxy.api import openai_common
from pd.proxy.api.chat_reader import ChatReader, merge_events
from pd.proxy.api.event_stream import EventForm, encode_named_event
from pd.proxy.requests.response_items import hide_reasoning
from pd.proxy.text.tools.events import Arguments, CallStart, Content, Reasoning

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pd.core.errors import PDError
    from pd.core.sampling_params import SamplingParams
    from pd.proxy.api.chat_plan import OutputPlan
    from pd.proxy.dispatch.generation import Choice, Delta
    from pd.proxy.dispatch.job import Job
    from pd.proxy.requests.responses import ResponsesRequest
    from pd.proxy.text.tools.events import Event

Json = dict[str, Any]
# Estimated size of the JSON around a text.
_EVENT_BYTES = 192
# The last events of an item and of the response repeat its text so often.
_REPETITIONS = 5
_encoder = msgspec.json.Encoder()
# Statuses of errors that a client should retry later.
_BUSY = (429, 503)


class ResponseRenderer:
    """Renders a response.

    A response is a list of items, one open at a time: reasoning, a message, or a call. Messages and
    reasoning of white space alone are left out, because models write them between other items.

    Attributes:
        final: JSON of the whole response, once the answer has ended.
        items: the items of the response so far.
    """

    is_cumulative = False

    def __init__(self, job: Job, echo: Json, plan: OutputPlan, *, hides_reasoning: bool) -> None:
        """
        Args:
            echo: of :func:`describe_request`.
            hides_reasoning: add ``encrypted_content`` to reasoning.
        """
        self.event_form = EventForm(encode_named_event, self._make_failure, b"")
        self.final = b""
        self.items: list[Json] = []
        self._job = job
        self._reader = ChatReader(plan)
        self._hides_reasoning = hides_reasoning
        self._echo = echo
        self._echo_bytes = sum(len(bytes(v)) for v in echo.values() if isinstance(v, msgspec.Raw))
        self._sequence = -1
        self._is_cut = False
        self._item: _Item | None = None
        self._space = ""
        self._length = 0

    def estimate_bytes(self, choice: Choice, delta: Delta) -> int:
        size = _EVENT_BYTES + len(delta.text)
        if delta.is_first:
            size += 2 * self._echo_bytes
        if delta.finish is not None:
            size += self._echo_bytes + _REPETITIONS * self._length
        return size

    def is_plain(self, choice: Choice) -> bool:
        return False  # each event has a number

    def render_delta(self, choice: Choice, delta: Delta) -> Iterator[object]:
        self._length += len(delta.text)
        if delta.is_first:
            begun = self._make_response("in_progress", {"usage": None})
            yield self._make_event("response.created", response=begun)
            yield self._make_event("response.in_progress", response=begun)
        for event in merge_events(self._reader.read_events(delta)):
            yield from self._render_event(event)
        if delta.finish is not None:
            self._is_cut = delta.finish.type == "length"
            is_whole = not self._is_cut and not self._reader.call_is_open
            yield from self._close_item("completed" if is_whole else "incomplete")
            self._end_response()

    def render_end(self) -> Iterable[object]:
        kind = "response.incomplete" if self._is_cut else "response.completed"
        yield self._make_event(kind, response=msgspec.Raw(self.final))

    def render_whole(self) -> object:
        choice = self._job.generations[0].choices[0]
        for _ in self.render_delta(choice, choice.take_delta()):
            pass  # the whole response has everything that the events have
        return msgspec.Raw(self.final)

    def _end_response(self) -> None:
        ending: Json = {"output": self.items, "usage": self._count_usage()}
        if self._is_cut:
            ending["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            ending["completed_at"] = int(time.time())
        response = self._make_response("incomplete" if self._is_cut else "completed", ending)
        self.final = _encoder.encode(response)

    def _render_event(self, event: Event) -> Iterator[Json]:
        if isinstance(event, CallStart):
            yield from self._close_item("completed")
            yield from self._open_item(_CallItem(event.id, event.name))
        elif isinstance(event, Arguments):
            yield self._extend_item(event.text)
        else:
            yield from self._render_text(event)

    def _render_text(self, event: Content | Reasoning) -> Iterator[Json]:
        kind = _MessageItem if isinstance(event, Content) else _ReasoningItem
        text = event.text
        if not isinstance(self._item, kind):
            if self._item is not None:
                yield from self._close_item("completed")
            text = self._space + text
            if not text.strip():
                self._space = text
                return
            yield from self._open_item(kind())
        yield self._extend_item(text)

    def _open_item(self, item: _Item) -> Iterator[Json]:
        self._item, self._space = item, ""
        index = len(self.items)
        yield self._make_event(
            "response.output_item.added", output_index=index, item=item.render("in_progress")
        )
        if item.part_type:
            yield self._make_event(
                "response.content_part.added", **item.place(index), part=item.render_part("")
            )

    def _extend_item(self, text: str) -> Json:
        assert self._item is not None
        self._item.texts.append(text)
        place = self._item.place(len(self.items)) | self._item.details
        return self._make_event(f"{self._item.event}.delta", **place, delta=text)

    def _close_item(self, status: str) -> Iterator[Json]:
        item, self._item = self._item, None
        self._space = ""
        if item is None:
            return
        place = item.place(len(self.items))
        yield self._make_event(f"{item.event}.done", **place, **item.render_text())
        if item.part_type:
            part = item.render_part("".join(item.texts))
            yield self._make_event("response.content_part.done", **place, part=part)
        rendered = item.render(status, hides_reasoning=self._hides_reasoning)
        self.items.append(rendered)
        yield self._make_event(
            "response.output_item.done", output_index=len(self.items) - 1, item=rendered
        )

    def _make_event(self, kind: str, **fields: Any) -> Json:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence, **fields}

    def _make_response(self, status: str, fields: Json) -> Json:
        return self._echo | {"status": status} | fields

    def _make_failure(self, error: PDError) -> Json:
        code = "rate_limit_exceeded" if error.status in _BUSY else "server_error"
        message = shorten_text(error.message, MAX_MESSAGE_CHARACTERS)
        fields: Json = {"error": {"code": code, "message": message}, "output": self.items}
        return self._make_event("response.failed", response=self._make_response("failed", fields))

    def _count_usage(self) -> Json:
        usage = openai_common.count_usage(self._job)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage.get("reasoning_tokens", 0)},
            "total_tokens": usage["total_tokens"],
        }


class _Item:
    """An item of a response while it grows.

    Attributes:
        event: beginning of the names of its events.
        part_type: type of its only part; empty for items without parts.
        details: further fields of its text and of the events with the text.
        texts: pieces of its text.
    """

    kind, prefix, event, part_type = "", "", "", ""
    details: ClassVar[Json] = {}

    def __init__(self) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.texts: list[str] = []

    def place(self, index: int) -> Json:
        """Return the fields by which an event names the place of its text."""
        place: Json = {"item_id": self.id, "output_index": index}
        return place | {"content_index": 0} if self.part_type else place

    def render_part(self, text: str) -> Json:
        return {"type": self.part_type, "text": text}

    def render_text(self) -> Json:
        """Render the fields of the event with the whole text."""
        return {"text": "".join(self.texts)} | self.details

    def render(self, status: str, *, hides_reasoning: bool = False) -> Json:
        raise NotImplementedError

    def _render_content(self, status: str) -> list[Json]:
        return [] if status == "in_progress" else [self.render_part("".join(self.texts))]


class _MessageItem(_Item):
    kind, prefix = "message", "msg"
    event, part_type = "response.output_text", "output_text"
    details: ClassVar[Json] = {"logprobs": []}

    def render_part(self, text: str) -> Json:
        return {"type": self.part_type, "text": text, "annotations": []} | self.details

    def render(self, status: str, *, hides_reasoning: bool = False) -> Json:
        head = {"id": self.id, "type": self.kind, "status": status, "role": "assistant"}
        return head | {"content": self._render_content(status)}


class _ReasoningItem(_Item):
    kind, prefix = "reasoning", "rs"
    event, part_type = "response.reasoning_text", "reasoning_text"

    def render(self, status: str, *, hides_reasoning: bool = False) -> Json:
        hidden = hide_reasoning("".join(self.texts)) if hides_reasoning else None
        head = {"id": self.id, "type": self.kind, "status": status, "summary": []}
        return head | {"content": self._render_content(status), "encrypted_content": hidden}


class _CallItem(_Item):
    kind, prefix = "function_call", "fc"
    event = "response.function_call_arguments"

    def __init__(self, call_id: str, name: str) -> None:
        super().__init__()
        self._call_id, self._name = call_id, name

    def render_text(self) -> Json:
        return {"name": self._name, "arguments": "".join(self.texts)}

    def render(self, status: str, *, hides_reasoning: bool = False) -> Json:
        head = {"id": self.id, "type": self.kind, "status": status, "call_id": self._call_id}
        return head | {"name": self._name, "arguments": "".join(self.texts)}


def describe_request(job: Job, body: ResponsesRequest, model: str, params: SamplingParams) -> Json:
    """Make the fields of a response that repeat the request.

    Long values are JSON already, because each of several events has them.
    """
    reasoning = {"effort": None, "summary": None}
    text = {"format": {"type": "text"}, "verbosity": "medium"}
    return {
        "id": job.shown,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": _encode(body.instructions),
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": body.model or model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": reasoning | (body.reasoning.given if body.reasoning else {}),
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store,
        "temperature": params.temperature,
        "text": _encode(text | (body.text.given if body.text else {})),
        "tool_choice": body.tool_choice.given if body.tool_choice else "auto",
        "tools": _encode(body.tools.given if body.tools else []),
        "top_logprobs": 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _encode(value: object) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(value))
