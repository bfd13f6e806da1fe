"""``POST /v1/completions``."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pd.core.sampling_params import MAX_TOP_LOGPROBS
from pd.proxy import logprobs, openai_common
from pd.proxy.fields import Fields
from pd.proxy.generation import Spec
from pd.proxy.job import Job
from pd.proxy.service import read_prompts
from pd.proxy.tokenizer import new_detokenizer
from pd.proxy.web import read_object

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.requests import Request
    from starlette.responses import Response

    from pd.proxy.generation import Choice, Delta
    from pd.proxy.openai_common import OpenAIRequest
    from pd.proxy.service import ModelView, Service

DEFAULT_MAX_TOKENS = 16
ENDPOINT = "/v1/completions"


class CompletionsAPI:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: Request) -> Response:
        fields = Fields(await read_object(request))
        asked = openai_common.read_request(fields, request, "cmpl-")
        echo = fields.boolean("echo")
        asked = _read_logprobs(fields, asked, echo)
        prompts, _ = read_prompts(fields, "prompt")
        if asked.max_tokens == 0 and not echo:
            raise fields.wrong("max_tokens", "at least 1 (0 only together with echo)")
        model = await self._service.model(asked.model)
        if asked.stop:
            model.need_text("stop")
        self._service.admit(len(prompts))
        add_special = fields.boolean("add_special_tokens", True)
        specs = [
            await self._spec(asked, model, prompt, f"{asked.rid}_{i}", add_special)
            for i, prompt in enumerate(prompts)
        ]
        job = Job(asked.rid, ENDPOINT, streaming=asked.stream)
        texts = [_echo_text(model, p, s) for p, s in zip(prompts, specs, strict=True)]
        renderer = _Renderer(job, asked, model, texts if echo else None)
        return self._service.respond(job, specs, renderer, asked.timeout)

    async def _spec(
        self,
        asked: OpenAIRequest,
        model: ModelView,
        prompt: str | list[int],
        rid: str,
        add_special_tokens: bool,
    ) -> Spec:
        ids = await self._service.encode(
            model, prompt, "prompt", add_special_tokens=add_special_tokens
        )
        discard = asked.max_tokens == 0
        if discard:
            # Log probabilities of a prompt come with a first token, so one is made and hidden.
            asked = replace(asked, max_tokens=1)
        return Spec(
            rid=rid,
            model=model.name,
            token_ids=ids,
            params=asked.params(model, len(ids), DEFAULT_MAX_TOKENS),
            text_model=model.text,
            stop=asked.stop,
            namespace=asked.namespace,
            priority=asked.priority,
            skip_special_tokens=asked.skip_special_tokens,
            discard_output=discard,
        )


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

    def __init__(
        self, job: Job, asked: OpenAIRequest, model: ModelView, echo: list[str] | None
    ) -> None:
        self._job = job
        self._asked = asked
        self._model = model
        self._echo = echo
        self._sent: dict[Choice, int] = {}
        self._head = {
            "id": asked.rid,
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model or model.name,
        }

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
        first = choice not in self._sent
        start = self._sent.get(choice, 0)
        self._sent[choice] = start + len(delta.token_ids)
        index = openai_common.choice_index(choice)
        echo = self._echo[choice.generation.number] if self._echo is not None else ""
        result: dict[str, Any] = {
            "index": index,
            "text": echo + delta.text if first else delta.text,
            "logprobs": None,
        }
        if spec.params.logprobs:
            entries = delta.logprobs
            ends = [0, *choice.text_ends]
            offsets = [len(echo) + end for end in ends[start : start + len(entries)]]
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
