"""Renders log probabilities in the shapes of the three APIs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pd.proxy.text.tokenizer import decode_token

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd.core.messages import TokenLogprobs
    from pd.proxy.text.tokenizer import TextModel


# Estimated size of one token's log probability in JSON.
_ENTRY_BYTES = 48


def estimate_bytes(entries: int, top: int) -> int:
    """Estimate the JSON size of log probabilities with ``top`` likeliest tokens per entry."""
    return entries * (1 + top) * _ENTRY_BYTES


def name_by_id(token: int) -> str:
    """Return a token's unique name in vLLM's form."""
    return f"token_id:{token}"


class TokenNames(NamedTuple):
    """Names of tokens in OpenAI's shapes, and the number of likeliest ones to show.

    Attributes:
        top: limit on the likeliest tokens, because a node may send more than the client wants.
        by_id: name a token ``token_id:17`` instead of by its text.
    """

    model: TextModel | None
    top: int
    by_id: bool = False

    def name_token(self, token: int) -> str:
        return name_by_id(token) if self.by_id else decode_token(self.model, token)

    def list_likeliest(self, entry: TokenLogprobs) -> Iterable[tuple[int, float]]:
        """List the likeliest tokens at a position with their log probabilities."""
        pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
        return itertools.islice(pairs, self.top)


def render_for_completion(
    names: TokenNames, entries: Sequence[TokenLogprobs], offsets: Sequence[int]
) -> dict[str, Any]:
    """Render parallel lists for ``/v1/completions``.

    ``offsets``: position in the text at which each token begins.
    """
    top: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprob is None:
            top.append(None)
            continue
        top.append(_name_likeliest(names, entry, entry.logprob))
    return {
        "tokens": [names.name_token(entry.token_id) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": top,
        "text_offset": list(offsets),
    }


def _name_likeliest(names: TokenNames, entry: TokenLogprobs, own: float) -> dict[str, float]:
    """Map the names of the likeliest tokens and the entry's own token to log probabilities.

    If several tokens share a text, only the own token or else the likeliest one gets it as its
    name. The others are named by their ids, because a key must be unique.

    ``own``: log probability of the entry's own token.
    """
    logprobs = dict(names.list_likeliest(entry))
    logprobs.setdefault(entry.token_id, own)
    taken = {names.name_token(entry.token_id)}
    by_name = {}
    for token, logprob in logprobs.items():
        name = names.name_token(token)
        if token != entry.token_id:
            name = name_by_id(token) if name in taken else name
            taken.add(name)
        by_name[name] = logprob
    return by_name


def render_for_chat(names: TokenNames, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Render an object per token for ``/v1/chat/completions``, with the token id as in SGLang."""
    model = names.model

    def describe(token: int, logprob: float | None) -> dict[str, Any]:
        data = None if model is None else list(model.get_token_bytes(token))
        name = names.name_token(token)
        return {"token": name, "token_id": token, "logprob": logprob, "bytes": data}

    content = []
    for entry in entries:
        top = [describe(token, logprob) for token, logprob in names.list_likeliest(entry)]
        content.append(describe(entry.token_id, entry.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def render_prompt_logprobs(names: TokenNames, entries: Sequence[TokenLogprobs]) -> msgspec.Raw:
    """Render vLLM's ``prompt_logprobs``.

    Each position maps the ids of the likeliest tokens and of the prompt's own token to objects,
    and the first position is null. An own token outside the likeliest has no rank.

    We return JSON instead of objects, because a long prompt has millions of entries.
    """

    def describe(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {
            "logprob": logprob,
            "rank": rank,
            "decoded_token": decode_token(names.model, token),
        }

    positions: list[bytes] = []
    for entry in entries:
        if entry.logprob is None:
            positions.append(b"null")
            continue
        ranks = {token: rank for rank, token in enumerate(entry.top_ids, 1)}
        own = entry.token_id
        tokens = {
            str(token): describe(token, logprob, ranks[token])
            for token, logprob in names.list_likeliest(entry)
        }
        tokens.setdefault(str(own), describe(own, entry.logprob, ranks.get(own)))
        positions.append(msgspec.json.encode(tokens))
    return msgspec.Raw(b"[" + b",".join(positions) + b"]")


Triple = tuple[float | None, int, str]


def _make_triple(model: TextModel | None, logprob: float | None, token: int) -> Triple:
    # The id identifies the token, so a part of a character may become a replacement character.
    text = "" if model is None else model.get_token_bytes(token).decode(errors="replace")
    return logprob, token, text


def render_triples(model: TextModel | None, entries: Sequence[TokenLogprobs]) -> list[Triple]:
    """Render ``[logprob, token_id, text]`` of each token for ``/generate``."""
    return [_make_triple(model, entry.logprob, entry.token_id) for entry in entries]


def render_likeliest(
    model: TextModel | None, entries: Sequence[TokenLogprobs], named: int
) -> list[list[Triple] | None]:
    """Render the likeliest tokens at each position for ``/generate``; None where there are none.

    ``named``: number of tokens after them that the request named.
    """
    return [
        None if entry.logprob is None else _list_others(model, entry)[: len(entry.top_ids) - named]
        for entry in entries
    ]


def render_named(
    model: TextModel | None, entries: Sequence[TokenLogprobs], named: int
) -> list[list[Triple] | None]:
    """Render the named tokens at each position for ``/generate``, like the likeliest ones."""
    return [
        None if entry.logprob is None else _list_others(model, entry)[len(entry.top_ids) - named :]
        for entry in entries
    ]


def _list_others(model: TextModel | None, entry: TokenLogprobs) -> list[Triple]:
    pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
    return [_make_triple(model, logprob, token) for token, logprob in pairs]
