"""The way from a planned answer to the nodes, and from their output to the client."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pd.core.brief import short_repr
from pd.core.errors import NotFoundError, PDError
from pd.proxy.api import logprobs
from pd.proxy.api.event_stream import EventStream
from pd.proxy.api.prompts import ModelView
from pd.proxy.dispatch.job import ClientState, Job
from pd.proxy.http.json_responses import (
    error_response,
    json_response,
    quote_header,
    read_request_id,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from starlette.responses import Response

    from pd.proxy.api.event_stream import Renderer
    from pd.proxy.dispatch.dispatcher import Dispatcher
    from pd.proxy.dispatch.generation import PromptSpec
    from pd.proxy.http.background import Background
    from pd.proxy.http.bodies import Bodies
    from pd.proxy.http.typed_routes import ClientRequest
    from pd.proxy.nodes.node_refresh import NodeRefresh
    from pd.proxy.requests.native import GenerateRequest
    from pd.proxy.requests.openai import OpenAIRequest
    from pd.proxy.requests.score import ScoreRequest
    from pd.proxy.routing.routing import Router
    from pd.proxy.text.tokenizer import TextModels
    from pd.proxy.workers.shared import RidClaims


class RequestNames(NamedTuple):
    """Names of a request.

    Attributes:
        rid: the name for ``/abort_request``. No two requests of a client have it at the same time.
        shown: the name in the response. It may repeat, because clients choose ``X-Request-Id``.
        is_given: the client chose ``rid``.
    """

    rid: str
    shown: str
    is_given: bool


def name_request(
    body: OpenAIRequest | GenerateRequest | ScoreRequest, request: ClientRequest, prefix: str
) -> RequestNames:
    """Take the client's ``rid``, or draw one that begins with ``prefix``."""
    rid = body.rid if body.rid is not None else body.request_id
    if isinstance(rid, str):
        return RequestNames(rid, rid, True)
    drawn = prefix + uuid.uuid4().hex
    given = request.headers.get("x-request-id", "").strip()
    return RequestNames(drawn, read_request_id(request.scope) if given else drawn, False)


def make_job(request: ClientRequest, names: RequestNames, endpoint: str, **options: Any) -> Job:
    """Make the job of a client's request. ``options`` go to :class:`Job`."""
    owner = request.caller.owner
    rid, shown, is_given = names
    return Job(rid, endpoint, shown=shown, owner=owner, is_named=is_given, **options)


class PlannedAnswer(NamedTuple):
    """An answer that is ready for the nodes.

    Attributes:
        specs: the job's prompts.
        timeout: seconds until the client gives up, if it said so.
        keep: stores the rendered answer before the client sees its end. May raise PDError.
    """

    job: Job
    specs: list[PromptSpec]
    renderer: Renderer
    timeout: float | None
    keep: Callable[[], Awaitable[None]] | None = None

    def limit_priority(self, limit: int | None) -> PlannedAnswer:
        """Return the answer with no prompt above a priority; None for no limit."""
        if limit is None:
            return self
        specs = [replace(spec, priority=min(spec.priority, limit)) for spec in self.specs]
        return self._replace(specs=specs)


