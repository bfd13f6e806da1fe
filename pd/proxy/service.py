"""Parts that all APIs share: models, prompts, limits."""

from __future__ import annotations

import secrets
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pd.core.brief import brief
from pd.core.errors import ContextLengthError, InvalidRequestError
from pd.core.sampling_params import SEED_LIMIT, TOKEN_ID_LIMIT, SamplingParams
from pd.proxy.limits import TOO_LONG
from pd.proxy.requests.common import MAX_RID_CHARACTERS
from pd.proxy.web import ClaimingResponse, JobResponse

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    from starlette.requests import Request
    from starlette.responses import Response

    from pd.proxy.background import Background
    from pd.proxy.bodies import Bodies
    from pd.proxy.dispatcher import Dispatcher
    from pd.proxy.generation import Spec
    from pd.proxy.job import Job
    from pd.proxy.limits import Limits
    from pd.proxy.requests.native import GenerateRequest
    from pd.proxy.requests.openai import OpenAIRequest
    from pd.proxy.routing import Router
    from pd.proxy.shared import RidClaims
    from pd.proxy.tokenizer import TextModel, TextModels
    from pd.proxy.web import Renderer

    IntArray = npt.NDArray[np.int32]

# Tokens of all prompts of a request; or one prompt of the model's context, if that is longer.
MAX_REQUEST_TOKENS = 1 << 20
# Log probabilities of prompt tokens in all answers to a request; or those of one answer for the
# model's whole context, if that is more. Each takes some 25 bytes of JSON, and about four
# times that until it is written.
MAX_PROMPT_LOGPROBS = 1 << 22
_PART = 1 << 16

NO_TOKENIZER = (
    "this proxy has no tokenizer, so it takes and returns token ids only; start it with "
    "--tokenizer DIR for text"
)


class ModelView(NamedTuple):
    """A model as one request sees it.

    Attributes:
        stream_interval: that of requests which choose none.
    """

    limits: Limits
    text: TextModel | None
    stream_interval: int

    @property
    def name(self) -> str:
        return self.limits.model

    def need_text(self, param: str) -> TextModel:
        """The tokenizer. Raises InvalidRequestError without one."""
        if self.text is None:
            raise InvalidRequestError(NO_TOKENIZER, param=param)
        return self.text


class Service:
    """The way from a parsed request to its response."""

    def __init__(
        self,
        router: Router,
        dispatcher: Dispatcher,
        text_models: TextModels,
        served_model_name: str | None,
        stream_interval: int,
        background: Background,
        bodies: Bodies,
        claims: RidClaims | None = None,
    ) -> None:
        """``claims``: of rids, where the proxy has several processes."""
        self._router = router
        self._dispatcher = dispatcher
        self._text_models = text_models
        self._alias = served_model_name
        self._stream_interval = stream_interval
        self._background = background
        self.bodies = bodies
        self._claims = claims

    def models(self) -> list[str]:
        names = self._router.models()
        return [self._alias, *names] if self._alias and names else names

    async def model(self, name: str | None) -> ModelView:
        """Raises NotFoundError for an unknown model, UnavailableError before any node is known."""
        limits = self._router.limits(None if name == self._alias else name)
        text = await self._text_models.get(limits.model_path)
        return ModelView(limits, text, self._stream_interval)

    def admit(self, num_prompts: int) -> None:
        """Refuse early what would be refused later anyway."""
        self._dispatcher.admission.check(num_prompts)

    def respond(
        self, job: Job, specs: list[Spec], renderer: Renderer, timeout: float | None, shown: str
    ) -> Response:
        """The response to a request that is shown under this name, see :class:`Names`."""
        response = JobResponse(
            self._dispatcher, job, specs, renderer, timeout, self._background, shown
        )
        if self._claims is not None and job.is_named:
            return ClaimingResponse(response, job, specs, self._claims)
        return response


def encode(
    model: ModelView,
    prompt: str | list[int],
    param: str,
    *,
    namespace: str,
    add_special_tokens: bool = True,
) -> IntArray:
    """Token ids of a prompt. Raises InvalidRequestError for an empty or foreign one.

    ``namespace``: that of the request's ``cache_salt`` and ``extra_key``.
    """
    (ids,) = encode_each(
        model, [prompt], param, namespace=namespace, add_special_tokens=add_special_tokens
    )
    return ids


