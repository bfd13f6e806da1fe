"""Log probabilities in the shapes of the three APIs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pd.proxy.tokenizer import token_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd.core.messages import TokenLogprobs
    from pd.proxy.tokenizer import TextModel


# One token's log probability takes about so many bytes of JSON.
_ENTRY_BYTES = 48


def size(entries: int, top: int) -> int:
    """About how many bytes of JSON that many entries are, with ``top`` likeliest tokens each."""
    return entries * (1 + top) * _ENTRY_BYTES


class TokenNames(NamedTuple):
    """Names of tokens in OpenAI's shapes, and how many of the likeliest ones are shown.

    Attributes:
        by_id: a token is called ``token_id:17`` instead of by its text.
        top: a node may send more of the likeliest tokens than the client wants.
    """

    model: TextModel | None
    top: int
    by_id: bool = False

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.by_id else token_text(self.model, token)

    def best(self, entry: TokenLogprobs) -> Iterable[tuple[int, float]]:
        """The likeliest tokens at a place, and their log probabilities."""
        pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
        return itertools.islice(pairs, self.top)


def legacy(
    names: TokenNames, entries: Sequence[TokenLogprobs], offsets: Sequence[int]
) -> dict[str, Any]:
    """``/v1/completions``: parallel lists; ``offsets`` is where each token begins in the text."""
    top: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprob is None:
            top.append(None)
            continue
        likeliest = {names.name(token): logprob for token, logprob in names.best(entry)}
        likeliest.setdefault(names.name(entry.token_id), entry.logprob)
        top.append(likeliest)
    return {
        "tokens": [names.name(entry.token_id) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": top,
        "text_offset": list(offsets),
    }


def chat(names: TokenNames, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """``/v1/chat/completions``: one object per token, with its bytes and (as in SGLang) its id."""
    model = names.model

    def describe(token: int, logprob: float | None) -> dict[str, Any]:
        data = None if model is None else list(model.token_bytes(token))
        name = names.name(token)
        return {"token": name, "token_id": token, "logprob": logprob, "bytes": data}

    content = []
    for entry in entries:
        top = [describe(token, logprob) for token, logprob in names.best(entry)]
        content.append(describe(entry.token_id, entry.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def of_prompt(names: TokenNames, entries: Sequence[TokenLogprobs]) -> msgspec.Raw:
    """vLLM's ``prompt_logprobs`` as JSON: at each place the likeliest tokens and the prompt's own
    by their ids, null at the first. The rank of a token that is none of the likeliest is null.

    A long prompt has millions of them, which would take far more memory as objects.
    """

    def describe(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {
            "logprob": logprob,
            "rank": rank,
            "decoded_token": token_text(names.model, token),
        }

    found: list[bytes] = []
    for entry in entries:
        if entry.logprob is None:
            found.append(b"null")
            continue
        ranks = {token: rank for rank, token in enumerate(entry.top_ids, 1)}
        own = entry.token_id
        tokens = {
            str(token): describe(token, logprob, ranks[token])
            for token, logprob in names.best(entry)
        }
        tokens.setdefault(str(own), describe(own, entry.logprob, ranks.get(own)))
        found.append(msgspec.json.encode(tokens))
    return msgspec.Raw(b"[" + b",".join(found) + b"]")


Triple = tuple[float | None, int, str]


def _triple(model: TextModel | None, logprob: float | None, token: int) -> Triple:
    # The id tells tokens apart, so half a character may stand as a replacement character here.
    text = "" if model is None else model.token_bytes(token).decode(errors="replace")
    return logprob, token, text


def chosen(model: TextModel | None, entries: Sequence[TokenLogprobs]) -> list[Triple]:
    """``/generate``: ``[logprob, token_id, text]`` of each token."""
    return [_triple(model, entry.logprob, entry.token_id) for entry in entries]


def likeliest(
    model: TextModel | None, entries: Sequence[TokenLogprobs]
) -> list[list[Triple] | None]:
    """``/generate``: the likeliest tokens at each position; None where there is none."""
    return [
        None
        if entry.logprob is None
        else [
            _triple(model, logprob, token)
            for token, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        for entry in entries
    ]
