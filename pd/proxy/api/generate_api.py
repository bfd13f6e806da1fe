"""``POST /generate``, SGLang's native shape."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from pd.core.errors import InvalidRequestError
from pd.proxy.api import logprobs, openai_common
from pd.proxy.api.choices_api import plan_choice
from pd.proxy.api.event_stream import PLAIN_EVENTS
from pd.proxy.api.prompts import RequestTotals, encode_prompts
from pd.proxy.api.service import PlannedAnswer, RequestNames, make_job, name_request
from pd.proxy.dispatch.generation import PromptSpec
from pd.proxy.http.bodies import estimate_text_bytes
from pd.proxy.http.typed_routes import ClientRequest
from pd.proxy.requests.fields import split_prompts
from pd.proxy.requests.native import GENERATE_TOKENS, GenerateRequest
from pd.proxy.requests.sampling import make_native_params

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    import numpy.typing as npt

    from pd.core.messages import TokenLogprobs
    from pd.core.sampling_params import SamplingParams
    from pd.proxy.api.prompts import ModelView
    from pd.proxy.api.service import Service
    from pd.proxy.dispatch.generation import Choice, Delta
    from pd.proxy.dispatch.job import Job
    from pd.proxy.requests.native import PromptOptions

    IntArray = npt.NDArray[np.int32]

ENDPOINT = "/generate"
# Estimated size of a token's text and id in JSON.
_CUMULATIVE_TOKEN_BYTES = 11


class _Prompt(NamedTuple):
    """One prompt of a request, a text or token ids, not checked against the model yet."""

    value: str | list[int]
    names: RequestNames
    options: PromptOptions


class GenerateAPI:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: ClientRequest, body: GenerateRequest) -> None:
        """SGLang's native endpoint: text or token ids in, text, token ids and timings out."""
        if body.choices is None:
            answer = await self._plan_answer(request, body)
        else:
            answer = await plan_choice(self._service, ENDPOINT, request, body)
        del body  # it may hold megabytes, and an answer may take hours
        await self._service.serve(request, answer)

    async def _plan_answer(self, request: ClientRequest, body: GenerateRequest) -> PlannedAnswer:
        values, is_batch = split_prompts(body.prompts)
        model = await self._service.find_model(body.model)
        self._service.check_admission(len(values))
        whole = name_request(body, request, "")
        names = _name_prompts(body, whole, len(values), is_batch=is_batch)
        each = zip(values, names, body.split_options(len(values)), strict=True)
        prompts = [_Prompt(*prompt) for prompt in each]
        specs = await request.raw_body.run_tokenizing(
            _prepare_prompts, body, prompts, model, text_bytes=estimate_text_bytes(values)
        )
        whole = whole._replace(is_given=body.rid is not None or whole.is_given)
        job = make_job(request, whole, ENDPOINT, is_streamed=body.stream, abort_is_result=True)
        shown = [prompt.names.shown for prompt in prompts]
        as_list = is_batch or prompts[0].options.sampling.n > 1
        renderer = _GenerateRenderer(
            job, model, shown, as_list=as_list, is_cumulative=not body.incremental
        )
        return PlannedAnswer(job, specs, renderer, body.timeout)


def _name_prompts(
    body: GenerateRequest, whole: RequestNames, count: int, *, is_batch: bool
) -> list[RequestNames]:
    if isinstance(body.rid, list):
        return [RequestNames(rid, rid, True) for rid in body.rid]
    if not is_batch:
        return [whole]
    return [
        RequestNames(f"{whole.rid}_{i}", f"{whole.shown}_{i}", whole.is_given) for i in range(count)
    ]


def _prepare_prompts(
    body: GenerateRequest, prompts: list[_Prompt], model: ModelView
) -> list[PromptSpec]:
    """Tokenize the prompts, and check their options. Raises InvalidRequestError."""
    specs, totals = [], RequestTotals()
    values = [prompt.value for prompt in prompts]
    tokenized = encode_prompts(
        model,
        values,
        body.source,
        namespace=body.namespace,
        add_special_tokens=body.add_special_tokens,
    )
    for prompt in prompts:
        spec = _make_spec(body, prompt, tokenized, model)
        totals.add_prompt(spec, model.limits.context_length)
        specs.append(spec)
    return specs


