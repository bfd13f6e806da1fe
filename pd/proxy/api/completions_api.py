"""``POST /v1/completions``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from pd.proxy.api import logprobs, openai_common
from pd.proxy.api.event_stream import PLAIN_EVENTS
from pd.proxy.api.prompts import RequestTotals, encode_prompts
from pd.proxy.api.service import PlannedAnswer, make_job, name_request
from pd.proxy.http.bodies import estimate_text_bytes
from pd.proxy.http.typed_routes import ClientRequest
from pd.proxy.requests.fields import split_prompts
from pd.proxy.requests.grammar_fields import GrammarFields
from pd.proxy.requests.openai import COMPLETION_TOKENS, CompletionRequest
from pd.proxy.text.tokenizer import make_detokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd.proxy.api.prompts import ModelView
    from pd.proxy.api.service import Service
    from pd.proxy.dispatch.generation import Choice, Delta, PromptSpec
    from pd.proxy.dispatch.job import Job

ENDPOINT = "/v1/completions"


class CompletionsAPI:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: ClientRequest, body: CompletionRequest) -> None:
        """OpenAI's completions of one or several prompts."""
        answer = await self._plan_answer(request, body)
        del body  # it may hold megabytes, and an answer may take hours
        await self._service.serve(request, answer)

    async def _plan_answer(self, request: ClientRequest, body: CompletionRequest) -> PlannedAnswer:
        names = name_request(body, request, "cmpl-")
        model = await self._service.find_model(body.model)
        if body.stop:
            model.require_text("stop")
        prompts, _ = split_prompts(body.prompt)
        self._service.check_admission(len(prompts))
        specs, echoed = await request.raw_body.run_tokenizing(
            _prepare_prompts,
            body,
            names.rid,
            prompts,
            model,
            text_bytes=estimate_text_bytes(prompts),
        )
        job = make_job(request, names, ENDPOINT, is_streamed=body.stream)
        job.grammar_fields = GrammarFields.from_field(body.grammar_field)
        renderer = _CompletionRenderer(job, body, model, echoed)
        return PlannedAnswer(job, specs, renderer, body.timeout)


def _prepare_prompts(
    body: CompletionRequest, rid: str, prompts: list[str | list[int]], model: ModelView
) -> tuple[list[PromptSpec], list[_Echo] | None]:
    """Tokenize the prompts. Also return their texts if they are echoed.

    Raises InvalidRequestError.
    """
    totals, max_tokens = RequestTotals(), body.token_limit
    discard = max_tokens == 0
    if discard:
        # Nodes send the log probabilities of a prompt with a first token, so we hide one token.
        max_tokens = 1
    specs = []
    tokenized = encode_prompts(
        model,
        prompts,
        "prompt",
        namespace=body.namespace,
        add_special_tokens=body.add_special_tokens,
    )
    for i, prompt_ids in enumerate(tokenized):
        ids = openai_common.truncate_prompt(body, prompt_ids, model)
        params = openai_common.make_sampling_params(
            body, model, len(ids), max_tokens, COMPLETION_TOKENS
        )
        spec = openai_common.make_spec(
            body, f"{rid}_{i}", ids, model, params, discard_output=discard
        )
        totals.add_prompt(spec, model.limits.context_length)
        specs.append(spec)
    if not body.echo:
        return specs, None
    if body.truncate_prompt_tokens is not None:
        prompts = [spec.token_ids.tolist() for spec in specs]
    echoed = []
    for prompt in prompts:
        if isinstance(prompt, str):
            echoed.append(_Echo(prompt, False))
        else:
            text = (
                "" if model.text is None else model.text.decode(prompt, skip_special_tokens=False)
            )
            echoed.append(_Echo(text, True))
    return specs, echoed


class _Echo(NamedTuple):
    """The text of a prompt, shown before its answers.

    Attributes:
        has_special: the text includes special tokens, because the client sent their ids.
    """

    text: str
    has_special: bool


