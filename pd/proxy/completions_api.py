"""``POST /v1/completions``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from pd.proxy import logprobs, openai_common
from pd.proxy.access import caller_of
from pd.proxy.bodies import body_of, text_size
from pd.proxy.fields import split_prompts
from pd.proxy.generation import Spec
from pd.proxy.grammar_fields import RESPONSE_FORMAT
from pd.proxy.job import Job
from pd.proxy.requests.openai import COMPLETION_TOKENS, CompletionRequest
from pd.proxy.service import TokenCount, encode, names_of
from pd.proxy.tokenizer import new_detokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd.proxy.generation import Choice, Delta
    from pd.proxy.service import ModelView, Service

ENDPOINT = "/v1/completions"


class CompletionsAPI:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: Request, asked: CompletionRequest) -> Response:
        """OpenAI's completions of one or several prompts."""
        names = names_of(asked, request, "cmpl-")
        model = await self._service.model(asked.model)
        if asked.stop:
            model.need_text("stop")
        prompts, _ = split_prompts(asked.prompt)
        self._service.admit(len(prompts))
        body = body_of(request.scope)
        specs, echoed = await body.tokenize(
            _prepare, asked, names.rid, prompts, model, text=text_size(prompts)
        )
        owner = caller_of(request.scope).owner
        job = Job(names.rid, ENDPOINT, owner=owner, is_named=names.is_given, streaming=asked.stream)
        job.grammar_fields = RESPONSE_FORMAT
        renderer = _CompletionRenderer(job, asked, names.shown, model, echoed)
        return self._service.respond(job, specs, renderer, asked.timeout)


def _prepare(
    asked: CompletionRequest, rid: str, prompts: list[str | list[int]], model: ModelView
) -> tuple[list[Spec], list[str] | None]:
    """The prompts as they go to the nodes, and their texts where they are echoed.

    Raises InvalidRequestError.
    """
    count, max_tokens = TokenCount(), asked.wanted_tokens
    discard = max_tokens == 0
    if discard:
        # Log probabilities of a prompt come with a first token, so one is made and hidden.
        max_tokens = 1
    specs = []
    for i, prompt in enumerate(prompts):
        ids = encode(
            model,
            prompt,
            "prompt",
            namespace=asked.cache_salt,
            add_special_tokens=asked.add_special_tokens,
        )
        spec = Spec(
            rid=f"{rid}_{i}",
            model=model.name,
            token_ids=ids,
            params=openai_common.sampling_params(
                asked, model, len(ids), max_tokens, COMPLETION_TOKENS
            ),
            text_model=model.text,
            stop=asked.stop,
            namespace=asked.cache_salt,
            priority=asked.priority,
            stream_interval=asked.stream_interval or model.stream_interval,
            skip_special_tokens=asked.skip_special_tokens,
            discard_output=discard,
        )
        count.add(spec, model.limits.context_length)
        specs.append(spec)
    if not asked.echo:
        return specs, None
    return specs, [_echo_text(model, p, s) for p, s in zip(prompts, specs, strict=True)]


def _echo_text(model: ModelView, prompt: str | list[int], spec: Spec) -> str:
    if isinstance(prompt, str):
        return prompt
    if model.text is None:
        return ""
    return model.text.decode(prompt, skip_special_tokens=spec.skip_special_tokens)


class _CompletionRenderer:
    """Completions, whole or in chunks, with the prompt in front if it is echoed."""

    cumulative = False

    def __init__(
        self,
        job: Job,
        asked: CompletionRequest,
        shown: str,
        model: ModelView,
        echo: list[str] | None,
    ) -> None:
        self._job = job
        self._options = openai_common.AnswerOptions.of(asked)
        self._usage = openai_common.ChunkUsage(self._options, job)
        self._model = model
        self._echo = echo
        self._head = {
            "id": shown,
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
        if delta.first and self._options.return_token_ids:
            size += openai_common.TOKEN_ID_BYTES * len(spec.token_ids)
        return size

    def events(self, choice: Choice, delta: Delta) -> Iterable[object]:
        self._usage.count(choice, delta)
        event = self._head | {"choices": [self._choice(choice, delta)]}
        yield event | self._usage.field()

    def is_plain(self, choice: Choice) -> bool:
        spec = choice.generation.spec
        return self._options.are_plain and not (spec.discard_output or spec.params.logprobs)

    def last_events(self) -> Iterable[object]:
        if self._options.include_usage:
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
        if self._options.return_token_ids:
            result["token_ids"] = delta.token_ids
            result["prompt_token_ids"] = spec.token_ids.tolist() if first else None
        return result | openai_common.ending(choice, delta.finish)


def _prompt_offsets(spec: Spec) -> list[int]:
    """Return the offset of each prompt token in the echoed text."""
    detokenizer = new_detokenizer(spec.text_model, spec.skip_special_tokens)
    offsets, length = [], 0
    for token in spec.token_ids.tolist():
        offsets.append(length)
        length += len(detokenizer.push(token))
    return offsets
