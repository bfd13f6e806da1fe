"""Bodies of ``/invocations``, which SageMaker sends."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import RootModel

from pd.core.errors import InvalidRequestError
from pd.proxy.requests.chat import ChatRequest
from pd.proxy.requests.openai import CompletionRequest
from pd.proxy.requests.request_model import parse_object


class InvocationRequest(RootModel[ChatRequest | CompletionRequest]):
    """A request for a chat if it has `messages`, else for completions."""

    administrative: ClassVar[bool] = False

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse a JSON text. Raises InvalidRequestError."""
        given = parse_object(body)
        if given.get("messages") is not None:
            return cls.model_construct(ChatRequest.from_object(given))
        if given.get("prompt") is not None:
            return cls.model_construct(CompletionRequest.from_object(given))
        raise InvalidRequestError("messages or prompt is needed", param="messages")
