"""``POST /generate``, SGLang's native shape."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from pd.core.errors import InvalidRequestError
from pd.proxy import logprobs
from pd.proxy.access import caller_of
from pd.proxy.bodies import body_of, text_size
from pd.proxy.choices_api import choose
from pd.proxy.fields import split_prompts
from pd.proxy.generation import Spec
from pd.proxy.job import Job
from pd.proxy.native_sampling import native_params
from pd.proxy.requests.native import GENERATE_TOKENS, GenerateRequest
from pd.proxy.service import Names, TokenCount, encode_each, names_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    import numpy.typing as npt

    from pd.core.messages import TokenLogprobs
    from pd.proxy.generation import Choice, Delta
    from pd.proxy.requests.native import PromptOptions
    from pd.proxy.service import ModelView, Service

    IntArray = npt.NDArray[np.int32]

ENDPOINT = "/generate"
# Text and id of a token take about so many bytes of JSON.
_CUMULATIVE_TOKEN_BYTES = 11


class _Prompt(NamedTuple):
    """One prompt of a request: a text or token ids, not checked against the model yet."""

    value: str | list[int]
    names: Names
    options: PromptOptions


class GenerateAPI:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: Request, asked: GenerateRequest) -> Response:
        """SGLang's native endpoint: text or token ids in, text, token ids and timings out."""
        if asked.choices is not None:
            return await choose(self._service, ENDPOINT, request, asked)
        values, is_batch = split_prompts(asked.prompts)
        model = await self._service.model(asked.model)
        self._service.admit(len(values))
        whole = names_of(asked, request, "")
        names = _names_of_prompts(asked, whole, len(values), is_batch=is_batch)
        each = zip(values, names, asked.options(len(values)), strict=True)
        prompts = [_Prompt(*prompt) for prompt in each]
        specs = await body_of(request.scope).tokenize(
            _prepare, asked, prompts, model, text=text_size(values)
        )
        job = Job(
            whole.rid,
            ENDPOINT,
            owner=caller_of(request.scope).owner,
            is_named=asked.rid is not None or whole.is_given,
            streaming=asked.stream,
            abort_is_result=True,
        )
        shown = [prompt.names.shown for prompt in prompts]
        as_list = is_batch or prompts[0].options.sampling.n > 1
        renderer = _GenerateRenderer(
            job, model, shown, as_list=as_list, cumulative=not asked.incremental
        )
        return self._service.respond(job, specs, renderer, asked.timeout, whole.shown)


def _names_of_prompts(
    asked: GenerateRequest, whole: Names, count: int, *, is_batch: bool
) -> list[Names]:
    if isinstance(asked.rid, list):
        return [Names(rid, rid, True) for rid in asked.rid]
    if not is_batch:
        return [whole]
    return [Names(f"{whole.rid}_{i}", f"{whole.shown}_{i}", whole.is_given) for i in range(count)]


def _prepare(asked: GenerateRequest, prompts: list[_Prompt], model: ModelView) -> list[Spec]:
    """The prompts as they go to the nodes. Raises InvalidRequestError."""
    specs, count = [], TokenCount()
    values = [prompt.value for prompt in prompts]
    tokenized = encode_each(model, values, asked.source, namespace=asked.namespace)
    for prompt in prompts:
        spec = _spec(asked, prompt, tokenized, model)
        count.add(spec, model.limits.context_length)
        specs.append(spec)
    return specs


def _spec(
    asked: GenerateRequest, prompt: _Prompt, tokenized: Iterator[IntArray], model: ModelView
) -> Spec:
    """The next prompt as it goes to the nodes; ``tokenized`` yields its token ids."""
    options, limits = prompt.options, model.limits
    sampling = options.sampling
    if sampling.stop:
        model.need_text("sampling_params.stop")
    ids = next(tokenized)
    wanted = sampling.max_new_tokens
    limits.check_prompt(len(ids), wanted or 1, explicit=wanted is not None)
    if wanted is None:
        wanted = limits.default_max_tokens(len(ids), GENERATE_TOKENS)
    discard = wanted == 0
    arguments = sampling.arguments() | {"max_tokens": 1 if discard else wanted}
    if options.return_logprob:
        arguments |= {"logprobs": True, "top_logprobs": options.top_logprobs_num}
        start = options.logprob_start_len
        if start > len(ids):
            raise InvalidRequestError(
                f"logprob_start_len is {start}, but the prompt has only {len(ids)} tokens",
                param="logprob_start_len",
            )
        if 0 <= start < len(ids):
            arguments["prompt_logprobs_start"] = start
    return Spec(
        rid=prompt.names.rid,
        model=model.name,
        token_ids=ids,
        params=native_params(arguments, limits.vocab_size),
        text_model=model.text,
        stop=sampling.stop_search,
        namespace=asked.namespace,
        priority=asked.priority,
        stream_interval=sampling.stream_interval or model.stream_interval,
        skip_special_tokens=sampling.skip_special_tokens,
        discard_output=discard,
        shows_stop=sampling.no_stop_trim,
    )


