"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pd.proxy.api import logprobs, openai_common
from pd.proxy.api.chat_plan import plan_output
from pd.proxy.api.chat_prompt import render_prompt
from pd.proxy.api.chat_reader import ChatReader
from pd.proxy.api.event_stream import PLAIN_EVENTS
from pd.proxy.api.prompts import RequestTotals, encode_prompt
from pd.proxy.api.service import PlannedAnswer, make_job, name_request
from pd.proxy.http.typed_routes import ClientRequest
from pd.proxy.requests.chat import ChatRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt

    from pd.proxy.api.chat_plan import OutputPlan
    from pd.proxy.api.chat_prompt import RenderedChat
    from pd.proxy.api.prompts import ModelView
    from pd.proxy.api.service import Service
    from pd.proxy.dispatch.generation import Choice, Delta, PromptSpec
    from pd.proxy.dispatch.job import Job

    IntArray = npt.NDArray[np.int32]

ENDPOINT = "/v1/chat/completions"


class ChatAPI:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: ClientRequest, body: ChatRequest) -> None:
        """OpenAI's chat completions, with the model's chat template."""
        answer = await self._plan_answer(request, body)
        del body  # it may hold megabytes, and an answer may take hours
        await self._service.serve(request, answer)

    async def _plan_answer(self, request: ClientRequest, body: ChatRequest) -> PlannedAnswer:
        names = name_request(body, request, "chatcmpl-")
        model = await self._service.find_model(body.model)
        self._service.check_admission(1)
        spec, plan = await request.raw_body.run_tokenizing(
            prepare_chat,
            body,
            names.rid,
            model,
            # A template may count up to a number of the client's choice.
            may_be_long=bool(body.chat_template_kwargs),
        )
        job = make_job(request, names, ENDPOINT, is_streamed=body.stream)
        job.grammar_fields = plan.grammar_fields
        renderer = _ChatRenderer(job, body, model, plan)
        return PlannedAnswer(job, [spec], renderer, body.timeout)


def tokenize_chat(body: ChatRequest, prompt: RenderedChat, model: ModelView) -> IntArray:
    """Tokenize a rendered chat. Raises InvalidRequestError."""
    # The template writes the special tokens itself.
    ids = encode_prompt(
        model, prompt.text, "messages", namespace=body.namespace, add_special_tokens=False
    )
    return openai_common.truncate_prompt(body, ids, model)


def prepare_chat(
    body: ChatRequest,
    rid: str,
    model: ModelView,
    *,
    clamps_length: bool = False,
    context: int | None = None,
) -> tuple[PromptSpec, OutputPlan]:
    """Render and tokenize the chat, and plan how to read its answers.

    Args:
        clamps_length: the answer may be shorter than ``max_tokens`` if the context ends before.
        context: the context of a request with ``clamps_length``, if it chose a shorter one.

    Raises InvalidRequestError.
    """
    text = model.require_text("messages")
    prompt = render_prompt(body, text, body.messages)
    plan = plan_output(body, text, prompt)
    ids = tokenize_chat(body, prompt, model)
    limit = body.token_limit
    if clamps_length:
        limit = openai_common.clamp_length(model, len(ids), limit, context)
    params = openai_common.make_sampling_params(
        body, model, len(ids), limit, None, grammar=plan.grammar
    )
    spec = openai_common.make_spec(
        body,
        rid,
        ids,
        model,
        params,
        kept_special_tokens=plan.kept_tokens,
        reasoning=plan.start,
    )
    RequestTotals().add_prompt(spec, model.limits.context_length)
    return spec, plan