class Service:
    """Finds the model of a request, and serves planned answers. Runs on the event loop."""

    def __init__(
        self,
        router: Router,
        dispatcher: Dispatcher,
        text_models: TextModels,
        served_model_names: Sequence[str],
        stream_interval: int,
        background: Background,
        bodies: Bodies,
        node_refresh: NodeRefresh,
        claims: RidClaims | None = None,
    ) -> None:
        """
        Args:
            served_model_names: further names of the first model. Answers show the first of them.
            claims: keeps rids unique among several processes of a proxy.
        """
        self._router = router
        self._dispatcher = dispatcher
        self._text_models = text_models
        self._aliases = tuple(served_model_names)
        self._stream_interval = stream_interval
        self._background = background
        self.bodies = bodies
        self._node_refresh = node_refresh
        self._claims = claims

    def list_models(self) -> list[str]:
        """List the names of the models for clients. Aliases after the first one are left out."""
        names = self._router.list_models()
        return list(dict.fromkeys([*self._aliases[:1], *names])) if names else []

    def has_name(self, name: str) -> bool:
        """Tell whether clients may ask for a model by this name."""
        return name in self._aliases or name in self._router.list_models()

    def resolve_name(self, name: str) -> str:
        """Return the listed name of a model by any of its names. Raises NotFoundError."""
        listed = self.list_models()
        if listed and name in self._aliases:
            return self._aliases[0]
        if name not in listed:
            raise NotFoundError(f"there is no model {short_repr(name)}", param="model")
        return name

    async def find_model(self, name: str | None) -> ModelView:
        """Return the model of this name; the first one for no name or an empty one, as in vLLM.

        Raises NotFoundError for an unknown model, UnavailableError before any node is known.
        """
        served = None if not name or name in self._aliases else name
        limits = await self._node_refresh.retry_until_served(
            partial(self._router.get_limits, served)
        )
        text = await self._text_models.load(limits.model_path)
        shown = served or next(iter(self._aliases), limits.model)
        return ModelView(limits, text, self._stream_interval, shown)

    def check_admission(self, num_prompts: int) -> None:
        """Refuse a request before we prepare it, if it would be refused afterwards anyway."""
        self._dispatcher.admission.check_limits(num_prompts)

    async def serve(self, request: ClientRequest, answer: PlannedAnswer) -> None:
        """Have nodes compute an answer, and send it to the client. Errors are sent, too.

        We send nothing before the first output, because earlier errors still have their HTTP
        status.
        """
        request.raw_body.release()
        answer = answer.limit_priority(request.caller.max_priority)
        job = answer.job
        job.keeps_logprobs = not job.is_streamed or answer.renderer.is_cumulative
        headers = {"X-Request-Id": quote_header(job.shown)}
        claim: AbstractAsyncContextManager[None] = nullcontext()
        if self._claims is not None and job.is_named:
            # No other process of the proxy may take a request with the client's rids.
            rids = dict.fromkeys([job.rid, *(spec.rid for spec in answer.specs)])
            claim = self._claims.hold_rids(job.owner, rids)
        try:
            async with claim:
                await self._serve_claimed(request, answer, headers)
        except PDError as error:
            if not job.is_abandoned:
                await request.send_response(error_response(error, headers, path=request.url.path))

    async def _serve_claimed(
        self, request: ClientRequest, answer: PlannedAnswer, headers: dict[str, str]
    ) -> None:
        job = answer.job
        stream: EventStream | None = None
        if job.is_streamed:
            request_id = headers["X-Request-Id"]
            stream = EventStream(
                request, job, answer.renderer, self._background, request_id, answer.keep
            )
        with self._dispatcher.run_job(job, answer.specs, answer.timeout, stream):
            watcher = asyncio.create_task(self._watch_client(request, job))
            try:
                await self._dispatcher.start_job(job, answer.specs)
                if stream is not None:
                    await stream.write_all()
                else:
                    await job.wait_done()
                    response = await self._render_whole(answer, headers)
                    if answer.keep is not None:
                        await answer.keep()
                    await request.send_response(response)
            finally:
                watcher.cancel()

    async def _render_whole(self, answer: PlannedAnswer, headers: dict[str, str]) -> Response:
        generations = answer.job.generations
        top = max(spec.params.other_logprobs for spec in answer.specs)
        entries = sum(
            len(choice.logprobs) + len(generation.prompt_logprobs)
            for generation in generations
            for choice in generation.choices
        )
        # Rendering parses the texts for reasoning and tool calls, so their length counts, too.
        size = logprobs.estimate_bytes(entries, top) + sum(
            choice.text_length for generation in generations for choice in generation.choices
        )
        return await self._background.run(
            size, lambda: json_response(answer.renderer.render_whole(), headers=headers)
        )

    async def _watch_client(self, request: ClientRequest, job: Job) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        if not job.is_done:
            self._dispatcher.drop_client(job, ClientState.DISCONNECTED)
