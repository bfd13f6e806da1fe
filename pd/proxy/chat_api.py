"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from pd.proxy import logprobs, openai_common
from pd.proxy.access import caller_of
from pd.proxy.bodies import body_of
from pd.proxy.chat_answer import ChatAnswer
from pd.proxy.chat_messages import render_prompt
from pd.proxy.chat_output import plan_output
from pd.proxy.generation import Spec
from pd.proxy.job import Job
from pd.proxy.requests.chat import ChatRequest
from pd.proxy.service import TokenCount, encode, names_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd.proxy.chat_output import OutputPlan
    from pd.proxy.generation import Choice, Delta
    from pd.proxy.service import ModelView, Service

ENDPOINT = "/v1/chat/completions"


class ChatAPI:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: Request, asked: ChatRequest) -> Response:
        """OpenAI's chat completions, with the model's chat template."""
        names = names_of(asked, request, "chatcmpl-")
        model = await self._service.model(asked.model)
        self._service.admit(1)
        spec, plan = await body_of(request.scope).tokenize(
            _prepare,
            asked,
            names.rid,
            model,
            # A template may count to a number that the client chose.
            may_be_long=bool(asked.chat_template_kwargs),
        )
        owner = caller_of(request.scope).owner
        job = Job(names.rid, ENDPOINT, owner=owner, is_named=names.is_given, streaming=asked.stream)
        job.grammar_fields = plan.grammar_fields
        renderer = _ChatRenderer(job, asked, names.shown, model, plan)
        return self._service.respond(job, [spec], renderer, asked.timeout, names.shown)


def _prepare(asked: ChatRequest, rid: str, model: ModelView) -> tuple[Spec, OutputPlan]:
    """The prompt as it goes to the nodes, and how its answers are read.

    Raises InvalidRequestError.
    """
    text = model.need_text("messages")
    prompt = render_prompt(asked, text, asked.messages)
    plan = plan_output(asked, text, prompt)
    # The template writes the special tokens itself.
    ids = encode(
        model, prompt.text, "messages", namespace=asked.namespace, add_special_tokens=False
    )
    ids = openai_common.truncated(asked, ids, model)
    spec = Spec(
        rid=rid,
        model=model.name,
        token_ids=ids,
        params=openai_common.sampling_params(
            asked, model, len(ids), asked.wanted_tokens, None, grammar=plan.grammar
        ),
        text_model=text,
        stop=asked.stop_search,
        namespace=asked.namespace,
        priority=asked.priority,
        stream_interval=asked.stream_interval or model.stream_interval,
        skip_special_tokens=asked.skip_special_tokens,
        kept_special_tokens=plan.kept,
        shows_stop=asked.include_stop_str_in_output,
        reasoning=plan.start,
    )
    TokenCount().add(spec, model.limits.context_length)
    return spec, plan


class _ChatRenderer:
    """Chat completions, whole or in chunks; a choice's first chunk carries the role."""

    cumulative = False

    def __init__(
        self, job: Job, asked: ChatRequest, shown: str, model: ModelView, plan: OutputPlan
    ) -> None:
        self._job = job
        self._options = openai_common.AnswerOptions.of(asked)
        self._usage = openai_common.ChunkUsage(self._options, job)
        self._model = model
        self._plan = plan
        self._names = self._options.token_names(model)
        self._echoed = asked.echoed
        self._answers: dict[int, ChatAnswer] = {}
        self._head = {
            "id": shown,
            "object": "chat.completion.chunk" if asked.stream else "chat.completion",
            "created": int(time.time()),
            "model": asked.model or model.name,
        }

    def size(self, choice: Choice, delta: Delta) -> int:
        params = choice.generation.spec.params
        size = logprobs.size(len(delta.logprobs), params.top_logprobs) + len(delta.text)
        if delta.first and self._options.return_prompt_ids:
            size += openai_common.TOKEN_ID_BYTES * len(choice.generation.spec.token_ids)
        if delta.first and self._options.prompt_logprobs is not None:
            size += logprobs.size(len(choice.generation.prompt_logprobs), params.top_logprobs)
        return size

    def events(self, choice: Choice, delta: Delta) -> Iterable[object]:
        if delta.first:
            # This chunk has none of the answer's tokens.
            self._usage.count(choice, delta._replace(token_ids=[], total=0))
            opening = {"role": "assistant", "content": self._echoed, "reasoning_content": None}
            chunk = self._chunk({"index": choice.index, "delta": opening} | _open())
            yield chunk | self._prompt_ids()
        self._usage.count(choice, delta)
        *parts, last = self._answer(choice).deltas(delta)
        for part in parts:
            yield self._chunk({"index": choice.index, "delta": part} | _open())
        yield self._chunk({"index": choice.index, "delta": last} | self._rest(choice, delta))

    def is_plain(self, choice: Choice) -> bool:
        if self._plan.new_parser is not None:
            return False
        return self._options.are_plain and self._options.top_tokens is None

    def last_events(self) -> Iterable[object]:
        if self._options.include_usage:
            yield self._head | {"choices": [], "usage": openai_common.usage(self._job)}

    def body(self) -> object:
        choices = []
        for choice in self._job.generations[0].choices:
            delta = choice.take()
            message = self._answer(choice).whole(delta)
            if self._echoed:
                message["content"] = self._echoed + (message["content"] or "")
            head = {"index": choice.index, "message": message, "token_ids": None}
            choices.append(head | self._rest(choice, delta))
        whole = self._head | {"choices": choices, "usage": openai_common.usage(self._job)}
        prompt = self._options.of_prompt(self._model, self._job.generations[0])
        return whole | {"prompt_logprobs": prompt, "prompt_token_ids": None} | self._prompt_ids()

    def _answer(self, choice: Choice) -> ChatAnswer:
        answer = self._answers.get(choice.index)
        if answer is None:
            answer = self._answers[choice.index] = ChatAnswer(self._plan)
        return answer

    def _prompt_ids(self) -> dict[str, Any]:
        if not self._options.return_prompt_ids:
            return {}
        return {"prompt_token_ids": self._job.generations[0].spec.token_ids.tolist()}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._head | {"choices": [choice]} | self._usage.field()

    def _rest(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        rest: dict[str, Any] = {"logprobs": None}
        if self._options.top_tokens is not None:
            rest["logprobs"] = logprobs.chat(self._names, delta.logprobs)
        if self._options.return_token_ids:
            rest["token_ids"] = delta.token_ids
        rest |= openai_common.ending(choice, delta.finish)
        if rest["finish_reason"] == "stop" and self._answer(choice).ended_by_calls:
            rest["finish_reason"] = "tool_calls"
        return rest


def _open() -> dict[str, Any]:
    """The end of a chunk that others of the same delta follow."""
    return {"logprobs": None, "finish_reason": None}
