"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.errors import InvalidRequestError
from pd.proxy.chat_api import read_messages, render_prompt
from pd.proxy.service import check_ids
from pd.proxy.tokenizer import MAX_TEXT_TOKENS
from pd.proxy.web import json_response

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from pd.proxy.fields import Fields
    from pd.proxy.service import ModelView, Service

# A longer text takes long to write down.
MAX_TEXT_CHARACTERS = 8 << 20


class TokensAPI:
    """The tokenizer by itself: no node works on these requests."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        async with self._service.body(request) as body:
            fields, name = await body.read(_read_tokenize)
            model = await self._service.model(name)
            model.need_text("prompt")
            return await body.run(_tokenize, fields, model)

    async def detokenize(self, request: Request) -> Response:
        async with self._service.body(request) as body:
            fields, name = await body.read(_read_detokenize)
            model = await self._service.model(name)
            model.need_text("tokens")
            return await body.run(_detokenize, fields, model)


def _read_tokenize(fields: Fields) -> tuple[Fields, str | None]:
    """The request and the model it names. Raises InvalidRequestError."""
    name = fields.string("model")
    if not any(fields.has(field) for field in ("messages", "prompt", "text")):
        raise InvalidRequestError("prompt (a string) or messages is needed", param="prompt")
    return fields, name


def _tokenize(fields: Fields, model: ModelView) -> Response:
    text = model.need_text("prompt")
    if fields.has("messages"):
        prompt = render_prompt(fields, text, read_messages(fields))
        special = fields.boolean("add_special_tokens", False)
    else:
        given = fields.string("prompt") if fields.has("prompt") else fields.string("text")
        assert given is not None
        prompt, special = given, fields.boolean("add_special_tokens", True)
    ids = text.encode(prompt, add_special_tokens=special).tolist()
    limit = model.limits.context_length
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": limit})


def _read_detokenize(fields: Fields) -> tuple[Fields, str | None]:
    """The request and the model it names. Raises InvalidRequestError."""
    if not fields.has("tokens"):
        raise InvalidRequestError("tokens (a list of token ids) is needed", param="tokens")
    return fields, fields.string("model")


def _detokenize(fields: Fields, model: ModelView) -> Response:
    text = model.need_text("tokens")
    ids = fields.integers("tokens")
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
    decoded = text.decode(ids, skip_special_tokens=fields.boolean("skip_special_tokens", True))
    return json_response({"prompt": decoded, "text": decoded})
