"""``POST /generate``, SGLang's native shape."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pd.core.errors import InvalidRequestError
from pd.core.sampling_params import MAX_TOP_LOGPROBS
from pd.proxy import logprobs, sampling
from pd.proxy.access import caller_of
from pd.proxy.fields import Fields
from pd.proxy.generation import Spec
from pd.proxy.job import Job
from pd.proxy.service import (
    Names,
    TokenCount,
    check_rid,
    encode,
    read_names,
    read_namespace,
    read_prompts,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.requests import Request
    from starlette.responses import Response

    from pd.core.messages import TokenLogprobs
    from pd.proxy.generation import Choice, Delta
    from pd.proxy.service import ModelView, Service

ENDPOINT = "/generate"
DEFAULT_MAX_TOKENS = 128
# Text and id of a token take about so many bytes of JSON.
_CUMULATIVE_TOKEN_BYTES = 11

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "image_data": (),
    "audio_data": (),
    "video_data": (),
    "input_embeds": (),
    "lora_path": (),
    "session_params": (),
    "custom_logit_processor": (),
    "token_ids_logprob": (),
    "return_hidden_states": (False,),
    "response_format": (),
    "tools": ([],),
}

# What SamplingParams calls differently.
_NATIVE_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "top_logprobs": "top_logprobs_num",
}


class _Sampling(NamedTuple):
    """``sampling_params``, read.

    Attributes:
        kwargs: of SamplingParams, but for ``max_tokens``.
        max_tokens: None leaves it to the default, 0 wants no output.
    """

    kwargs: dict[str, Any]
    max_tokens: int | None
    stop: tuple[str, ...]
    skip_special_tokens: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request, read but not checked against the model.

    Attributes:
        prompts: texts or token ids (``source`` is the field they stood in), not checked against the
            model; ``sampling`` has an entry for each, mostly the same.
        names: the request's, then one per prompt.
    """

    model: str | None
    prompts: list[str | list[int]]
    source: str
    sampling: list[_Sampling]
    names: list[Names]
    stream: bool
    incremental: bool
    return_logprob: bool
    logprob_start: int
    top_logprobs: int
    namespace: str
    priority: int
    timeout: float | None
    as_list: bool


class GenerateAPI:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: Request) -> Response:
        async with self._service.body(request) as body:
            asked = await body.read(lambda fields: _read(fields, request))
            model = await self._service.model(asked.model)
            self._service.admit(len(asked.prompts))
            specs = await body.run(_prepare, asked, model)
        job = Job(
            asked.names[0].rid,
            ENDPOINT,
            owner=caller_of(request.scope).owner,
            streaming=asked.stream,
            abort_is_result=True,
        )
        return self._service.respond(job, specs, _Renderer(job, asked, model), asked.timeout)


def _read(fields: Fields, request: Request) -> _Asked:
    """Raises InvalidRequestError."""
    fields.refuse(UNSUPPORTED | sampling.UNSUPPORTED_SAMPLING)
    prompts, batch, source = _read_input(fields)
    own = _read_sampling(fields, len(prompts), batch)
    several = own[0].kwargs.get("n", 1) > 1
    start = fields.integer("logprob_start_len")
    start = -1 if start is None else start
    if start < -1:
        raise fields.wrong("logprob_start_len", "at least -1 (-1: output only)")
    top = fields.integer("top_logprobs_num") or 0
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise fields.wrong("top_logprobs_num", f"between 0 and {MAX_TOP_LOGPROBS}")
    return _Asked(
        model=fields.string("model"),
        prompts=prompts,
        source=source,
        sampling=own,
        names=_read_all_names(fields, request, len(prompts), batch),
        stream=fields.boolean("stream"),
        incremental=fields.boolean("incremental"),
        return_logprob=fields.boolean("return_logprob"),
        logprob_start=start,
        top_logprobs=top,
        namespace=read_namespace(fields),
        priority=sampling.read_priority(fields),
        timeout=sampling.read_timeout(fields),
        as_list=batch or several,
    )


