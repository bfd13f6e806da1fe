"""``choices`` of ``POST /generate``: the answer is the likeliest of several options.

We send each option to the nodes as a generation with the prompt before it, and only want its log
probabilities. One node computes all of them. Its scheduler prefills the first, and then the others
in one batch, because they share the prompt.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pd.core.errors import InvalidRequestError
from pd.proxy.api import logprobs
from pd.proxy.api.choice_scores import (
    OptionLogprobs,
    choose_best,
    needs_unconditional,
    score_option,
)
from pd.proxy.api.event_stream import PLAIN_EVENTS
from pd.proxy.api.prompts import RequestTotals, encode_prompt
from pd.proxy.api.service import PlannedAnswer, make_job, name_request
from pd.proxy.dispatch.generation import FinishReason, PromptSpec
from pd.proxy.http.bodies import MAX_BODY_BYTES, estimate_text_bytes
from pd.proxy.requests.fields import split_prompts
from pd.proxy.requests.native import GENERATE_TOKENS
from pd.proxy.requests.sampling import make_native_params, make_params

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from pd.proxy.api.answer_schemas import ScoredOption
    from pd.proxy.api.prompts import ModelView
    from pd.proxy.api.service import Service
    from pd.proxy.dispatch.generation import Choice, Delta
    from pd.proxy.dispatch.job import Job
    from pd.proxy.http.typed_routes import ClientRequest
    from pd.proxy.requests.native import ChoicesMethod, GenerateRequest

    IntArray = npt.NDArray[np.int32]

# Limit on the characters to tokenize for a request: the same as for a batch of prompts.
MAX_CHARACTERS = MAX_BODY_BYTES


class Option(NamedTuple):
    """One option as the nodes see it.

    Attributes:
        token_ids: tokens of the prompt and the option.
        start: index of the option's first token.
    """

    text: str
    token_ids: IntArray
    start: int

    @property
    def own_ids(self) -> IntArray:
        return self.token_ids[self.start :]


class _PreparedChoice(NamedTuple):
    """A request with options, checked against the model.

    Attributes:
        specs: one per option, and as many again without the prompt if the method needs them.
    """

    prompt_tokens: int
    options: list[Option]
    specs: list[PromptSpec]


async def plan_choice(
    service: Service, endpoint: str, request: ClientRequest, body: GenerateRequest
) -> PlannedAnswer:
    """Plan the answer to a request with ``choices``. Raises InvalidRequestError."""
    choices = body.choices or []
    ((prompt,), _) = split_prompts(body.prompts)
    total = sum(map(len, choices)) + len(prompt) * len(choices)
    if total > MAX_CHARACTERS:
        raise InvalidRequestError(
            f"{len(choices)} choices with the prompt before each have {total} characters or token "
            f"ids (at most {MAX_CHARACTERS}); give fewer choices",
            param="choices",
        )
    model = await service.find_model(body.model)
    is_doubled = needs_unconditional(body.choices_method)
    service.check_admission(len(choices) * (2 if is_doubled else 1))
    names = name_request(body, request, "")
    text_bytes = estimate_text_bytes([prompt] * len(choices)) + estimate_text_bytes(choices)
    prepared = await request.raw_body.run_tokenizing(
        _prepare_options, body, prompt, names.rid, model, text_bytes=text_bytes
    )
    job = make_job(request, names, endpoint, abort_is_result=True, is_batch=True)
    renderer = _ChoicesRenderer(job, model, body.choices_method, prepared)
    return PlannedAnswer(job, prepared.specs, renderer, body.timeout)


def _prepare_options(
    body: GenerateRequest, prompt: str | list[int], rid: str, model: ModelView
) -> _PreparedChoice:
    """Tokenize the options. Raises InvalidRequestError."""
    _check_sampling(body, model)
    prompt_ids = encode_prompt(
        model,
        prompt,
        body.source,
        namespace=body.namespace,
        add_special_tokens=body.add_special_tokens,
    )
    totals = RequestTotals()
    specs: list[PromptSpec] = []

    def add_spec(token_ids: IntArray, start: int) -> None:
        spec = _make_spec(body, f"{rid}_{len(specs)}", token_ids, start, model)
        totals.add_prompt(spec, model.limits.context_length)
        specs.append(spec)

    options = []
    for number, choice in enumerate(body.choices or ()):
        option = _make_option(body, prompt, prompt_ids, choice, f"choices[{number}]", model)
        add_spec(option.token_ids, option.start)
        options.append(option)
    if needs_unconditional(body.choices_method):
        for option in options:
            add_spec(option.own_ids, 0)
    return _PreparedChoice(len(prompt_ids), options, specs)


def _check_sampling(body: GenerateRequest, model: ModelView) -> None:
    """Refuse wrong sampling parameters, although they have no effect here.

    Raises InvalidRequestError.
    """
    (options,) = body.split_options(1)
    sampling = options.sampling
    wanted = sampling.max_new_tokens
    max_tokens = GENERATE_TOKENS if wanted is None else max(1, wanted)
    arguments = sampling.make_arguments() | {"max_tokens": max_tokens}
    make_native_params(arguments, model.limits.vocab_size)


def _make_option(
    body: GenerateRequest,
    prompt: str | list[int],
    prompt_ids: IntArray,
    choice: str | list[int],
    param: str,
    model: ModelView,
) -> Option:
    """Tokenize an option after the prompt. Raises InvalidRequestError naming the option."""
    option = None
    if isinstance(prompt, str) and isinstance(choice, str):
        option = _tokenize_together(body, prompt, prompt_ids, choice, param, model)
    if option is None:
        ids = encode_prompt(
            model, choice, param, namespace=body.namespace, add_special_tokens=False
        )
        text = choice
        if not isinstance(text, str):
            text = "" if model.text is None else model.text.decode(text, skip_special_tokens=False)
        option = Option(text, np.concatenate([prompt_ids, ids]), len(prompt_ids))
    try:
        model.limits.check_prompt(len(option.token_ids), 1, explicit=False)
    except InvalidRequestError as error:
        raise type(error)(f"with {param}, {error.message}", param=param) from None
    return option


def _tokenize_together(
    body: GenerateRequest,
    prompt: str,
    prompt_ids: IntArray,
    choice: str,
    param: str,
    model: ModelView,
) -> Option | None:
    """Tokenize prompt and option as one text, because the model was trained on such tokens.

    The option begins with the first token that differs from the prompt's own. This token may also
    hold the end of the prompt, if it crosses the border. Return None if all of the prompt or all of
    the option would be gone.
    """
    ids = encode_prompt(
        model,
        prompt + choice,
        param,
        namespace=body.namespace,
        add_special_tokens=body.add_special_tokens,
    )
    length = min(len(ids), len(prompt_ids))
    differs = ids[:length] != prompt_ids[:length]
    start = int(differs.argmax()) if differs.any() else length
    return Option(choice, ids, start) if 0 < start < len(ids) else None


def _make_spec(
    body: GenerateRequest, rid: str, token_ids: IntArray, start: int, model: ModelView
) -> PromptSpec:
    """Make the spec of a prompt for its log probabilities only, from token ``start`` on."""
    arguments = {"max_tokens": 1, "temperature": 0.0, "seed": 0, "prompt_logprobs_start": start}
    return PromptSpec(
        rid=rid,
        model=model.name,
        token_ids=token_ids,
        params=make_params(arguments, model.limits.vocab_size),
        text_model=None,
        namespace=body.namespace,
        priority=body.priority,
        prefix_lease=body.prefix_lease,
        discard_output=True,
    )


class _ChoicesRenderer:
    """Renders one result for all options: the best one, and the log probabilities of each."""

    is_cumulative = False
    event_form = PLAIN_EVENTS

    def __init__(
        self,
        job: Job,
        model: ModelView,
        method: ChoicesMethod,
        prepared: _PreparedChoice,
    ) -> None:
        self._job = job
        self._model = model
        self._method = method
        self._prepared = prepared

    def estimate_bytes(self, choice: Choice, delta: Delta) -> int:
        return 0  # requests with choices are never streamed

    def render_delta(self, choice: Choice, delta: Delta) -> Iterable[object]:
        return ()

    def is_plain(self, choice: Choice) -> bool:
        return False

    def render_end(self) -> Iterable[object]:
        return ()

    def render_whole(self) -> object:
        choices = [c for generation in self._job.generations for c in generation.choices]
        for choice in choices:
            if choice.finish is not None and choice.finish.type == "abort":
                return self._render_result("", [], choice.finish, [])
        options = self._prepared.options
        entries = [generation.prompt_logprobs for generation in self._job.generations]
        conditional, unconditional = entries[: len(options)], entries[len(options) :]
        option_logprobs = [
            OptionLogprobs(option.start, conditional[number], *unconditional[number : number + 1])
            for number, option in enumerate(options)
        ]
        chosen = options[choose_best(self._method, option_logprobs)]
        scored = [self._render_option(*pair) for pair in zip(options, option_logprobs, strict=True)]
        finish = FinishReason("stop")
        return self._render_result(chosen.text, chosen.own_ids.tolist(), finish, scored)

    def _render_option(self, option: Option, option_logprobs: OptionLogprobs) -> ScoredOption:
        text = self._model.text
        result: ScoredOption = {
            "text": option.text,
            "score": score_option(self._method, option_logprobs),
            "normalized_logprob": option_logprobs.mean,
            "token_logprobs": logprobs.render_triples(text, option_logprobs.conditional),
        }
        if option_logprobs.unconditional:
            alone = logprobs.render_triples(text, option_logprobs.unconditional)
            result["unconditional_token_logprobs"] = alone
        return result

    def _render_result(
        self, text: str, output_ids: list[int], finish: FinishReason, scored: list[ScoredOption]
    ) -> dict[str, Any]:
        generations = self._job.generations
        with_prompt = generations[: len(self._prepared.options)]
        now = time.monotonic()
        last = max(generations, key=lambda generation: generation.finished_at or now)
        meta = {
            "id": self._job.shown,
            "finish_reason": finish.to_json(len(output_ids)),
            "prompt_tokens": self._prepared.prompt_tokens,
            "completion_tokens": len(output_ids),
            # The first option found only earlier requests' tokens in the cache. The others also
            # found tokens of the first one, which do not count.
            "cached_tokens": min(generation.cached_tokens for generation in with_prompt),
            "e2e_latency": (last.finished_at or now) - generations[0].created,
            "stages": last.measure_stages(),
            "choices_method": self._method,
            "choices": scored,
        }
        failovers = [failover for g in generations for failover in g.failovers_to_json()]
        if failovers:
            meta["failovers"] = failovers
        return {"text": text, "output_ids": output_ids, "meta_info": meta}
