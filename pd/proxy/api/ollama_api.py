"""``POST /api/chat`` and ``POST /api/generate``, Ollama's API."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from pd.proxy.api import logprobs, openai_common
from pd.proxy.api.chat_api import prepare_chat
from pd.proxy.api.chat_plan import OutputPlan
from pd.proxy.api.chat_reader import ChatReader, merge_events
from pd.proxy.api.event_stream import JSON_LINES
from pd.proxy.api.logprobs import TokenNames
from pd.proxy.api.prompts import RequestTotals, encode_prompt
from pd.proxy.api.service import PlannedAnswer, RequestNames, make_job
from pd.proxy.http.json_responses import json_response
from pd.proxy.http.typed_routes import ClientRequest
from pd.proxy.requests.field_names import (
    OLLAMA_CHAT_NAMES,
    OLLAMA_GENERATE_NAMES,
    FieldNames,
)
from pd.proxy.requests.grammar_fields import GrammarFields
from pd.proxy.requests.known_fields import OLLAMA_CHAT, OLLAMA_GENERATE
from pd.proxy.requests.messages import parse_arguments
from pd.proxy.requests.ollama import OllamaChatRequest, OllamaGenerateRequest
from pd.proxy.text.tools.events import Arguments, CallStart, Content, Reasoning

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pd.proxy.api.prompts import ModelView
    from pd.proxy.api.service import Service
    from pd.proxy.dispatch.generation import Choice, Delta, FinishReason, PromptSpec
    from pd.proxy.dispatch.job import Job

LATEST = ":latest"
# Estimated size of the JSON around a text.
_LINE_BYTES = 160


async def find_model(service: Service, name: str) -> ModelView:
    """Return the model of a name, to which Ollama's clients may add ``:latest``."""
    plain = name.removesuffix(LATEST)
    return await service.find_model(plain if plain and not service.has_name(name) else name)