def encode_each(
    model: ModelView,
    prompts: Sequence[str | list[int]],
    param: str,
    *,
    namespace: str,
    add_special_tokens: bool = True,
) -> Iterator[IntArray]:
    """Token ids of prompts, one after the other, as of :func:`encode`. Each is refused at its turn,
    though some of the short texts behind it may have been tokenized by then."""
    tokenized: Iterator[IntArray] | None = None
    for prompt in prompts:
        if not isinstance(prompt, str):
            yield check_ids(prompt, model.limits.vocab_size, param)
            continue
        text = model.need_text(param)
        most = model.limits.context_length * text.longest_token
        if len(prompt) > most:
            raise ContextLengthError(
                f"{TOO_LONG}: {param} has {len(prompt)} characters, but "
                f"{model.limits.longest_context}, which have at most {most}",
                param=param,
            )
        if tokenized is None:
            tokenized = text.encode_each(
                [prompt for prompt in prompts if isinstance(prompt, str)],
                add_special_tokens=add_special_tokens,
                param=param,
                namespace=namespace,
            )
        ids = next(tokenized)
        if not prompt or not len(ids):
            raise InvalidRequestError(f"{param} is empty; send at least one token", param=param)
        yield ids


def check_ids(ids: list[int], vocab_size: int | None, param: str) -> IntArray:
    """A client's token ids as an array. Raises InvalidRequestError.

    Long lists are converted in parts, so that other threads run in between.
    """
    if not ids:
        raise InvalidRequestError(f"{param} is empty; send at least one token", param=param)
    limit = vocab_size or TOKEN_ID_LIMIT
    array = np.empty(len(ids), np.int32)
    for start in range(0, len(ids), _PART):
        part = ids[start : start + _PART]
        if min(part) < 0 or max(part) >= limit:
            wrong = next(i for i in part if not 0 <= i < limit)
            raise InvalidRequestError(
                f"{param} has the token id {brief(wrong)}, which is out of vocabulary: the model "
                f"has {limit} tokens",
                param=param,
            )
        array[start : start + len(part)] = part
    return array


def make_params(arguments: dict[str, Any], vocab_size: int | None) -> SamplingParams:
    """Build and validate, with a seed drawn if there is none. Raises InvalidRequestError."""
    if arguments.get("seed") is None:
        arguments = arguments | {"seed": secrets.randbelow(SEED_LIMIT)}
    params = SamplingParams(**arguments)
    params.validate(vocab_size)
    return params


class TokenCount:
    """Counts the tokens of one request's prompts, and the log probabilities of them in its answers.

    A prompt is computed once, but each of its ``n`` answers repeats its log probabilities.
    """

    def __init__(self) -> None:
        self._tokens = self._logprobs = 0

    def add(self, spec: Spec, context_length: int) -> None:
        """Raises InvalidRequestError when there are too many."""
        self._tokens += len(spec.token_ids)
        most = max(MAX_REQUEST_TOKENS, context_length)
        if self._tokens > most:
            raise InvalidRequestError(
                f"the request's prompts have {self._tokens} tokens or more; at most {most} are "
                "taken at once, so send smaller batches"
            )
        params = spec.params
        if params.prompt_logprobs_start is None:
            return
        each = 1 + params.top_logprobs
        self._logprobs += spec.num_prompt_logprobs * each * params.n
        most = max(MAX_PROMPT_LOGPROBS, context_length * each)
        if self._logprobs > most:
            raise InvalidRequestError(
                f"the answers would hold {self._logprobs} log probabilities of prompt tokens or "
                f"more; at most {most} are given at once, so ask for a smaller n, fewer likeliest "
                "tokens or fewer prompts"
            )


class Names(NamedTuple):
    """Names of a request.

    Attributes:
        rid: by ``/abort_request``; no two requests of a client at once have the same.
        shown: in its response. ``X-Request-Id`` is shown, but names nothing: it may repeat.
        is_given: whether the client chose ``rid``.
    """

    rid: str
    shown: str
    is_given: bool


def names_of(asked: OpenAIRequest | GenerateRequest, request: Request, prefix: str) -> Names:
    """The client's ``rid``, or one that is drawn here and begins with ``prefix``."""
    rid = asked.rid if asked.rid is not None else asked.request_id
    if isinstance(rid, str):
        return Names(rid, rid, True)
    drawn = prefix + uuid.uuid4().hex
    header = request.headers.get("x-request-id", "")
    return Names(drawn, header[:MAX_RID_CHARACTERS] or drawn, False)
