"""``POST /invocations``, the only path to which SageMaker sends requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.proxy.http.typed_routes import ClientRequest
from pd.proxy.requests.chat import ChatRequest
from pd.proxy.requests.invocation import InvocationRequest

if TYPE_CHECKING:
    from pd.proxy.api.chat_api import ChatAPI
    from pd.proxy.api.completions_api import CompletionsAPI


class InvocationsAPI:
    """``/invocations``."""

    def __init__(self, chat: ChatAPI, completions: CompletionsAPI) -> None:
        self._chat = chat
        self._completions = completions

    async def handle(self, request: ClientRequest, body: InvocationRequest) -> None:
        """`/v1/chat/completions` for a body with `messages`, `/v1/completions` for one with
        `prompt`."""
        if isinstance(body.root, ChatRequest):
            serving = self._chat.handle(request, body.root)
        else:
            serving = self._completions.handle(request, body.root)
        del body  # it may hold megabytes, and an answer may take hours
        await serving
