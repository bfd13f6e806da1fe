"""Endpoints for tools of SGLang and vLLM, in the shapes expected by these tools."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from typing import TYPE_CHECKING, cast

import numpy as np
from starlette.responses import Response

from pd import __version__
from pd.core.errors import InvalidRequestError, PDError, QueueFullError, UnavailableError
from pd.core.sampling_params import SamplingParams
from pd.net.shared_answer import SharedAnswer
from pd.proxy.api.answer_schemas import ModelInfo, ServerFacts, ServerLoad, Version
from pd.proxy.dispatch.generation import PromptSpec
from pd.proxy.dispatch.job import Job
from pd.proxy.http.json_responses import json_response
from pd.proxy.http.typed_routes import ClientRequest
from pd.proxy.workers.actions import ReadLoad

if TYPE_CHECKING:
    from pd.proxy.api.prompts import ModelView
    from pd.proxy.api.service import Service
    from pd.proxy.dispatch.dispatcher import Dispatcher
    from pd.proxy.routing.routing import Router
    from pd.proxy.workers.actions import Everywhere

# The system is unhealthy if a token takes longer, as in SGLang.
HEALTH_SECONDS = 20.0
_POLL_SECONDS = 0.1
# Over a shorter time a throughput means nothing.
_MIN_SECONDS = 1e-3
# We ask for two tokens, because the second one comes from the decode node.
_HEALTH_TOKENS = 2


class CompatAPI:
    """``/version``, ``/ping``, ``/get_model_info``, ``/server_info``, ``/load``,
    ``/health_generate`` and the refusal of ``/v1/embeddings``."""

    def __init__(
        self,
        service: Service,
        router: Router,
        dispatcher: Dispatcher,
        everywhere: Everywhere,
        tokenizer: str | None,
    ) -> None:
        self._service = service
        self._router = router
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._health = asyncio.Lock()

        async def read_load() -> list[list[int]]:
            """Ask each process for its id, its running requests and its tokens so far."""
            return cast("list[list[int]]", await everywhere(ReadLoad()))

        self._shared_load = SharedAnswer(read_load)
        # Time of the last report of the throughput, and the token count of each process then.
        self._last_report: tuple[float, dict[int, int]] = (time.monotonic(), {os.getpid(): 0})

    async def get_version(self, request: ClientRequest) -> Response:
        """The proxy's version, in vLLM's shape."""
        return json_response(Version(version=__version__))

    async def answer_ping(self, request: ClientRequest) -> Response:
        """200 while the process answers, as SageMaker asks."""
        return Response()

    async def refuse_embeddings(self, request: ClientRequest) -> Response:
        """Refuses embeddings."""
        raise InvalidRequestError(
            "/v1/embeddings is not supported: this server generates text; send embeddings to a "
            "server of an embedding model"
        )

    async def describe_model(self, request: ClientRequest) -> Response:
        """Facts about the first model, in SGLang's shape."""
        limits = (await self._service.find_model(None)).limits
        path = limits.model_path or limits.model
        info = ModelInfo(
            model_path=path,
            tokenizer_path=self._tokenizer or path,
            is_generation=True,
            preferred_sampling_params=None,
            weight_version="default",
            has_image_understanding=False,
            has_audio_understanding=False,
        )
        return json_response(info)

    async def describe_server(self, request: ClientRequest) -> Response:
        """Facts about the deployment of the first model, in SGLang's shape. SGLang's benchmarks
        label their results with them."""
        throughput = self._measure_throughput(await self._shared_load.get_answer())
        limits = (await self._service.find_model(None)).limits
        path = limits.model_path or limits.model
        # We do not await from here on, so no node can disappear.
        pools = self._router.list_pools(limits.model)
        if not pools:
            raise UnavailableError("the last node of the model has left; try again later")
        facts = ServerFacts(
            version=__version__,
            model_path=path,
            tokenizer_path=self._tokenizer or path,
            served_model_name=self._service.list_models()[0],
            context_length=limits.context_length,
            page_size=min(pool.page_size for pool in pools),
            max_total_num_tokens=sum(pool.pool_tokens for pool in pools),
            internal_states=[{"last_gen_throughput": throughput, "avg_spec_accept_length": None}],
        )
        return json_response(facts)

    def _measure_throughput(self, load: list[list[int]]) -> float:
        """Return the tokens per second since the last report.

        Processes that were not in the last report do not count.
        """
        now, (then, before) = time.monotonic(), self._last_report
        tokens = {process: count for process, _, count in load}
        self._last_report = (now, tokens)
        more = sum(count - before.get(process, count) for process, count in tokens.items())
        return more / max(now - then, _MIN_SECONDS)

    async def report_load(self, request: ClientRequest) -> Response:
        """The number of requests under way, in vLLM's shape."""
        load = await self._shared_load.get_answer()
        return json_response(ServerLoad(server_load=sum(requests for _, requests, _ in load)))

    async def check_generation(self, request: ClientRequest) -> Response:
        """200 if the nodes generate a token within 20 s, else 503, as in SGLang. The proxy has only
        one such request on its nodes at a time."""
        model = await self._service.find_model(None)
        began = time.monotonic()
        try:
            await asyncio.wait_for(self._health.acquire(), HEALTH_SECONDS)
        except TimeoutError:
            raise UnavailableError(f"no token came for {HEALTH_SECONDS:g} s") from None
        try:
            if self._dispatcher.last_output <= began:
                await self._probe_nodes(model, began)
        except QueueFullError:
            while self._dispatcher.last_output <= began:
                if time.monotonic() - began > HEALTH_SECONDS:
                    raise UnavailableError(
                        f"the queue is full, and no token came for {HEALTH_SECONDS:g} s"
                    ) from None
                await asyncio.sleep(_POLL_SECONDS)
        except PDError as error:
            raise UnavailableError(f"nothing can be generated: {error.message}") from error
        finally:
            self._health.release()
        return Response()

    async def _probe_nodes(self, model: ModelView, began: float) -> None:
        """Generate until any request has got output. Raises PDError if none does."""
        max_tokens = model.limits.choose_max_tokens(1, _HEALTH_TOKENS)
        spec = PromptSpec(
            rid=f"health-{uuid.uuid4().hex}",
            model=model.name,
            token_ids=np.zeros(1, np.int32),
            params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            text_model=None,
        )
        job = Job(spec.rid, "/health_generate")
        with self._dispatcher.run_job(job, [spec], HEALTH_SECONDS):
            await self._dispatcher.start_job(job, [spec])
            finished = asyncio.ensure_future(job.wait_done())
            while not finished.done() and self._dispatcher.last_output <= began:
                await asyncio.wait({finished}, timeout=_POLL_SECONDS)
            if finished.done():
                finished.result()
            else:
                job.abort_is_result = True  # we end it early, because the node works
                finished.cancel()
