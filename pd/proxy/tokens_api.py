"""``POST /tokenize``, ``POST /detokenize`` and ``GET /tokenizer_info``."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from starlette.requests import Request
from starlette.responses import Response

from pd.core.errors import InvalidRequestError, NotFoundError
from pd.proxy.bodies import body_of
from pd.proxy.chat_messages import render_prompt
from pd.proxy.requests.tokens import DetokenizeRequest, TokenizeRequest
from pd.proxy.service import NO_TOKENIZER, check_ids
from pd.proxy.tokenizer import MAX_TEXT_TOKENS
from pd.proxy.web import json_response

if TYPE_CHECKING:
    from collections.abc import Sized

    from pd.proxy.service import ModelView, Service

# A longer text takes long to encode as JSON.
MAX_TEXT_CHARACTERS = 8 << 20
# Texts or lists of tokens of one request.
MAX_LISTS = 4096


class TokensAPI:
    """The tokenizer by itself: no node works on these requests."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request, asked: TokenizeRequest) -> Response:
        """Token ids of a text, or of a chat as the model's template renders it."""
        model = await self._service.model(asked.model)
        may_be_long = bool(asked.chat_template_kwargs)
        body = body_of(request.scope)
        return await body.tokenize(_tokenize, asked, model, may_be_long=may_be_long)

    async def info(self, request: Request) -> Response:
        """Facts about the tokenizer of the first model, in vLLM's shape: its class, its special
        tokens, its chat template, and further settings of its `tokenizer_config.json`."""
        model = await self._service.model(None)
        if model.text is None:
            raise NotFoundError(NO_TOKENIZER)
        return json_response(model.text.info)

    async def detokenize(self, request: Request, asked: DetokenizeRequest) -> Response:
        """The text of token ids."""
        model = await self._service.model(asked.model)
        return await body_of(request.scope).run(_detokenize, asked, model)


def _tokenize(asked: TokenizeRequest, model: ModelView) -> Response:
    text = model.need_text("prompt")
    special = asked.add_special_tokens
    if asked.messages is not None:
        prompts: list[str] = [render_prompt(asked, text, asked.messages).text]
        special, is_batch = bool(special), False
    else:
        assert asked.given is not None
        is_batch = isinstance(asked.given, list)
        prompts = list(asked.given) if isinstance(asked.given, list) else [asked.given]
        special = special is not False
    _check_count(prompts, "prompt")
    found: list[list[int]] = []
    for ids in text.encode_each(prompts, add_special_tokens=special):
        found.append(ids.tolist())
        _check_sum(found, "prompt")
    result: dict[str, object] = {
        "tokens": found if is_batch else found[0],
        "count": list(map(len, found)) if is_batch else len(found[0]),
        "max_model_len": model.limits.context_length,
        "token_strs": None,
    }
    if asked.return_token_strs:
        names = [text.token_names(ids) for ids in found]
        result["token_strs"] = names if is_batch else names[0]
    return json_response(result)


def _detokenize(asked: DetokenizeRequest, model: ModelView) -> Response:
    text = model.need_text("tokens")
    is_batch = isinstance(asked.tokens[0], list) if asked.tokens else False
    lists = cast("list[list[int]]", asked.tokens if is_batch else [asked.tokens])
    _check_count(lists, "tokens")
    _check_sum(lists, "tokens")
    length = sum(
        text.max_characters(check_ids(ids, model.limits.vocab_size, "tokens"))
        for ids in lists
        if ids
    )
    if length > MAX_TEXT_CHARACTERS:
        raise InvalidRequestError(
            f"the text of these tokens may have {length} characters; at most "
            f"{MAX_TEXT_CHARACTERS} are made",
            param="tokens",
        )
    texts = [text.decode(ids, skip_special_tokens=asked.skip_special_tokens) for ids in lists]
    decoded = texts if is_batch else texts[0]
    return json_response({"prompt": decoded, "text": decoded})


def _check_count(given: Sized, param: str) -> None:
    if len(given) > MAX_LISTS:
        raise InvalidRequestError(
            f"{param} has {len(given)} entries; at most {MAX_LISTS} are taken", param=param
        )


def _check_sum(lists: list[list[int]], param: str) -> None:
    count = sum(map(len, lists))
    if count > MAX_TEXT_TOKENS:
        raise InvalidRequestError(
            f"{param} has {count} token ids; at most {MAX_TEXT_TOKENS} are taken", param=param
        )
