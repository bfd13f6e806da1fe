"""``POST /v1/completions``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from pd.proxy import logprobs, openai_common
from pd.proxy.access import caller_of
from pd.proxy.bodies import body_of, text_size
from pd.proxy.fields import split_prompts
from pd.proxy.generation import Spec
from pd.proxy.grammar_fields import GrammarFields
from pd.proxy.job import Job
from pd.proxy.requests.openai import COMPLETION_TOKENS, CompletionRequest
from pd.proxy.service import TokenCount, encode_each, names_of
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
        job.grammar_fields = GrammarFields.of(asked.grammar_field)
        renderer = _CompletionRenderer(job, asked, names.shown, model, echoed)
        return self._service.respond(job, specs, renderer, asked.timeout, names.shown)


def _prepare(
    asked: CompletionRequest, rid: str, prompts: list[str | list[int]], model: ModelView
) -> tuple[list[Spec], list[_Echo] | None]:
    """The prompts as they go to the nodes, and their texts where they are echoed.

    Raises InvalidRequestError.
    """
    count, max_tokens = TokenCount(), asked.wanted_tokens
    discard = max_tokens == 0
    if discard:
        # Log probabilities of a prompt come with a first token, so one is made and hidden.
        max_tokens = 1
    specs = []
    tokenized = encode_each(
        model,
        prompts,
        "prompt",
        namespace=asked.namespace,
        add_special_tokens=asked.add_special_tokens,
    )
    for i, prompt_ids in enumerate(tokenized):
        ids = openai_common.truncated(asked, prompt_ids, model)
        spec = Spec(
            rid=f"{rid}_{i}",
            model=model.name,
            token_ids=ids,
            params=openai_common.sampling_params(
                asked, model, len(ids), max_tokens, COMPLETION_TOKENS
            ),
            text_model=model.text,
            stop=asked.stop_search,
            namespace=asked.namespace,
            priority=asked.priority,
            stream_interval=asked.stream_interval or model.stream_interval,
            skip_special_tokens=asked.skip_special_tokens,
            discard_output=discard,
            shows_stop=asked.include_stop_str_in_output,
        )
        count.add(spec, model.limits.context_length)
        specs.append(spec)
    if not asked.echo:
        return specs, None
    if asked.truncate_prompt_tokens is not None:
        prompts = [spec.token_ids.tolist() for spec in specs]
    return specs, [_echo(model, prompt) for prompt in prompts]


class _Echo(NamedTuple):
    """A prompt that is shown before its answers.

    Attributes:
        has_special: its special tokens are a part of the text, since the client chose them by their
            ids.
    """

    text: str
    has_special: bool


def _echo(model: ModelView, prompt: str | list[int]) -> _Echo:
    if isinstance(prompt, str):
        return _Echo(prompt, False)
    text = "" if model.text is None else model.text.decode(prompt, skip_special_tokens=False)
    return _Echo(text, True)


class _CompletionRenderer:
    """Completions, whole or in chunks, with the prompt in front if it is echoed."""

    cumulative = False

    def __init__(
        self,
        job: Job,
        asked: CompletionRequest,
        shown: str,
        model: ModelView,
        echo: list[_Echo] | None,
    ) -> None:
        self._job = job
        self._options = openai_common.AnswerOptions.of(asked)
        self._usage = openai_common.ChunkUsage(self._options, job)
        self._model = model
        self._names = self._options.token_names(model)
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
        for shows_prompt in (self._echo is not None, self._options.prompt_logprobs is not None):
            if delta.first and shows_prompt:
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
        options = self._options
        return options.are_plain and not spec.discard_output and options.top_tokens is None

    def last_events(self) -> Iterable[object]:
        if self._options.include_usage:
            yield self._head | {"choices": [], "usage": openai_common.usage(self._job)}

    def body(self) -> object:
        choices = [
            self._whole(choice) | self._choice(choice, choice.take())
            for generation in self._job.generations
            for choice in generation.choices
        ]
        return self._head | {"choices": choices, "usage": openai_common.usage(self._job)}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        """Fields that clients of vLLM read of every whole answer."""
        of_prompt = self._options.of_prompt(self._model, choice.generation)
        return {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": of_prompt}

    def _choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        spec = choice.generation.spec
        if spec.discard_output:
            delta = delta._replace(text="", token_ids=[], logprobs=[])
        first, start = delta.first, delta.total - len(delta.token_ids)
        index = openai_common.choice_index(choice)
        echoed = None if self._echo is None else self._echo[choice.generation.number]
        echo = "" if echoed is None else echoed.text
        result: dict[str, Any] = {
            "index": index,
            "text": echo + delta.text if first else delta.text,
            "logprobs": None,
        }
        if self._options.top_tokens is not None:
            entries = delta.logprobs
            offsets = [len(echo) + begin for begin in choice.text_begins(start, len(entries))]
            if first and echoed is not None:
                entries = [*choice.generation.prompt_logprobs, *entries]
                offsets = [*_prompt_offsets(spec, echoed), *offsets]
            result["logprobs"] = logprobs.legacy(self._names, entries, offsets)
        if self._options.return_token_ids:
            result["token_ids"] = delta.token_ids
            result["prompt_token_ids"] = spec.token_ids.tolist() if first else None
        return result | openai_common.ending(choice, delta.finish)


def _prompt_offsets(spec: Spec, echo: _Echo) -> list[int]:
    """Return the offset of each prompt token in the echoed text."""
    skips = spec.skip_special_tokens and not echo.has_special
    detokenizer = new_detokenizer(spec.text_model, skips)
    offsets, length = [], 0
    for token in spec.token_ids.tolist():
        offsets.append(length)
        length += len(detokenizer.push(token))
    return offsets
