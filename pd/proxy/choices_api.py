"""``choices`` of ``POST /generate``: options become prompts, and their log probabilities an answer.

Each option goes to the nodes as one generation with the prompt before it, of which only the log
probabilities are wanted. All are computed by one node, whose scheduler lets the others wait until
the first of them has computed the prompt, and then takes them in one batch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pd.core.errors import InvalidRequestError
from pd.proxy import logprobs
from pd.proxy.access import caller_of
from pd.proxy.bodies import MAX_BODY_BYTES, body_of, text_size
from pd.proxy.choices import (
    OptionLogprobs,
    best,
    needs_unconditional,
    score,
)
from pd.proxy.fields import split_prompts
from pd.proxy.generation import FinishReason, Spec
from pd.proxy.job import Job
from pd.proxy.native_sampling import native_params
from pd.proxy.requests.native import GENERATE_TOKENS
from pd.proxy.service import TokenCount, encode, make_params, names_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt
    from starlette.requests import Request
    from starlette.responses import Response

    from pd.proxy.choices import ChoicesMethod
    from pd.proxy.generation import Choice, Delta
    from pd.proxy.requests.native import GenerateRequest
    from pd.proxy.responses import ScoredOption
    from pd.proxy.service import ModelView, Service

    IntArray = npt.NDArray[np.int32]

# Characters that are tokenized for one request: as many as a batch of the same prompts may have.
MAX_CHARACTERS = MAX_BODY_BYTES


class Option(NamedTuple):
    """One option as the nodes see it.

    Attributes:
        token_ids: the prompt's tokens and the option's.
        start: the first token that counts as the option's.
    """

    text: str
    token_ids: IntArray
    start: int

    @property
    def own_ids(self) -> IntArray:
        return self.token_ids[self.start :]


class _Prepared(NamedTuple):
    """A request for a choice, checked against the model.

    Attributes:
        specs: one for each option; where the method needs them, as many more for the options
            without the prompt.
    """

    prompt_tokens: int
    options: list[Option]
    specs: list[Spec]


async def choose(
    service: Service, endpoint: str, request: Request, asked: GenerateRequest
) -> Response:
    """Answer a request that has ``choices``. Raises InvalidRequestError."""
    choices = asked.choices or []
    ((prompt,), _) = split_prompts(asked.prompts)
    _check_characters(prompt, choices)
    model = await service.model(asked.model)
    service.admit(len(choices) * (2 if needs_unconditional(asked.choices_method) else 1))
    names = names_of(asked, request, "")
    body = body_of(request.scope)
    text = text_size([prompt] * len(choices)) + text_size(choices)
    prepared = await body.tokenize(_prepare, asked, prompt, names.rid, model, text=text)
    job = Job(
        names.rid,
        endpoint,
        owner=caller_of(request.scope).owner,
        is_named=names.is_given,
        abort_is_result=True,
        together=True,
    )
    renderer = _ChoicesRenderer(job, model, names.shown, asked.choices_method, prepared)
    return service.respond(job, prepared.specs, renderer, asked.timeout, names.shown)


def _check_characters(prompt: str | list[int], choices: list[str | list[int]]) -> None:
    """Raises InvalidRequestError for options that have more characters, with the prompt before
    each, than a batch of such prompts could have."""
    total = sum(map(len, choices)) + len(prompt) * len(choices)
    if total > MAX_CHARACTERS:
        raise InvalidRequestError(
            f"{len(choices)} choices with the prompt before each have {total} characters or token "
            f"ids; at most {MAX_CHARACTERS} are taken at once, so give fewer choices",
            param="choices",
        )


def _prepare(
    asked: GenerateRequest, prompt: str | list[int], rid: str, model: ModelView
) -> _Prepared:
    """The options as they go to the nodes. Raises InvalidRequestError."""
    _check_sampling(asked, model)
    prompt_ids = encode(model, prompt, asked.source, namespace=asked.namespace)
    count = TokenCount()
    specs: list[Spec] = []

    def add(token_ids: IntArray, start: int) -> None:
        spec = _spec(asked, f"{rid}_{len(specs)}", token_ids, start, model)
        count.add(spec, model.limits.context_length)
        specs.append(spec)

    options = []
    for number, choice in enumerate(asked.choices or ()):
        option = _option(asked, prompt, prompt_ids, choice, f"choices[{number}]", model)
        add(option.token_ids, option.start)
        options.append(option)
    if needs_unconditional(asked.choices_method):
        for option in options:
            add(option.own_ids, 0)
    return _Prepared(len(prompt_ids), options, specs)


def _check_sampling(asked: GenerateRequest, model: ModelView) -> None:
    """Refuse what would be refused if it had an effect. Raises InvalidRequestError."""
    (options,) = asked.options(1)
    sampling = options.sampling
    wanted = sampling.max_new_tokens
    most = GENERATE_TOKENS if wanted is None else max(1, wanted)
    native_params(sampling.arguments() | {"max_tokens": most}, model.limits.vocab_size)


def _option(
    asked: GenerateRequest,
    prompt: str | list[int],
    prompt_ids: IntArray,
    choice: str | list[int],
    param: str,
    model: ModelView,
) -> Option:
    """An option after the prompt. Raises InvalidRequestError naming the option."""
    option = None
    if isinstance(prompt, str) and isinstance(choice, str):
        option = _tokenized_together(asked, prompt, prompt_ids, choice, param, model)
    if option is None:
        ids = encode(model, choice, param, namespace=asked.namespace, add_special_tokens=False)
        text = choice if isinstance(choice, str) else _text(model, choice)
        option = Option(text, np.concatenate([prompt_ids, ids]), len(prompt_ids))
    try:
        model.limits.check_prompt(len(option.token_ids), 1, explicit=False)
    except InvalidRequestError as error:
        raise type(error)(f"with {param}, {error.message}", param=param) from None
    return option


def _tokenized_together(
    asked: GenerateRequest,
    prompt: str,
    prompt_ids: IntArray,
    choice: str,
    param: str,
    model: ModelView,
) -> Option | None:
    """Prompt and option as one text, as the model knows it from its training.

    The option begins with the first token that the prompt alone does not have. That is within the
    prompt where the last characters of it and the first ones of the option make one token. None if
    all of the prompt would be gone, or all of the option.
    """
    ids = encode(model, prompt + choice, param, namespace=asked.namespace)
    length = min(len(ids), len(prompt_ids))
    differs = ids[:length] != prompt_ids[:length]
    start = int(differs.argmax()) if differs.any() else length
    return Option(choice, ids, start) if 0 < start < len(ids) else None


def _text(model: ModelView, ids: list[int]) -> str:
    """The text of an option of token ids; empty without a tokenizer."""
    return "" if model.text is None else model.text.decode(ids, skip_special_tokens=False)


def _spec(
    asked: GenerateRequest, rid: str, token_ids: IntArray, start: int, model: ModelView
) -> Spec:
    """A prompt of which only log probabilities are wanted, from token ``start`` on."""
    arguments = {"max_tokens": 1, "temperature": 0.0, "seed": 0, "prompt_logprobs_start": start}
    return Spec(
        rid=rid,
        model=model.name,
        token_ids=token_ids,
        params=make_params(arguments, model.limits.vocab_size),
        text_model=None,
        namespace=asked.namespace,
        priority=asked.priority,
        discard_output=True,
    )


class _ChoicesRenderer:
    """One result for all options: the best of them, and the log probabilities of each."""

    cumulative = False

    def __init__(
        self, job: Job, model: ModelView, shown: str, method: ChoicesMethod, prepared: _Prepared
    ) -> None:
        """``shown``: the request's name in the answer."""
        self._job = job
        self._model = model
        self._shown = shown
        self._method = method
        self._prepared = prepared

    def size(self, choice: Choice, delta: Delta) -> int:
        return 0  # a request with choices is not streamed

    def events(self, choice: Choice, delta: Delta) -> Iterable[object]:
        return ()

    def is_plain(self, choice: Choice) -> bool:
        return False

    def last_events(self) -> Iterable[object]:
        return ()

    def body(self) -> object:
        choices = [c for generation in self._job.generations for c in generation.choices]
        for choice in choices:
            if choice.finish is not None and choice.finish.type == "abort":
                return self._result("", [], choice.finish, [])
        options = self._prepared.options
        found = self._logprobs()
        chosen = options[best(self._method, found)]
        scored = [self._scored(*pair) for pair in zip(options, found, strict=True)]
        ended = FinishReason("stop")
        return self._result(chosen.text, chosen.own_ids.tolist(), ended, scored)

    def _logprobs(self) -> list[OptionLogprobs]:
        """The log probabilities of each option, as the nodes sent them."""
        options = self._prepared.options
        entries = [generation.prompt_logprobs for generation in self._job.generations]
        conditional, unconditional = entries[: len(options)], entries[len(options) :]
        return [
            OptionLogprobs(option.start, conditional[number], *unconditional[number : number + 1])
            for number, option in enumerate(options)
        ]

    def _scored(self, option: Option, found: OptionLogprobs) -> ScoredOption:
        text = self._model.text
        result: ScoredOption = {
            "text": option.text,
            "score": score(self._method, found),
            "normalized_logprob": found.mean,
            "token_logprobs": logprobs.chosen(text, found.conditional),
        }
        if found.unconditional:
            alone = logprobs.chosen(text, found.unconditional)
            result["unconditional_token_logprobs"] = alone
        return result

    def _result(
        self, text: str, output_ids: list[int], finish: FinishReason, scored: list[ScoredOption]
    ) -> dict[str, Any]:
        generations = self._job.generations
        with_prompt = generations[: len(self._prepared.options)]
        now = time.monotonic()
        last = max(generations, key=lambda generation: generation.finished_at or now)
        meta = {
            "id": self._shown,
            "finish_reason": finish.told(len(output_ids)),
            "prompt_tokens": self._prepared.prompt_tokens,
            "completion_tokens": len(output_ids),
            # The option that was computed first found least; what the others found, it computed.
            "cached_tokens": min(generation.cached_tokens for generation in with_prompt),
            "e2e_latency": (last.finished_at or now) - generations[0].created,
            "stages": last.stages(),
            "choices_method": self._method,
            "choices": scored,
        }
        failovers = [told for g in generations for told in g.told_failovers()]
        if failovers:
            meta["failovers"] = failovers
        return {"text": text, "output_ids": output_ids, "meta_info": meta}
