"""Endpoints that tools of SGLang and vLLM ask, in the shapes that they know."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from typing import TYPE_CHECKING, cast

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from pd import __version__
from pd.core.errors import PDError, QueueFullError, UnavailableError
from pd.core.sampling_params import SamplingParams
from pd.core.shared_answer import SharedAnswer
from pd.proxy.actions import ReadLoad
from pd.proxy.generation import Spec
from pd.proxy.job import Job
from pd.proxy.responses import ModelInfo, ServerFacts, ServerLoad, Version
from pd.proxy.web import json_response

if TYPE_CHECKING:
    from pd.proxy.actions import Everywhere
    from pd.proxy.dispatcher import Dispatcher
    from pd.proxy.routing import Router
    from pd.proxy.service import ModelView, Service

# A token may take so long before the system counts as ill, as in SGLang.
HEALTH_SECONDS = 20.0
_POLL_SECONDS = 0.1
# Shorter times make no meaningful throughput.
_LEAST_SECONDS = 1e-3
# The second one comes from the decode node.
_HEALTH_TOKENS = 2


class CompatAPI:
    """``/version``, ``/ping``, ``/get_model_info``, ``/server_info``, ``/load`` and
    ``/health_generate``."""

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
        self._everywhere = everywhere
        self._tokenizer = tokenizer
        self._health = asyncio.Lock()
        self._shared_load = SharedAnswer(self._read_load)
        # When the throughput was told last, and the tokens that each process had.
        self._told: tuple[float, dict[int, int]] = (time.monotonic(), {os.getpid(): 0})

    async def version(self, request: Request) -> Response:
        """The proxy's version, in vLLM's shape."""
        return json_response(Version(version=__version__))

    async def ping(self, request: Request) -> Response:
        """200 while the process answers, as SageMaker asks."""
        return Response()

    async def model_info(self, request: Request) -> Response:
        """Facts about the first model, in SGLang's shape."""
        limits = (await self._service.model(None)).limits
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

    async def server_info(self, request: Request) -> Response:
        """Facts about the deployment of the first model, in SGLang's shape, with which its
        benchmarks label their results."""
        throughput = self._throughput(await self._shared_load.get())
        limits = (await self._service.model(None)).limits
        path = limits.model_path or limits.model
        # From here on nothing waits, so no node goes.
        pools = self._router.pools(limits.model)
        if not pools:
            raise UnavailableError("no node is known any more")
        facts = ServerFacts(
            version=__version__,
            model_path=path,
            tokenizer_path=self._tokenizer or path,
            served_model_name=self._service.models()[0],
            context_length=limits.context_length,
            page_size=min(pool.page_size for pool in pools),
            max_total_num_tokens=sum(pool.pool_tokens for pool in pools),
            internal_states=[{"last_gen_throughput": throughput, "avg_spec_accept_length": None}],
        )
        return json_response(facts)

    def _throughput(self, load: list[list[int]]) -> float:
        """Tokens per second since this was asked last. Processes of the proxy that began meanwhile,
        or did not answer then, do not count."""
        now, (then, before) = time.monotonic(), self._told
        tokens = {process: count for process, _, count in load}
        self._told = (now, tokens)
        more = sum(count - before.get(process, count) for process, count in tokens.items())
        return more / max(now - then, _LEAST_SECONDS)

    async def load(self, request: Request) -> Response:
        """The number of requests under way, in vLLM's shape."""
        load = await self._shared_load.get()
        return json_response(ServerLoad(server_load=sum(requests for _, requests, _ in load)))

    async def _read_load(self) -> list[list[int]]:
        """Ask each process of the proxy for its id, requests under way and tokens so far."""
        return cast("list[list[int]]", await self._everywhere(ReadLoad()))

    async def health_generate(self, request: Request) -> Response:
        """200 if a token comes from the nodes within 20 s, else 503, as in SGLang. However many
        ask, one request at a time is sent to nodes."""
        model = await self._service.model(None)
        began = time.monotonic()
        try:
            await asyncio.wait_for(self._health.acquire(), HEALTH_SECONDS)
        except TimeoutError:
            raise UnavailableError(f"no token came for {HEALTH_SECONDS:g} s") from None
        try:
            if self._dispatcher.last_output <= began:
                await self._generate(model, began)
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

    async def _generate(self, model: ModelView, began: float) -> None:
        """Raises PDError when nothing comes."""
        most = model.limits.default_max_tokens(1, _HEALTH_TOKENS)
        spec = Spec(
            rid=f"health-{uuid.uuid4().hex}",
            model=model.name,
            token_ids=np.zeros(1, np.int32),
            params=SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True),
            text_model=None,
        )
        job = Job(spec.rid, "/health_generate")
        with self._dispatcher.run(job, [spec], HEALTH_SECONDS):
            await self._dispatcher.start(job, [spec])
            finished = asyncio.ensure_future(job.finished())
            while not finished.done() and self._dispatcher.last_output <= began:
                await asyncio.wait({finished}, timeout=_POLL_SECONDS)
            if finished.done():
                finished.result()
            else:
                job.outcome = "ok"
                finished.cancel()