def _prepare(asked: _Asked, model: ModelView) -> list[Spec]:
    """The prompts as they go to the nodes. Raises InvalidRequestError."""
    specs, count = [], TokenCount()
    for prompt, names, own in zip(asked.prompts, asked.names[1:], asked.sampling, strict=True):
        spec = _spec(asked, model, prompt, asked.source, names.rid, own)
        count.add(spec, model.limits.context_length)
        specs.append(spec)
    return specs


def _spec(
    asked: _Asked,
    model: ModelView,
    prompt: str | list[int],
    source: str,
    rid: str,
    own: _Sampling,
) -> Spec:
    if own.stop:
        model.need_text("sampling_params.stop")
    ids = encode(model, prompt, source)
    wanted = own.max_tokens
    limits = model.limits
    limits.check_prompt(len(ids), wanted or 1, explicit=wanted is not None)
    discard = wanted == 0
    if wanted is None:
        wanted = limits.default_max_tokens(len(ids), DEFAULT_MAX_TOKENS)
    kwargs = own.kwargs | {"max_tokens": max(wanted, 1) if discard else wanted}
    if asked.return_logprob:
        kwargs |= {"logprobs": True, "top_logprobs": asked.top_logprobs}
        if asked.logprob_start > len(ids):
            raise InvalidRequestError(
                f"logprob_start_len is {asked.logprob_start}, but the prompt has only "
                f"{len(ids)} tokens",
                param="logprob_start_len",
            )
        if 0 <= asked.logprob_start < len(ids):
            kwargs["prompt_logprobs_start"] = asked.logprob_start
    try:
        params = sampling.make_params(kwargs, limits.vocab_size)
    except InvalidRequestError as error:
        raise _renamed(error) from None
    return Spec(
        rid=rid,
        model=model.name,
        token_ids=ids,
        params=params,
        text_model=model.text,
        stop=own.stop,
        namespace=asked.namespace,
        priority=asked.priority,
        skip_special_tokens=own.skip_special_tokens,
        discard_output=discard,
    )


def _read_input(fields: Fields) -> tuple[list[str | list[int]], bool, str]:
    """Prompts, whether they are a batch, and which field they came from."""
    given = [name for name in ("text", "input_ids") if fields.has(name)]
    if len(given) != 1:
        have = "both are there" if given else "neither is there"
        raise InvalidRequestError(f"exactly one of text and input_ids is needed; {have}")
    source = given[0]
    prompts, batch = read_prompts(fields, source)
    wanted = str if source == "text" else list
    for prompt in prompts:
        if type(prompt) is not wanted:
            kind = "a string or a list of strings"
            ids = "a list of token ids or a list of such lists"
            raise fields.wrong(source, kind if source == "text" else ids)
    return prompts, batch, source


def _read_sampling(fields: Fields, num_prompts: int, batch: bool) -> list[_Sampling]:
    """Sampling parameters per prompt: one object for all, or a list with one for each."""
    value = fields.raw("sampling_params")
    if type(value) is list and batch:
        if len(value) != num_prompts or any(type(item) is not dict for item in value):
            raise fields.wrong("sampling_params", f"an object or a list of {num_prompts} objects")
        each = [_read_one_sampling(Fields(item, "sampling_params.")) for item in value]
        if len({own.kwargs.get("n", 1) for own in each}) > 1:
            raise InvalidRequestError("n must be the same for all prompts of a batch", param="n")
        return each
    own = fields.mapping("sampling_params") or Fields({}, "sampling_params.")
    return [_read_one_sampling(own)] * num_prompts


