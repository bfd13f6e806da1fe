"""``POST /v1/score``, SGLang's: how likely certain tokens are after a query and an item."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pd.core.errors import InvalidRequestError, NodeFailedError
from pd.proxy.api.event_stream import PLAIN_EVENTS
from pd.proxy.api.openai_common import count_usage
from pd.proxy.api.prompts import RequestTotals, encode_prompts
from pd.proxy.api.service import PlannedAnswer, make_job, name_request
from pd.proxy.dispatch.generation import PromptSpec
from pd.proxy.http.bodies import MAX_BODY_BYTES, estimate_text_bytes
from pd.proxy.http.typed_routes import ClientRequest
from pd.proxy.requests.known_fields import SCORE
from pd.proxy.requests.sampling import make_params
from pd.proxy.requests.score import ScoreRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd.core.sampling_params import SamplingParams
    from pd.proxy.api.prompts import ModelView
    from pd.proxy.api.service import Service
    from pd.proxy.dispatch.generation import Choice, Delta
    from pd.proxy.dispatch.job import Job
    from pd.proxy.requests.score import Part

# Limit on the characters or token ids of all prompts: the same as for a batch of prompts.
MAX_CHARACTERS = MAX_BODY_BYTES


class ScoreAPI:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: ClientRequest, body: ScoreRequest) -> None:
        """SGLang's scores: the probabilities of label tokens after the query and each item."""
        answer = await self._plan_answer(request, body)
        del body  # it may hold megabytes
        await self._service.serve(request, answer)

    async def _plan_answer(self, request: ClientRequest, body: ScoreRequest) -> PlannedAnswer:
        total = sum(map(len, body.items)) + len(body.query) * len(body.items)
        if total > MAX_CHARACTERS:
            raise InvalidRequestError(
                f"{len(body.items)} items, each with the query, have {total} characters or token "
                f"ids (at most {MAX_CHARACTERS}); send fewer items",
                param="items",
            )
        model = await self._service.find_model(body.model)
        self._service.check_admission(len(body.items))
        names = name_request(body, request, "score-")
        prompts = body.join_prompts()
        specs = await request.raw_body.run_tokenizing(
            _prepare_prompts,
            body,
            prompts,
            names.rid,
            model,
            text_bytes=estimate_text_bytes(prompts),
        )
        job = make_job(request, names, SCORE, is_batch=True)
        renderer = _ScoreRenderer(job, model.shown, applies_softmax=body.apply_softmax)
        return PlannedAnswer(job, specs, renderer, body.timeout)


def _prepare_prompts(
    body: ScoreRequest, prompts: list[Part], rid: str, model: ModelView
) -> list[PromptSpec]:
    """Tokenize the prompts. Raises InvalidRequestError."""
    params = _make_params(body, model)
    totals, specs = RequestTotals(), []
    tokenized = encode_prompts(
        model,
        prompts,
        "items",
        namespace=body.namespace,
        add_special_tokens=body.add_special_tokens,
    )
    for number, ids in enumerate(tokenized):
        model.limits.check_prompt(len(ids), 1, explicit=False)
        spec = PromptSpec(
            rid=f"{rid}_{number}",
            model=model.name,
            token_ids=ids,
            params=params,
            text_model=None,
            namespace=body.namespace,
            priority=body.priority,
            prefix_lease=body.prefix_lease,
        )
        totals.add_prompt(spec, model.limits.context_length)
        specs.append(spec)
    return specs


def _make_params(body: ScoreRequest, model: ModelView) -> SamplingParams:
    """Make parameters of one token with the log probabilities of the labels."""
    arguments: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "seed": 0, "logprobs": True}
    arguments["logprob_token_ids"] = tuple(body.label_token_ids)
    try:
        return make_params(arguments, model.limits.vocab_size)
    except InvalidRequestError as error:
        message = error.message.replace("logprob_token_ids", "label_token_ids")
        raise InvalidRequestError(message, param="label_token_ids") from None


class _ScoreRenderer:
    """Renders a list of scores for each item."""

    is_cumulative = False
    event_form = PLAIN_EVENTS

    def __init__(self, job: Job, model: str, *, applies_softmax: bool) -> None:
        self._job = job
        self._model = model
        self._applies_softmax = applies_softmax

    def estimate_bytes(self, choice: Choice, delta: Delta) -> int:
        return 0  # scores are never streamed

    def render_delta(self, choice: Choice, delta: Delta) -> Iterable[object]:
        return ()

    def is_plain(self, choice: Choice) -> bool:
        return False

    def render_end(self) -> Iterable[object]:
        return ()

    def render_whole(self) -> object:
        choices = [generation.choices[0] for generation in self._job.generations]
        usage = count_usage(self._job)
        # The token that nodes draw for each item is not shown.
        usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return {
            "id": self._job.shown,
            "object": "scoring",
            "model": self._model,
            "scores": [self._score(choice) for choice in choices],
            "usage": usage,
        }

    def _score(self, choice: Choice) -> list[float]:
        labels = choice.generation.spec.params.logprob_token_ids
        entry = choice.logprobs[0]
        if entry.top_ids[-len(labels) :] != list(labels):
            raise NodeFailedError("a node sent log probabilities of other tokens than the labels")
        logprobs = entry.top_logprobs[-len(labels) :]
        if not self._applies_softmax:
            return [math.exp(each) for each in logprobs]
        largest = max(logprobs)
        if largest == -math.inf:
            return [1 / len(labels)] * len(labels)
        weights = [math.exp(each - largest) for each in logprobs]
        return [weight / sum(weights) for weight in weights]