class _GenerateRenderer:
    """Results per choice.

    Streamed ones are cumulative unless asked otherwise. Log probabilities are not, or a stream
    would grow with the square of its length: those of the prompt are in the first event of a choice
    and in the last one; those of the output are in the event of their token, and in the last event
    of a cumulative stream all together, so that this one is the whole result.
    """

    def __init__(
        self,
        job: Job,
        model: ModelView,
        shown: list[str],
        *,
        as_list: bool,
        cumulative: bool,
    ) -> None:
        """``shown``: each prompt's name in the answer."""
        self._job = job
        self._model = model
        self._shown = shown
        self._as_list = as_list
        self.cumulative = cumulative

    def size(self, choice: Choice, delta: Delta) -> int:
        entries = len(delta.logprobs)
        generation = choice.generation
        if delta.first or delta.finish is not None:
            entries += len(generation.prompt_logprobs)
        if delta.finish is not None and self.cumulative:
            entries += len(choice.logprobs)
        size = logprobs.size(entries, generation.spec.params.top_logprobs) + len(delta.text)
        return size + (_CUMULATIVE_TOKEN_BYTES * delta.total if self.cumulative else 0)

    def events(self, choice: Choice, delta: Delta) -> Iterable[object]:
        result = self._result(choice, delta, cumulative=self.cumulative)
        if self._as_list:
            generation = choice.generation
            index = generation.number * generation.spec.params.n + choice.index
            result = {"index": index} | result
        yield result

    def is_plain(self, choice: Choice) -> bool:
        return False  # each event has its times

    def last_events(self) -> Iterable[object]:
        return ()

    def body(self) -> object:
        results = [
            self._result(choice, choice.take(), cumulative=True)
            for generation in self._job.generations
            for choice in generation.choices
        ]
        return results if self._as_list else results[0]

    def _result(self, choice: Choice, delta: Delta, *, cumulative: bool) -> dict[str, Any]:
        discard = choice.generation.spec.discard_output
        total = 0 if discard else delta.total
        if discard:
            text, token_ids, entries = "", [], []
        elif cumulative:
            text, token_ids = choice.text_until(delta), choice.output_ids[:total]
            ended = delta.finish is not None
            entries = choice.logprobs[:total] if ended else delta.logprobs
        else:
            text, token_ids, entries = delta.text, delta.token_ids, delta.logprobs
        meta = self._meta(choice, delta, total)
        params = choice.generation.spec.params
        if params.logprobs:
            top = params.top_logprobs
            if delta.first or delta.finish is not None:
                meta |= self._logprobs("input", choice.generation.prompt_logprobs, top)
            meta |= self._logprobs("output", entries, top)
        return {"text": text, "output_ids": token_ids, "meta_info": meta}

    def _meta(self, choice: Choice, delta: Delta, total: int) -> dict[str, Any]:
        generation = choice.generation
        ended = generation.finished_at or time.monotonic()
        failovers = {"failovers": generation.told_failovers()} if generation.failovers else {}
        return {
            "id": self._id(choice),
            "finish_reason": None if delta.finish is None else delta.finish.told(total),
            "prompt_tokens": len(generation.spec.token_ids),
            "completion_tokens": total,
            "cached_tokens": generation.cached_tokens,
            "e2e_latency": ended - generation.created,
            "stages": generation.stages(),
            **failovers,
        }

    def _id(self, choice: Choice) -> str:
        """The answer's id: several answers to one prompt have one each."""
        generation = choice.generation
        shown = self._shown[generation.number]
        return shown if generation.spec.params.n == 1 else f"{shown}_{choice.index}"

    def _logprobs(self, side: str, entries: list[TokenLogprobs], top: int) -> dict[str, Any]:
        text = self._model.text
        result: dict[str, Any] = {f"{side}_token_logprobs": logprobs.chosen(text, entries)}
        if top:
            result[f"{side}_top_logprobs"] = logprobs.likeliest(text, entries)
        return result
