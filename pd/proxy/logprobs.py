"""Log probabilities in the shapes of the three APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd.proxy.tokenizer import token_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.core.messages import TokenLogprobs
    from pd.proxy.tokenizer import TextModel


# One token's log probability takes about so many bytes of JSON.
_ENTRY_BYTES = 48


def size(entries: int, top: int) -> int:
    """About how many bytes of JSON that many entries are, with ``top`` likeliest tokens each."""
    return entries * (1 + top) * _ENTRY_BYTES


def legacy(
    model: TextModel | None, entries: Sequence[TokenLogprobs], offsets: Sequence[int]
) -> dict[str, Any]:
    """``/v1/completions``: parallel lists; ``offsets`` is where each token begins in the text."""
    top: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprob is None:
            top.append(None)
            continue
        best = zip(entry.top_ids, entry.top_logprobs, strict=True)
        likeliest = {token_text(model, token): logprob for token, logprob in best}
        likeliest.setdefault(token_text(model, entry.token_id), entry.logprob)
        top.append(likeliest)
    return {
        "tokens": [token_text(model, entry.token_id) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": top,
        "text_offset": list(offsets),
    }


def chat(model: TextModel | None, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """``/v1/chat/completions``: one object per token, with its bytes."""

    def describe(token: int, logprob: float | None) -> dict[str, Any]:
        data = None if model is None else list(model.token_bytes(token))
        return {"token": token_text(model, token), "logprob": logprob, "bytes": data}

    content = []
    for entry in entries:
        best = zip(entry.top_ids, entry.top_logprobs, strict=True)
        top = [describe(token, logprob) for token, logprob in best]
        content.append(describe(entry.token_id, entry.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


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