def _make_spec(
    body: GenerateRequest, prompt: _Prompt, tokenized: Iterator[IntArray], model: ModelView
) -> PromptSpec:
    """Make the spec of the next prompt. ``tokenized`` yields its token ids."""
    options, limits = prompt.options, model.limits
    sampling = options.sampling
    for name in ("stop", "stop_regex"):
        if getattr(sampling, name):
            model.require_text(f"sampling_params.{name}")
    ids = next(tokenized)
    wanted = sampling.max_new_tokens
    limits.check_prompt(len(ids), wanted or 1, explicit=wanted is not None)
    if wanted is None:
        wanted = limits.choose_max_tokens(len(ids), GENERATE_TOKENS)
    discard = wanted == 0
    arguments = sampling.make_arguments() | {"max_tokens": 1 if discard else wanted}
    if sampling.bad_words:
        arguments["bad_sequences"] = model.encode_bad_words(sampling.bad_words)
    if options.return_logprob:
        arguments |= {"logprobs": True, "top_logprobs": options.top_logprobs_num}
        arguments["logprob_token_ids"] = options.token_ids
        start = options.logprob_start_len
        if start < 0 and discard:
            start = (
                0  # no output is asked for, so the client wants the whole prompt's, as in SGLang
            )
        if start > len(ids):
            raise InvalidRequestError(
                f"logprob_start_len is {start}, but the prompt has only {len(ids)} tokens",
                param="logprob_start_len",
            )
        if 0 <= start < len(ids):
            arguments["prompt_logprobs_start"] = start
    return PromptSpec(
        rid=prompt.names.rid,
        model=model.name,
        token_ids=ids,
        params=make_native_params(arguments, limits.vocab_size),
        text_model=model.text,
        stop=sampling.stop_search,
        namespace=body.namespace,
        priority=body.priority,
        prefix_lease=body.prefix_lease,
        stream_interval=sampling.stream_interval or model.stream_interval,
        skip_special_tokens=sampling.skip_special_tokens,
        discard_output=discard,
        shows_stop=sampling.no_stop_trim,
    )


class _GenerateRenderer:
    """Renders a result per choice.

    Streams are cumulative by default, but log probabilities are not repeated in every event,
    because the stream would grow with the square of its length. The prompt's are in the first and
    the last event of a choice. The output's are in the event of their token. A cumulative stream
    repeats all of them in its last event, because this event is the whole result.
    """

    event_form = PLAIN_EVENTS

    def __init__(
        self,
        job: Job,
        model: ModelView,
        shown: list[str],
        *,
        as_list: bool,
        is_cumulative: bool,
    ) -> None:
        """``shown``: names of the prompts in the answer."""
        self._job = job
        self._model = model
        self._shown = shown
        self._as_list = as_list
        self.is_cumulative = is_cumulative

    def estimate_bytes(self, choice: Choice, delta: Delta) -> int:
        entries = len(delta.logprobs)
        generation = choice.generation
        if delta.is_first or delta.finish is not None:
            entries += len(generation.prompt_logprobs)
        if delta.finish is not None and self.is_cumulative:
            entries += len(choice.logprobs)
        size = logprobs.estimate_bytes(entries, generation.spec.params.other_logprobs) + len(
            delta.text
        )
        return size + (_CUMULATIVE_TOKEN_BYTES * delta.total if self.is_cumulative else 0)

    def render_delta(self, choice: Choice, delta: Delta) -> Iterable[object]:
        result = self._render_result(choice, delta, is_cumulative=self.is_cumulative)
        yield {"index": openai_common.number_choice(choice)} | result if self._as_list else result

    def is_plain(self, choice: Choice) -> bool:
        return False  # each event has its own times

    def render_end(self) -> Iterable[object]:
        return ()

    def render_whole(self) -> object:
        results = [
            self._render_result(choice, choice.take_delta(), is_cumulative=True)
            for generation in self._job.generations
            for choice in generation.choices
        ]
        return results if self._as_list else results[0]

    def _render_result(
        self, choice: Choice, delta: Delta, *, is_cumulative: bool
    ) -> dict[str, Any]:
        discard = choice.generation.spec.discard_output
        total = 0 if discard else delta.total
        if discard:
            text, token_ids, entries = "", [], []
        elif is_cumulative:
            text, token_ids = choice.get_text_until(delta), choice.output_ids[:total]
            ended = delta.finish is not None
            entries = choice.logprobs[:total] if ended else delta.logprobs
        else:
            text, token_ids, entries = delta.text, delta.token_ids, delta.logprobs
        meta = self._render_meta(choice, delta, total)
        params = choice.generation.spec.params
        if params.logprobs:
            if delta.is_first or delta.finish is not None:
                meta |= self._render_logprobs("input", choice.generation.prompt_logprobs, params)
            meta |= self._render_logprobs("output", entries, params)
            meta["output_token_logprobs_length"] = total
        return {"text": text, "output_ids": token_ids, "meta_info": meta}

    def _render_meta(self, choice: Choice, delta: Delta, total: int) -> dict[str, Any]:
        generation = choice.generation
        shown = self._shown[generation.number]
        if generation.spec.params.n > 1:  # each answer has its own id
            shown += f"_{choice.index}"
        ended = generation.finished_at or time.monotonic()
        failovers = {"failovers": generation.failovers_to_json()} if generation.failovers else {}
        return {
            "id": shown,
            "finish_reason": None if delta.finish is None else delta.finish.to_json(total),
            "prompt_tokens": len(generation.spec.token_ids),
            "completion_tokens": total,
            "cached_tokens": generation.cached_tokens,
            "e2e_latency": ended - generation.created,
            "stages": generation.measure_stages(),
            **failovers,
        }

    def _render_logprobs(
        self, side: str, entries: list[TokenLogprobs], params: SamplingParams
    ) -> dict[str, Any]:
        text, named = self._model.text, len(params.logprob_token_ids)
        result: dict[str, Any] = {f"{side}_token_logprobs": logprobs.render_triples(text, entries)}
        if params.top_logprobs:
            likeliest = logprobs.render_likeliest(text, entries, named)
            result[f"{side}_top_logprobs"] = likeliest
        if named:
            result[f"{side}_token_ids_logprobs"] = logprobs.render_named(text, entries, named)
        return result
