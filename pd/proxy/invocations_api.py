"""``POST /invocations``, the one path that SageMaker sends requests to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from pd.proxy.requests.chat import ChatRequest
from pd.proxy.requests.invocation import InvocationRequest

if TYPE_CHECKING:
    from pd.proxy.chat_api import ChatAPI
    from pd.proxy.completions_api import CompletionsAPI


class InvocationsAPI:
    """``/invocations``."""

    def __init__(self, chat: ChatAPI, completions: CompletionsAPI) -> None:
        self._chat = chat
        self._completions = completions

    async def handle(self, request: Request, asked: InvocationRequest) -> Response:
        """The same as `/v1/chat/completions` for a body with `messages`, and as `/v1/completions`
        for one with `prompt`."""
        if isinstance(asked.root, ChatRequest):
            return await self._chat.handle(request, asked.root)
        return await self._completions.handle(request, asked.root)