def _read_one_sampling(fields: Fields) -> _Sampling:
    kwargs = sampling.read_common(fields)
    seed_name = "sampling_seed" if fields.has("sampling_seed") else "seed"
    kwargs["seed"] = sampling.read_seed(fields, seed_name)
    kwargs["min_tokens"] = fields.integer("min_new_tokens") or 0
    return _Sampling(
        kwargs=kwargs,
        max_tokens=fields.integer("max_new_tokens"),
        stop=sampling.read_stop(fields),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
    )


def _read_all_names(fields: Fields, request: Request, num_prompts: int, batch: bool) -> list[Names]:
    """The request's, then one per prompt."""
    given = fields.raw("rid")
    if type(given) is list:
        if not batch or len(given) != num_prompts or any(type(r) is not str for r in given):
            raise fields.wrong("rid", f"a string, or for a batch a list of {num_prompts} strings")
        for rid in given:
            check_rid(fields, "rid", rid)
        return [read_names(Fields({}), request, ""), *(Names(rid, rid) for rid in given)]
    whole = read_names(fields, request, "")
    if not batch:
        return [whole, whole]
    return [whole, *(Names(f"{whole.rid}_{i}", f"{whole.shown}_{i}") for i in range(num_prompts))]


def _renamed(error: InvalidRequestError) -> InvalidRequestError:
    """The same error in this endpoint's names."""
    param = error.param or ""
    native = _NATIVE_NAMES.get(param, param)
    message = error.message.replace(param, native, 1) if param else error.message
    return InvalidRequestError(message, param=native or None)


class _Renderer:
    """Results per choice.

    Streamed ones are cumulative unless asked otherwise. Log probabilities are not, or a stream
    would grow with the square of its length: those of the prompt are in the first event of a choice
    and in the last one; those of the output are in the event of their token, and in the last event
    of a cumulative stream all together, so that this one is the whole result.
    """

    def __init__(self, job: Job, asked: _Asked, model: ModelView) -> None:
        self._job = job
        self._asked = asked
        self._model = model
        self.cumulative = not asked.incremental

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
        if self._asked.as_list:
            generation = choice.generation
            index = generation.number * generation.spec.params.n + choice.index
            result = {"index": index} | result
        yield result

    def last_events(self) -> Iterable[object]:
        return ()

    def body(self) -> object:
        results = [
            self._result(choice, choice.take(), cumulative=True)
            for generation in self._job.generations
            for choice in generation.choices
        ]
        return results if self._asked.as_list else results[0]

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
        if self._asked.return_logprob:
            if delta.first or delta.finish is not None:
                meta |= self._logprobs("input", choice.generation.prompt_logprobs)
            meta |= self._logprobs("output", entries)
        return {"text": text, "output_ids": token_ids, "meta_info": meta}

    def _meta(self, choice: Choice, delta: Delta, total: int) -> dict[str, Any]:
        generation = choice.generation
        ended = generation.finished_at or time.monotonic()
        finish: dict[str, Any] | None = None
        if delta.finish is not None:
            finish = {"type": delta.finish.type}
            if delta.finish.matched is not None:
                finish["matched"] = delta.finish.matched
        return {
            "id": self._id(choice),
            "finish_reason": finish,
            "prompt_tokens": len(generation.spec.token_ids),
            "completion_tokens": total,
            "cached_tokens": generation.cached_tokens,
            "e2e_latency": ended - generation.created,
            "stages": generation.stages(),
        }

    def _id(self, choice: Choice) -> str:
        """The answer's id: several answers to one prompt have one each."""
        generation = choice.generation
        shown = self._asked.names[1 + generation.number].shown
        return shown if generation.spec.params.n == 1 else f"{shown}_{choice.index}"

    def _logprobs(self, side: str, entries: list[TokenLogprobs]) -> dict[str, Any]:
        text = self._model.text
        result: dict[str, Any] = {f"{side}_token_logprobs": logprobs.chosen(text, entries)}
        if self._asked.top_logprobs:
            result[f"{side}_top_logprobs"] = logprobs.likeliest(text, entries)
        return result