def format_time(seconds: float) -> str:
    """Format a time since 1970."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class OllamaAPI:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: ClientRequest, body: OllamaChatRequest) -> None:
        """Ollama's chats, with the model's chat template."""
        answer = await self._plan_answer(request, OLLAMA_CHAT, body)
        del body  # it may hold megabytes, and an answer may take hours
        await self._send(request, answer)

    async def generate(self, request: ClientRequest, body: OllamaGenerateRequest) -> None:
        """Ollama's answers to one prompt, with the model's chat template unless it is `raw`."""
        answer = await self._plan_answer(request, OLLAMA_GENERATE, body)
        del body
        await self._send(request, answer)

    async def _send(self, request: ClientRequest, answer: PlannedAnswer | Response) -> None:
        if isinstance(answer, Response):
            await request.send_response(answer)
        else:
            await self._service.serve(request, answer)

    async def _plan_answer(
        self,
        request: ClientRequest,
        endpoint: str,
        body: OllamaChatRequest | OllamaGenerateRequest,
    ) -> PlannedAnswer | Response:
        """Plan the answer; a request without a prompt has its answer at once."""
        model = await find_model(self._service, body.model)
        form = AnswerForm(model.shown, is_chat=endpoint == OLLAMA_CHAT)
        if body.only_loads:
            return json_response(form.make_part("", is_done=True) | {"done_reason": "load"})
        self._service.check_admission(1)
        rid = f"ollama-{uuid.uuid4().hex}"
        names = OLLAMA_CHAT_NAMES if form.is_chat else OLLAMA_GENERATE_NAMES
        spec, plan = await request.raw_body.run_tokenizing(_prepare, body, rid, model, names)
        job = make_job(request, RequestNames(rid, rid, False), endpoint, is_streamed=body.stream)
        job.grammar_fields = plan.grammar_fields._replace(names=names)
        top = body.top_tokens
        tokens = None if top is None else TokenNames(model.text, top)
        return PlannedAnswer(job, [spec], _AnswerRenderer(job, form, plan, tokens), None)


def _prepare(
    body: OllamaChatRequest | OllamaGenerateRequest, rid: str, model: ModelView, names: FieldNames
) -> tuple[PromptSpec, OutputPlan]:
    """Translate, tokenize and plan a request. Raises InvalidRequestError."""
    context = body.options.num_ctx
    with names.rename_errors():
        if not isinstance(body, OllamaGenerateRequest) or not body.raw:
            return prepare_chat(body.to_chat(), rid, model, clamps_length=True, context=context)
        completion = body.to_completion()
        model.require_text("prompt")
        ids = encode_prompt(model, body.prompt, "prompt", namespace=completion.namespace)
        limit = openai_common.clamp_length(model, len(ids), completion.token_limit, context)
        params = openai_common.make_sampling_params(completion, model, len(ids), limit, None)
        spec = openai_common.make_spec(completion, rid, ids, model, params)
        RequestTotals().add_prompt(spec, model.limits.context_length)
        return spec, OutputPlan(None, GrammarFields.from_field(completion.grammar_field))


class AnswerForm:
    """The shape of one request's answers: those of a chat have a message.

    All parts of an answer have its time, so that they differ only in their texts.
    """

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self.is_chat = is_chat
        self._head = {"model": model, "created_at": format_time(time.time())}

    def make_part(
        self, text: str, *, thinking: str = "", calls: Sequence[object] = (), is_done: bool = False
    ) -> dict[str, Any]:
        """Make a part of an answer, or a whole one."""
        fields: dict[str, Any] = {"content" if self.is_chat else "response": text}
        if thinking:
            fields["thinking"] = thinking
        if calls:
            fields["tool_calls"] = calls
        if self.is_chat:
            fields = {"message": {"role": "assistant"} | fields}
        return self._head | fields | {"done": is_done}


class _AnswerRenderer:
    """Renders an answer, whole or as lines. The last line has no text, but the figures."""

    is_cumulative = False
    event_form = JSON_LINES

    def __init__(
        self, job: Job, form: AnswerForm, plan: OutputPlan, names: TokenNames | None
    ) -> None:
        """``names``: of tokens in log probabilities; None if the client wants none."""
        self._job = job
        self._form = form
        self._is_plain = plan.new_parser is None and names is None
        self._reader = ChatReader(plan)
        self._names = names
        # The call whose arguments are arriving, and their text. Ollama's calls come as a whole.
        self._call: CallStart | None = None
        self._arguments: list[str] = []

    def estimate_bytes(self, choice: Choice, delta: Delta) -> int:
        top = choice.generation.spec.params.top_logprobs
        return _LINE_BYTES + len(delta.text) + logprobs.estimate_bytes(len(delta.logprobs), top)

    def is_plain(self, choice: Choice) -> bool:
        return self._is_plain

    def render_delta(self, choice: Choice, delta: Delta) -> Iterator[object]:
        if self._is_plain:
            if delta.text or not (delta.is_first or delta.finish):
                yield self._form.make_part(delta.text)
        else:
            yield from self._render_parts(delta)
        if delta.finish is not None:
            yield self._form.make_part("", is_done=True) | self._count(delta.finish)

    def render_end(self) -> Iterable[object]:
        return ()

    def render_whole(self) -> object:
        delta = self._job.generations[0].choices[0].take_delta()
        assert delta.finish is not None
        text, thinking, calls = "", "", []
        for event in self._read_events(delta):
            if isinstance(event, Content):
                text += event.text
            elif isinstance(event, Reasoning):
                thinking += event.text
            else:
                calls.append(event)
        whole = self._form.make_part(text, thinking=thinking, calls=calls, is_done=True)
        return whole | self._render_logprobs(delta) | self._count(delta.finish)

    def _render_parts(self, delta: Delta) -> Iterator[dict[str, Any]]:
        shown = self._render_logprobs(delta)
        for event in self._read_events(delta):
            if isinstance(event, Content):
                part = self._form.make_part(event.text)
            elif isinstance(event, Reasoning):
                part = self._form.make_part("", thinking=event.text)
            else:
                part = self._form.make_part("", calls=[event])
            yield part | shown
            shown = {}
        if shown:
            yield self._form.make_part("") | shown

    def _read_events(self, delta: Delta) -> Iterator[Content | Reasoning | dict[str, Any]]:
        """Read the texts and whole calls of a delta. A call that was cut off is left out."""
        for event in merge_events(self._reader.read_events(delta)):
            if isinstance(event, Arguments):
                self._arguments.append(event.text)
                continue
            yield from self._end_call()
            if isinstance(event, CallStart):
                self._call = event
            else:
                yield event
        if delta.finish is not None and not self._reader.call_is_open:
            yield from self._end_call()

    def _end_call(self) -> Iterator[dict[str, Any]]:
        if self._call is not None:
            arguments = parse_arguments("".join(self._arguments))
            function = {"name": self._call.name, "arguments": arguments}
            yield {"id": self._call.id, "function": function}
        self._call = None
        self._arguments.clear()

    def _render_logprobs(self, delta: Delta) -> dict[str, Any]:
        if self._names is None or not delta.logprobs:
            return {}
        return {"logprobs": logprobs.render_for_chat(self._names, delta.logprobs)["content"]}

    def _count(self, finish: FinishReason) -> dict[str, Any]:
        """Count tokens and nanoseconds. Nodes never load a model for a request."""
        generation = self._job.generations[0]
        ended = generation.finished_at or time.monotonic()
        first = generation.first_token_at or ended
        return {
            "done_reason": finish.type,
            "total_duration": _to_nanoseconds(ended - self._job.started),
            "load_duration": 0,
            "prompt_eval_count": len(generation.spec.token_ids),
            "prompt_eval_duration": _to_nanoseconds(first - generation.created),
            "eval_count": generation.completion_tokens,
            "eval_duration": _to_nanoseconds(ended - first),
        }


def _to_nanoseconds(seconds: float) -> int:
    """Convert a duration. Clients divide by it, so it is never 0."""
    return max(1, round(seconds * 1e9))
