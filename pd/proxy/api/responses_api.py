"""``/v1/responses``, OpenAI's Responses API."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from pd.core.errors import InvalidRequestError, QueueFullError
from pd.proxy.api.chat_api import prepare_chat
from pd.proxy.api.large_answers import LargeAnswers, send_pieces
from pd.proxy.api.response_renderer import ResponseRenderer, describe_request
from pd.proxy.api.service import PlannedAnswer, RequestNames, make_job
from pd.proxy.http.bodies import FREE_BYTES, MAX_BODY_BYTES
from pd.proxy.http.json_responses import json_response, read_request_id
from pd.proxy.http.typed_routes import ClientRequest
from pd.proxy.requests.field_names import RESPONSES_NAMES
from pd.proxy.requests.known_fields import RESPONSES
from pd.proxy.requests.response_items import read_output
from pd.proxy.requests.responses import ResponsesRequest
from pd.proxy.storage.responses import StoredResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from pd.proxy.api.chat_plan import OutputPlan
    from pd.proxy.api.prompts import ModelView
    from pd.proxy.api.service import Service
    from pd.proxy.dispatch.generation import PromptSpec
    from pd.proxy.dispatch.job import Job
    from pd.proxy.http.background import Background
    from pd.proxy.storage.responses import ResponseStore

_encoder = msgspec.json.Encoder()

# Limit of the chats in memory that belong to requests under way: earlier chats, which a client
# names in a few bytes, and chats to store. Each request has some bytes free, as its body has.
MAX_CHATS_BYTES = 512 << 20


class _ChatBudget:
    """Limits the bytes of chats that requests under way hold in addition to their bodies."""

    def __init__(self) -> None:
        self._held = 0

    @contextmanager
    def hold_chat(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that says how many bytes the request now holds.

        The function raises QueueFullError if they are too many. They are free after the context.
        """
        own = 0

        def resize(size: int) -> None:
            nonlocal own
            counted = max(0, size - FREE_BYTES)
            if counted > own and self._held - own + counted > MAX_CHATS_BYTES:
                raise QueueFullError(
                    f"chats of {MAX_CHATS_BYTES} bytes are in use; try again later, or send less "
                    "with store: false"
                )
            self._held += counted - own
            own = counted

        try:
            yield resize
        finally:
            self._held -= own


class ResponsesAPI:
    def __init__(self, service: Service, store: ResponseStore, background: Background) -> None:
        self._service = service
        self._store = store
        self._background = background
        self._chats = _ChatBudget()
        self._answers = LargeAnswers()

    async def create(self, request: ClientRequest, body: ResponsesRequest) -> None:
        """OpenAI's responses, with the model's chat template."""
        with self._chats.hold_chat() as resize:
            answer = await self._plan_answer(request, body, resize)
            del body  # it may hold megabytes, and an answer may take hours
            await self._service.serve(request, answer)

    async def get_response(self, request: ClientRequest, response_id: str) -> None:
        """A stored response."""
        if request.query_params.get("stream", "false") not in ("false", "0", ""):
            raise InvalidRequestError(
                "stream: a stored response is not streamed; leave it out", param="stream"
            )
        owner = request.caller.owner
        content = (await self._store.get_response(owner, response_id)).response
        with self._answers.take_turn(owner, len(content)):
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(content)).encode()),
                (b"x-request-id", read_request_id(request.scope).encode()),
            ]
            await request.start_response(200, headers)
            await send_pieces(request, len(content), _iterate(content))

    async def delete_response(self, request: ClientRequest, response_id: str) -> Response:
        """Deletes a stored response."""
        await self._store.delete_response(request.caller.owner, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def _plan_answer(
        self, request: ClientRequest, body: ResponsesRequest, resize: Callable[[int], None]
    ) -> PlannedAnswer:
        """``resize``: called with the bytes of chats that we hold."""
        rid = f"resp_{uuid.uuid4().hex}"
        owner = request.caller.owner
        model = await self._service.find_model(body.model)
        self._service.check_admission(1)
        previous, text_bytes = b"[]", None
        if body.previous_response_id is not None:
            previous = await self._store.get_previous(owner, body.previous_response_id)
            text_bytes = len(previous)
            resize(text_bytes)
        spec, plan, messages = await request.raw_body.run_tokenizing(
            _prepare_response,
            body,
            previous,
            rid,
            model,
            text_bytes=text_bytes,
            may_be_long=bool(body.chat_template_kwargs),
        )
        resize(len(messages))
        job = make_job(request, RequestNames(rid, rid, False), RESPONSES, is_streamed=body.stream)
        job.grammar_fields = plan.grammar_fields._replace(names=RESPONSES_NAMES)
        echo = describe_request(job, body, model.name, spec.params)
        renderer = ResponseRenderer(job, echo, plan, hides_reasoning=body.hides_reasoning)
        keeper = None
        if body.store:
            keeper = _Keeper(self._store, self._background, job, messages, renderer).keep
        return PlannedAnswer(job, [spec], renderer, body.timeout, keeper)


async def _iterate(content: bytes) -> AsyncIterator[bytes]:
    yield content


class _Keeper:
    """Stores a response when it is whole."""

    def __init__(
        self,
        store: ResponseStore,
        background: Background,
        job: Job,
        messages: bytes,
        renderer: ResponseRenderer,
    ) -> None:
        """``messages``: JSON of the chat before the answer, without instructions."""
        self._store = store
        self._background = background
        self._job = job
        self._messages = messages
        self._renderer = renderer

    async def keep(self) -> None:
        """Store the response, so that the client can name it once it has it. Raises
        UnavailableError."""
        size = len(self._messages) + len(self._renderer.final)
        messages = await self._background.run(size, self._append_answer)
        stored = StoredResponse(self._renderer.final, messages)
        await self._store.add_response(self._job.owner, self._job.shown, stored)

    def _append_answer(self) -> bytes:
        messages: list[Any] = msgspec.json.decode(self._messages)
        return _encoder.encode(messages + read_output(self._renderer.items))


def _prepare_response(
    body: ResponsesRequest, previous: bytes, rid: str, model: ModelView
) -> tuple[PromptSpec, OutputPlan, bytes]:
    """Translate the request into a chat and prepare it; also return the chat's JSON to store."""
    messages = [*msgspec.json.decode(previous), *body.input]
    encoded = _encoder.encode(messages) if body.store else b""
    if len(encoded) > MAX_BODY_BYTES:
        raise InvalidRequestError(
            f"previous_response_id: the chat has {len(encoded)} bytes of JSON; at most "
            f"{MAX_BODY_BYTES} are allowed, so begin a new one",
            param="previous_response_id",
        )
    with RESPONSES_NAMES.rename_errors():
        spec, plan = prepare_chat(body.to_chat(messages), rid, model, clamps_length=True)
    return spec, plan, encoded
