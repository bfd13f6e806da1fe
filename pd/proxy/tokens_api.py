"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.errors import InvalidRequestError
from pd.proxy.chat_api import read_messages, render_prompt
from pd.proxy.fields import Fields
from pd.proxy.service import check_ids
from pd.proxy.web import json_response, read_object

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from pd.proxy.service import Service


class TokensAPI:
    """The tokenizer by itself: no node works on these requests."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        fields = Fields(await read_object(request))
        model = await self._service.model(fields.string("model"))
        text = model.need_text("prompt")
        if fields.has("messages"):
            prompt = render_prompt(fields, text.template(), read_messages(fields))
            special = fields.boolean("add_special_tokens", False)
        else:
            given = fields.string("prompt") if fields.has("prompt") else fields.string("text")
            if given is None:
                raise InvalidRequestError("prompt (a string) or messages is needed", param="prompt")
            prompt, special = given, fields.boolean("add_special_tokens", True)
        ids = (await text.encode(prompt, add_special_tokens=special)).tolist()
        limit = model.limits.context_length
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": limit})

    async def detokenize(self, request: Request) -> Response:
        fields = Fields(await read_object(request))
        if not fields.has("tokens"):
            raise InvalidRequestError("tokens (a list of token ids) is needed", param="tokens")
        ids = fields.integers("tokens")
        model = await self._service.model(fields.string("model"))
        text = model.need_text("tokens")
        if ids:
            check_ids(ids, model.limits.vocab_size, "tokens")
        decoded = text.decode(ids, skip_special_tokens=fields.boolean("skip_special_tokens", True))
        return json_response({"prompt": decoded, "text": decoded})
