"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``, Anthropic's Messages API."""

from __future__ import annotations

import base64
import hashlib
import uuid
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from pd.proxy.api.chat_api import prepare_chat, tokenize_chat
from pd.proxy.api.chat_prompt import render_prompt
from pd.proxy.api.chat_reader import ChatReader, merge_events
from pd.proxy.api.event_stream import NAMED_EVENTS
from pd.proxy.api.service import PlannedAnswer, RequestNames, make_job
from pd.proxy.http.json_responses import json_response
from pd.proxy.http.typed_routes import ClientRequest
from pd.proxy.requests.anthropic import AnthropicRequest, CountTokensRequest
from pd.proxy.requests.field_names import ANTHROPIC_NAMES
from pd.proxy.requests.messages import parse_arguments
from pd.proxy.text.tools.events import CallStart, Content, Reasoning

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pd.proxy.api.chat_plan import OutputPlan
    from pd.proxy.api.prompts import ModelView
    from pd.proxy.api.service import Service
    from pd.proxy.dispatch.generation import Choice, Delta, FinishReason, PromptSpec
    from pd.proxy.dispatch.job import Job
    from pd.proxy.text.tools.events import Event

ENDPOINT = "/v1/messages"
_UNFINISHED = {"stop_reason": None, "stop_sequence": None}
# Estimated size of the JSON around a text.
_EVENT_BYTES = 128


class AnthropicAPI:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: ClientRequest, body: AnthropicRequest) -> None:
        """Anthropic's messages, with the model's chat template."""
        answer = await self._plan_answer(request, body)
        del body  # it may hold megabytes, and an answer may take hours
        await self._service.serve(request, answer)

    async def count_tokens(self, request: ClientRequest, body: CountTokensRequest) -> Response:
        """The number of tokens of a prompt, as `usage` would have it."""
        model = await self._service.find_model(body.model)
        count = await request.raw_body.run_tokenizing(_count_tokens, body, model, may_be_long=False)
        return json_response({"input_tokens": count})

    async def _plan_answer(self, request: ClientRequest, body: AnthropicRequest) -> PlannedAnswer:
        rid = f"msg_{uuid.uuid4().hex}"
        names = RequestNames(rid, rid, False)
        model = await self._service.find_model(body.model)
        self._service.check_admission(1)
        spec, plan = await request.raw_body.run_tokenizing(
            _prepare_message, body, rid, model, may_be_long=False
        )
        job = make_job(request, names, ENDPOINT, is_streamed=body.stream)
        job.grammar_fields = plan.grammar_fields._replace(names=ANTHROPIC_NAMES)
        renderer = _MessageRenderer(job, model.shown, plan, is_leased=body.is_leased)
        return PlannedAnswer(job, [spec], renderer, body.timeout)


def _prepare_message(
    body: AnthropicRequest, rid: str, model: ModelView
) -> tuple[PromptSpec, OutputPlan]:
    with ANTHROPIC_NAMES.rename_errors():
        return prepare_chat(body.to_chat(), rid, model, clamps_length=True)


def _count_tokens(body: CountTokensRequest, model: ModelView) -> int:
    with ANTHROPIC_NAMES.rename_errors():
        chat = body.to_chat()
        prompt = render_prompt(chat, model.require_text("messages"), chat.messages)
        return len(tokenize_chat(chat, prompt, model))


