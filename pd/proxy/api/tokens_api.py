"""``POST /tokenize``, ``POST /detokenize`` and ``GET /tokenizer_info``."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from starlette.responses import Response

from pd.core.errors import InvalidRequestError, NotFoundError
from pd.proxy.api.chat_prompt import render_prompt
from pd.proxy.api.prompts import NO_TOKENIZER, check_token_ids
from pd.proxy.http.json_responses import json_response
from pd.proxy.http.typed_routes import ClientRequest
from pd.proxy.requests.tokens import DetokenizeRequest, TokenizeRequest
from pd.proxy.text.tokenizer import MAX_TEXT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sized

    from pd.proxy.api.prompts import ModelView
    from pd.proxy.api.service import Service

# Limit on a decoded text, because encoding it as JSON holds up the event loop.
MAX_TEXT_CHARACTERS = 8 << 20
# Limit on the texts or token lists of one request.
MAX_LISTS = 4096


class TokensAPI:
    """Endpoints of the tokenizer. They need no node."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: ClientRequest, body: TokenizeRequest) -> Response:
        """Token ids of a text, or of a chat as the model's template renders it."""
        model = await self._service.find_model(body.model)
        may_be_long = bool(body.chat_template_kwargs)
        return await request.raw_body.run_tokenizing(
            _tokenize_body, body, model, may_be_long=may_be_long
        )

    async def describe_tokenizer(self, request: ClientRequest) -> Response:
        """Facts about the tokenizer of the first model, in vLLM's shape: its class, its special
        tokens, its chat template, and further settings of its `tokenizer_config.json`."""
        model = await self._service.find_model(None)
        if model.text is None:
            raise NotFoundError(NO_TOKENIZER)
        return json_response(model.text.info)

    async def detokenize(self, request: ClientRequest, body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        model = await self._service.find_model(body.model)
        return await request.raw_body.run(_detokenize_body, body, model)


def _tokenize_body(body: TokenizeRequest, model: ModelView) -> Response:
    text = model.require_text("prompt")
    special = body.add_special_tokens
    if body.messages is not None:
        prompts: list[str] = [render_prompt(body, text, body.messages).text]
        special, is_batch = bool(special), False
    else:
        given = body.given_text
        assert given is not None
        is_batch = isinstance(given, list)
        prompts = list(given) if isinstance(given, list) else [given]
        special = special is not False
    _check_count(prompts, "prompt")
    lists: list[list[int]] = []
    for ids in text.encode_texts(prompts, add_special_tokens=special):
        lists.append(ids.tolist())
        _check_total(lists, "prompt")
    result: dict[str, object] = {
        "tokens": lists if is_batch else lists[0],
        "count": list(map(len, lists)) if is_batch else len(lists[0]),
        "max_model_len": model.limits.context_length,
        "token_strs": None,
    }
    if body.return_token_strs:
        names = [text.list_token_names(ids) for ids in lists]
        result["token_strs"] = names if is_batch else names[0]
    return json_response(result)


def _detokenize_body(body: DetokenizeRequest, model: ModelView) -> Response:
    text = model.require_text("tokens")
    is_batch = isinstance(body.tokens[0], list) if body.tokens else False
    lists = cast("list[list[int]]", body.tokens if is_batch else [body.tokens])
    _check_count(lists, "tokens")
    _check_total(lists, "tokens")
    length = sum(
        text.estimate_characters(check_token_ids(ids, model.limits.vocab_size, "tokens"))
        for ids in lists
        if ids
    )
    if length > MAX_TEXT_CHARACTERS:
        raise InvalidRequestError(
            f"the text of these tokens may have {length} characters (at most "
            f"{MAX_TEXT_CHARACTERS}); send fewer tokens",
            param="tokens",
        )
    texts = [text.decode(ids, skip_special_tokens=body.skip_special_tokens) for ids in lists]
    decoded = texts if is_batch else texts[0]
    return json_response({"prompt": decoded, "text": decoded})


def _check_count(given: Sized, param: str) -> None:
    if len(given) > MAX_LISTS:
        raise InvalidRequestError(
            f"{param} has {len(given)} entries; at most {MAX_LISTS} are allowed", param=param
        )


def _check_total(lists: list[list[int]], param: str) -> None:
    count = sum(map(len, lists))
    if count > MAX_TEXT_TOKENS:
        raise InvalidRequestError(
            f"{param} has {count} token ids; at most {MAX_TEXT_TOKENS} are allowed", param=param
        )
