"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from pd.core.errors import InvalidRequestError
from pd.proxy.bodies import body_of
from pd.proxy.chat_messages import render_prompt
from pd.proxy.requests.tokens import DetokenizeRequest, TokenizeRequest
from pd.proxy.service import check_ids
from pd.proxy.tokenizer import MAX_TEXT_TOKENS
from pd.proxy.web import json_response

if TYPE_CHECKING:
    from pd.proxy.service import ModelView, Service

# A longer text takes long to encode as JSON.
MAX_TEXT_CHARACTERS = 8 << 20


class TokensAPI:
    """The tokenizer by itself: no node works on these requests."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request, asked: TokenizeRequest) -> Response:
        """Token ids of a text, or of a chat as the model's template renders it."""
        model = await self._service.model(asked.model)
        return await body_of(request.scope).tokenize(_tokenize, asked, model)

    async def detokenize(self, request: Request, asked: DetokenizeRequest) -> Response:
        """The text of token ids."""
        model = await self._service.model(asked.model)
        return await body_of(request.scope).run(_detokenize, asked, model)


def _tokenize(asked: TokenizeRequest, model: ModelView) -> Response:
    text = model.need_text("prompt")
    special = asked.add_special_tokens
    if asked.messages is not None:
        prompt, special = render_prompt(asked, text, asked.messages).text, bool(special)
    else:
        assert asked.given is not None
        prompt, special = asked.given, special is not False
    ids = text.encode(prompt, add_special_tokens=special).tolist()
    limit = model.limits.context_length
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": limit})


def _detokenize(asked: DetokenizeRequest, model: ModelView) -> Response:
    text, ids = model.need_text("tokens"), asked.tokens
    if len(ids) > MAX_TEXT_TOKENS:
        raise InvalidRequestError(
            f"tokens has {len(ids)} token ids; at most {MAX_TEXT_TOKENS} are taken", param="tokens"
        )
    if ids:
        length = text.max_characters(check_ids(ids, model.limits.vocab_size, "tokens"))
        if length > MAX_TEXT_CHARACTERS:
            raise InvalidRequestError(
                f"the text of these tokens may have {length} characters; at most "
                f"{MAX_TEXT_CHARACTERS} are made",
                param="tokens",
            )
    decoded = text.decode(ids, skip_special_tokens=asked.skip_special_tokens)
    return json_response({"prompt": decoded, "text": decoded})