class _MessageRenderer:
    """Renders a message, whole or as events.

    A message is a list of blocks, one open at a time. Blocks of white space alone are left out,
    because Anthropic's API refuses them when the client sends the message back.
    """

    is_cumulative = False
    event_form = NAMED_EVENTS

    def __init__(self, job: Job, model: str, plan: OutputPlan, *, is_leased: bool) -> None:
        self._job = job
        self._is_leased = is_leased
        self._is_plain = plan.new_parser is None
        self._reader = ChatReader(plan)
        self._head = {"id": job.shown, "type": "message", "role": "assistant", "model": model}
        self._index = -1
        self._open: str | None = None
        self._spaces: dict[str, str] = {}
        self._thought = hashlib.blake2b(digest_size=24)
        self._calls = 0

    def estimate_bytes(self, choice: Choice, delta: Delta) -> int:
        return _EVENT_BYTES + len(delta.text)

    def is_plain(self, choice: Choice) -> bool:
        return self._is_plain

    def render_delta(self, choice: Choice, delta: Delta) -> Iterator[object]:
        if delta.is_first:
            message: dict[str, Any] = {"content": []} | _UNFINISHED
            usage = self._count_usage() | {"output_tokens": 0}
            yield {"type": "message_start", "message": self._head | message | {"usage": usage}}
            if self._is_plain:
                yield self._open_block("text", {"type": "text", "text": ""})
            yield {"type": "ping"}
        if self._is_plain:
            # One event, whatever the text, see Renderer.is_plain.
            yield self._extend_block({"type": "text_delta", "text": delta.text})
        else:
            for event in merge_events(self._reader.read_events(delta)):
                yield from self._render_event(event)
        if delta.finish is not None:
            yield from self._close_block()
            end = self._render_end_of(delta.finish)
            yield {"type": "message_delta", "delta": end, "usage": self._count_usage()}

    def render_end(self) -> Iterable[object]:
        yield {"type": "message_stop"}

    def render_whole(self) -> object:
        choice = self._job.generations[0].choices[0]
        delta = choice.take_delta()
        blocks: list[dict[str, Any]] = []
        for event in merge_events(self._reader.read_events(delta)):
            for rendered in self._render_event(event):
                _add_to_blocks(blocks, rendered)
        for rendered in self._close_block():
            _add_to_blocks(blocks, rendered)
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = parse_arguments(block["input"])
        assert delta.finish is not None
        end = self._render_end_of(delta.finish)
        return self._head | {"content": blocks} | end | {"usage": self._count_usage()}

    def _render_event(self, event: Event) -> Iterator[dict[str, Any]]:
        if isinstance(event, CallStart):
            yield from self._close_block()
            self._calls += 1
            name = event.id.removeprefix("call_")
            block = {"type": "tool_use", "id": f"toolu_{name}", "name": event.name, "input": {}}
            yield self._open_block("tool_use", block)
        elif isinstance(event, Content):
            yield from self._render_text("text", "text", event.text)
        elif isinstance(event, Reasoning):
            self._thought.update(event.text.encode(errors="surrogatepass"))
            yield from self._render_text("thinking", "thinking", event.text)
        else:
            yield self._extend_block({"type": "input_json_delta", "partial_json": event.text})

    def _render_text(self, kind: str, field: str, text: str) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            if self._open is not None:
                yield from self._close_block()
            # White space is kept until we know whether its block has anything else.
            text = self._spaces.pop(kind, "") + text
            self._spaces.clear()
            if not text.strip():
                self._spaces[kind] = text
                return
            block = {"type": kind, field: ""}
            if kind == "thinking":
                block["signature"] = ""
            yield self._open_block(kind, block)
        yield self._extend_block({"type": f"{kind}_delta", field: text})

    def _open_block(self, kind: str, block: dict[str, Any]) -> dict[str, Any]:
        self._open = kind
        self._index += 1
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _extend_block(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close_block(self) -> Iterator[dict[str, Any]]:
        self._spaces.clear()
        if self._open is None:
            return
        if self._open == "thinking":
            signature = base64.b64encode(self._thought.digest()).decode()
            yield self._extend_block({"type": "signature_delta", "signature": signature})
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _render_end_of(self, finish: FinishReason) -> dict[str, Any]:
        reason, sequence = "end_turn", None
        if finish.type == "length":
            reason = "max_tokens"
        elif self._calls and not self._reader.call_is_open:
            reason = "tool_use"
        elif isinstance(finish.matched, str):
            reason, sequence = "stop_sequence", finish.matched
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _count_usage(self) -> dict[str, Any]:
        """Count tokens. What we read from the cache and what we add to it is not input."""
        generation = self._job.generations[0]
        cached = generation.cached_tokens
        new = len(generation.spec.token_ids) - cached
        created = new if self._is_leased else 0
        return {
            "input_tokens": new - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "output_tokens": generation.completion_tokens,
        }


def _add_to_blocks(blocks: list[dict[str, Any]], event: dict[str, Any]) -> None:
    """Apply an event of a stream to the blocks of a whole message."""
    if event["type"] == "content_block_start":
        block = dict(event["content_block"])
        if block["type"] == "tool_use":
            block["input"] = ""
        blocks.append(block)
    elif event["type"] == "content_block_delta":
        for name, text in event["delta"].items():
            if name == "partial_json":
                blocks[-1]["input"] += text
            elif name != "type":
                blocks[-1][name] += text