class _ChatRenderer:
    """Renders chat completions, whole or in chunks. A choice's first chunk has only the role."""

    is_cumulative = False
    event_form = PLAIN_EVENTS

    def __init__(self, job: Job, body: ChatRequest, model: ModelView, plan: OutputPlan) -> None:
        self._job = job
        self._options = openai_common.AnswerOptions.from_body(body)
        self._usage = openai_common.ChunkUsage(self._options, job)
        self._model = model
        self._plan = plan
        self._names = self._options.make_token_names(model)
        self._echoed = body.echoed_text
        self._readers: dict[int, ChatReader] = {}
        self._head = {
            "id": job.shown,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model.shown,
        }

    def estimate_bytes(self, choice: Choice, delta: Delta) -> int:
        params = choice.generation.spec.params
        size = logprobs.estimate_bytes(len(delta.logprobs), params.top_logprobs) + len(delta.text)
        if delta.is_first and self._options.return_prompt_ids:
            size += openai_common.TOKEN_ID_BYTES * len(choice.generation.spec.token_ids)
        if delta.is_first and self._options.prompt_logprobs is not None:
            entries = len(choice.generation.prompt_logprobs)
            size += logprobs.estimate_bytes(entries, params.top_logprobs)
        return size

    def render_delta(self, choice: Choice, delta: Delta) -> Iterable[object]:
        if delta.is_first:
            # This chunk has none of the answer's tokens.
            self._usage.add_delta(choice, delta._replace(token_ids=[], total=0))
            opening = {"role": "assistant", "content": self._echoed, "reasoning_content": None}
            chunk = self._make_chunk({"index": choice.index, "delta": opening} | _UNFINISHED)
            yield chunk | self._render_prompt_ids()
        self._usage.add_delta(choice, delta)
        *parts, last = self._find_reader(choice).make_deltas(delta)
        for part in parts:
            yield self._make_chunk({"index": choice.index, "delta": part} | _UNFINISHED)
        ending = self._render_ending(choice, delta)
        yield self._make_chunk({"index": choice.index, "delta": last} | ending)

    def is_plain(self, choice: Choice) -> bool:
        if self._plan.new_parser is not None:
            return False
        return self._options.are_plain and self._options.top_tokens is None

    def render_end(self) -> Iterable[object]:
        if self._options.include_usage:
            yield self._head | {"choices": [], "usage": openai_common.count_usage(self._job)}

    def render_whole(self) -> object:
        choices = []
        for choice in self._job.generations[0].choices:
            delta = choice.take_delta()
            message = self._find_reader(choice).make_message(delta)
            if self._echoed:
                message["content"] = self._echoed + (message["content"] or "")
            head = {"index": choice.index, "message": message, "token_ids": None}
            choices.append(head | self._render_ending(choice, delta))
        whole = self._head | {"choices": choices, "usage": openai_common.count_usage(self._job)}
        prompt = self._options.render_prompt_logprobs(self._model, self._job.generations[0])
        prompt_fields = {"prompt_logprobs": prompt, "prompt_token_ids": None}
        return whole | prompt_fields | self._render_prompt_ids()

    def _find_reader(self, choice: Choice) -> ChatReader:
        reader = self._readers.get(choice.index)
        if reader is None:
            reader = self._readers[choice.index] = ChatReader(self._plan)
        return reader

    def _render_prompt_ids(self) -> dict[str, Any]:
        if not self._options.return_prompt_ids:
            return {}
        return {"prompt_token_ids": self._job.generations[0].spec.token_ids.tolist()}

    def _make_chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._head | {"choices": [choice]} | self._usage.render_field()

    def _render_ending(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        ending: dict[str, Any] = {"logprobs": None}
        if self._options.top_tokens is not None:
            ending["logprobs"] = logprobs.render_for_chat(self._names, delta.logprobs)
        if self._options.return_token_ids:
            ending["token_ids"] = delta.token_ids
        ending |= openai_common.render_ending(choice, delta.finish)
        if ending["finish_reason"] == "stop" and self._find_reader(choice).ended_by_calls:
            ending["finish_reason"] = "tool_calls"
        return ending


# The end of a chunk with more of the same delta to follow.
_UNFINISHED: dict[str, Any] = {"logprobs": None, "finish_reason": None}