class _CompletionRenderer:
    """Renders completions, whole or in chunks. An echoed prompt goes before its answers."""

    is_cumulative = False
    event_form = PLAIN_EVENTS

    def __init__(
        self,
        job: Job,
        body: CompletionRequest,
        model: ModelView,
        echo: list[_Echo] | None,
    ) -> None:
        self._job = job
        self._options = openai_common.AnswerOptions.from_body(body)
        self._usage = openai_common.ChunkUsage(self._options, job)
        self._model = model
        self._names = self._options.make_token_names(model)
        self._echo = echo
        self._head = {
            "id": job.shown,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.shown,
        }

    def estimate_bytes(self, choice: Choice, delta: Delta) -> int:
        entries = len(delta.logprobs)
        spec = choice.generation.spec
        for shows_prompt in (self._echo is not None, self._options.prompt_logprobs is not None):
            if delta.is_first and shows_prompt:
                entries += len(choice.generation.prompt_logprobs)
        size = logprobs.estimate_bytes(entries, spec.params.top_logprobs) + len(delta.text)
        if delta.is_first and self._options.return_token_ids:
            size += openai_common.TOKEN_ID_BYTES * len(spec.token_ids)
        return size

    def render_delta(self, choice: Choice, delta: Delta) -> Iterable[object]:
        self._usage.add_delta(choice, delta)
        event = self._head | {"choices": [self._render_choice(choice, delta)]}
        yield event | self._usage.render_field()

    def is_plain(self, choice: Choice) -> bool:
        spec = choice.generation.spec
        options = self._options
        return options.are_plain and not spec.discard_output and options.top_tokens is None

    def render_end(self) -> Iterable[object]:
        if self._options.include_usage:
            yield self._head | {"choices": [], "usage": openai_common.count_usage(self._job)}

    def render_whole(self) -> object:
        choices: list[dict[str, Any]] = []
        for generation in self._job.generations:
            prompt_logprobs = self._options.render_prompt_logprobs(self._model, generation)
            # vLLM's clients read these fields of every whole answer.
            fields: dict[str, Any] = {"token_ids": None, "prompt_token_ids": None}
            fields["prompt_logprobs"] = prompt_logprobs
            choices += [
                fields | self._render_choice(choice, choice.take_delta())
                for choice in generation.choices
            ]
        return self._head | {"choices": choices, "usage": openai_common.count_usage(self._job)}

    def _render_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        spec = choice.generation.spec
        if spec.discard_output:
            delta = delta._replace(text="", token_ids=[], logprobs=[])
        first, start = delta.is_first, delta.total - len(delta.token_ids)
        index = openai_common.number_choice(choice)
        echoed = None if self._echo is None else self._echo[choice.generation.number]
        echo = "" if echoed is None else echoed.text
        result: dict[str, Any] = {
            "index": index,
            "text": echo + delta.text if first else delta.text,
            "logprobs": None,
        }
        if self._options.top_tokens is not None:
            entries = delta.logprobs
            offsets = [len(echo) + begin for begin in choice.get_text_offsets(start, len(entries))]
            if first and echoed is not None:
                entries = [*choice.generation.prompt_logprobs, *entries]
                offsets = [*_find_prompt_offsets(spec, echoed), *offsets]
            result["logprobs"] = logprobs.render_for_completion(self._names, entries, offsets)
        if self._options.return_token_ids:
            result["token_ids"] = delta.token_ids
            result["prompt_token_ids"] = spec.token_ids.tolist() if first else None
        return result | openai_common.render_ending(choice, delta.finish)


def _find_prompt_offsets(spec: PromptSpec, echo: _Echo) -> list[int]:
    """Find the offset of each prompt token in the echoed text."""
    skips = spec.skip_special_tokens and not echo.has_special
    detokenizer = make_detokenizer(spec.text_model, skips)
    offsets, length = [], 0
    for token in spec.token_ids.tolist():
        offsets.append(length)
        length += len(detokenizer.add_token(token))
    return offsets
