"""``POST /v1/completions``."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pd.core.sampling_params import MAX_TOP_LOGPROBS
from pd.proxy import logprobs, openai_common
from pd.proxy.access import caller_of
from pd.proxy.generation import Spec
from pd.proxy.job import Job
from pd.proxy.service import TokenCount, encode, read_prompts
from pd.proxy.tokenizer import new_detokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.requests import Request
    from starlette.responses import Response

    from pd.proxy.fields import Fields
    from pd.proxy.generation import Choice, Delta
    from pd.proxy.openai_common import OpenAIRequest
    from pd.proxy.service import ModelView, Service

DEFAULT_MAX_TOKENS = 16
ENDPOINT = "/v1/completions"


class CompletionsAPI:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: Request) -> Response:
        async with self._service.body(request) as body:
            asked = await body.read(lambda fields: _read(fields, request))
            common = asked.common
            model = await self._service.model(common.model)
            if common.stop:
                model.need_text("stop")
            self._service.admit(len(asked.prompts))
            specs, echoed = await body.run(_prepare, asked, model)
        owner = caller_of(request.scope).owner
        job = Job(common.names.rid, ENDPOINT, owner=owner, streaming=common.stream)
        renderer = _Renderer(job, common, model, echoed)
        return self._service.respond(job, specs, renderer, common.timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """``prompts``: texts or token ids, not checked against the model."""

    common: OpenAIRequest
    prompts: list[str | list[int]]
    echo: bool
    add_special_tokens: bool


def _read(fields: Fields, request: Request) -> _Asked:
    """Raises InvalidRequestError."""
    asked = openai_common.read_request(fields, request, "cmpl-")
    echo = fields.boolean("echo")
    asked = _read_logprobs(fields, asked, echo)
    prompts, _ = read_prompts(fields, "prompt")
    if asked.max_tokens == 0 and not echo:
        raise fields.wrong("max_tokens", "at least 1 (0 only together with echo)")
    special = fields.boolean("add_special_tokens", True)
    return _Asked(common=asked, prompts=prompts, echo=echo, add_special_tokens=special)


def _prepare(asked: _Asked, model: ModelView) -> tuple[list[Spec], list[str] | None]:
    """The prompts as they go to the nodes, and their texts where they are echoed.

    Raises InvalidRequestError.
    """
    common, count = asked.common, TokenCount()
    discard = common.max_tokens == 0
    if discard:
        # Log probabilities of a prompt come with a first token, so one is made and hidden.
        common = replace(common, max_tokens=1)
    specs = []
    for i, prompt in enumerate(asked.prompts):
        ids = encode(model, prompt, "prompt", add_special_tokens=asked.add_special_tokens)
        spec = Spec(
            rid=f"{common.names.rid}_{i}",
            model=model.name,
            token_ids=ids,
            params=common.params(model, len(ids), DEFAULT_MAX_TOKENS),
            text_model=model.text,
            stop=common.stop,
            namespace=common.namespace,
            priority=common.priority,
            skip_special_tokens=common.skip_special_tokens,
            discard_output=discard,
        )
        count.add(spec, model.limits.context_length)
        specs.append(spec)
    if not asked.echo:
        return specs, None
    return specs, [_echo_text(model, p, s) for p, s in zip(asked.prompts, specs, strict=True)]


def _read_logprobs(fields: Fields, asked: OpenAIRequest, echo: bool) -> OpenAIRequest:
    count = fields.integer("logprobs")
    if count is None:
        return asked
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise fields.wrong("logprobs", f"between 0 and {MAX_TOP_LOGPROBS}")
    kwargs = {"logprobs": True, "top_logprobs": count}
    if echo:
        kwargs["prompt_logprobs_start"] = 0
    return replace(asked, kwargs=asked.kwargs | kwargs)


def _echo_text(model: ModelView, prompt: str | list[int], spec: Spec) -> str:
    if isinstance(prompt, str):
        return prompt
    if model.text is None:
        return ""
    return model.text.decode(prompt, skip_special_tokens=spec.skip_special_tokens)


class _Renderer:
    """Completions, whole or in chunks, with the prompt in front if it is echoed."""

    cumulative = False

    def __init__(
        self, job: Job, asked: OpenAIRequest, model: ModelView, echo: list[str] | None
    ) -> None:
        self._job = job
        self._asked = asked
        self._model = model
        self._echo = echo
        self._head = {
            "id": asked.names.shown,
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model or model.name,
        }

    def size(self, choice: Choice, delta: Delta) -> int:
        entries = len(delta.logprobs)
        spec = choice.generation.spec
        if delta.first and self._echo is not None:
            entries += len(choice.generation.prompt_logprobs)
        size = logprobs.size(entries, spec.params.top_logprobs) + len(delta.text)
        if delta.first and self._asked.return_token_ids:
            size += openai_common.TOKEN_ID_BYTES * len(spec.token_ids)
        return size

    def events(self, choice: Choice, delta: Delta) -> Iterable[object]:
        event = self._head | {"choices": [self._choice(choice, delta)]}
        yield event | openai_common.chunk_usage(self._asked, self._job)

    def last_events(self) -> Iterable[object]:
        if self._asked.include_usage:
            yield self._head | {"choices": [], "usage": openai_common.usage(self._job)}

    def body(self) -> object:
        choices = [
            self._choice(choice, choice.take())
            for generation in self._job.generations
            for choice in generation.choices
        ]
        return self._head | {"choices": choices, "usage": openai_common.usage(self._job)}

    def _choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        spec = choice.generation.spec
        if spec.discard_output:
            delta = delta._replace(text="", token_ids=[], logprobs=[])
        first, start = delta.first, delta.total - len(delta.token_ids)
        index = openai_common.choice_index(choice)
        echo = self._echo[choice.generation.number] if self._echo is not None else ""
        result: dict[str, Any] = {
            "index": index,
            "text": echo + delta.text if first else delta.text,
            "logprobs": None,
        }
        if spec.params.logprobs:
            entries = delta.logprobs
            offsets = [len(echo) + begin for begin in choice.text_begins(start, len(entries))]
            if first and self._echo is not None:
                entries = [*choice.generation.prompt_logprobs, *entries]
                offsets = [*_prompt_offsets(spec), *offsets]
            result["logprobs"] = logprobs.legacy(self._model.text, entries, offsets)
        if self._asked.return_token_ids:
            result["token_ids"] = delta.token_ids
            result["prompt_token_ids"] = spec.token_ids.tolist() if first else None
        return result | openai_common.ending(choice, delta.finish)


def _prompt_offsets(spec: Spec) -> list[int]:
    """Where each prompt token begins in the echoed text."""
    detokenizer = new_detokenizer(spec.text_model, spec.skip_special_tokens)
    offsets, length = [], 0
    for token in spec.token_ids.tolist():
        offsets.append(length)
        length += len(detokenizer.push(token))
    return offsets
