"""Keeps special tokens in a client's text from becoming control tokens.

A tokenizer turns ``<|im_end|>`` into one control token, whether the template or a user wrote it. So
we copy the tokenizer and give each special token a secret name. The copy encodes a client's
``<|im_end|>`` as plain text, together with the text around it. (Added tokens that are not special,
such as runs of spaces, stay as they are, as with transformers' ``split_special_tokens``.)

We must distinguish a template's own output from its input. So before rendering, we replace special
tokens in the client's strings by placeholders, and also the ends of these strings if they could
form a special token with the template's text. After rendering, we give the remaining special tokens
their secret names, and put the client's text back.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from tokenizers import Tokenizer

from pd.core.errors import UsageError


class SpecialTokens:
    """The special tokens of a tokenizer, and a copy of it that treats them as text.

    Attributes:
        tokenizer: the copy. It encodes clients' texts, and results of :meth:`reveal_text`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Copy a tokenizer, which takes about as long as loading it.

        Raises UsageError if it cannot be copied.
        """
        secret = secrets.token_hex(8)
        added = tokenizer.get_added_tokens_decoder().items()
        self._names = {t.content: f"{secret}n{i}e" for i, t in added if t.special and t.content}
        self._placeholder = f"{secret}p{{}}e"
        self._hidden = re.compile(f"{secret}p([0-9]+)e")
        self._special = re.compile(
            "|".join(re.escape(t) for t in sorted(self._names, key=len, reverse=True)) or "(?!)"
        )
        self._starts = {t[:size] for t in self._names for size in range(1, len(t))}
        self._ends = {t[-size:] for t in self._names for size in range(1, len(t))}
        self._longest = max(map(len, self._names), default=0)
        try:
            self.tokenizer = Tokenizer.from_str(_rename_tokens(tokenizer.to_str(), self._names))
        except Exception as error:  # tokenizers raises nothing more specific
            raise UsageError(
                f"--split-special-tokens does not work with this model's tokenizer: {error}"
            ) from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def hide_messages(
        self, messages: list[dict[str, Any]], hidden: list[str]
    ) -> list[dict[str, Any]]:
        """Apply :meth:`hide_value` to all fields of messages except their roles."""
        return [
            {
                key: item if key == "role" else self.hide_value(item, hidden)
                for key, item in m.items()
            }
            for m in messages
        ]

    def hide_value(self, value: Any, hidden: list[str]) -> Any:
        """Replace special tokens in a JSON value by placeholders. ``hidden`` receives the
        originals.
        """
        if isinstance(value, str):
            return self._hide_text(value, hidden)
        if isinstance(value, list):
            return [self.hide_value(item, hidden) for item in value]
        if isinstance(value, dict):
            # The names of fields hold no special tokens, so templates still find them.
            return {
                self._hide_inside(key, hidden): self.hide_value(item, hidden)
                for key, item in value.items()
            }
        return value

    def reveal_text(self, rendered: str, hidden: list[str]) -> str:
        """Turn a template's output into the text for :attr:`tokenizer`."""
        named = self._special.sub(lambda match: self._names[match[0]], rendered)
        return self._hidden.sub(lambda match: hidden[int(match[1])], named)

    def _hide_text(self, text: str, hidden: list[str]) -> str:
        head, tail = "", ""
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[:size] in self._ends:
                head, text = self._put_away(text[:size], hidden), text[size:]
                break
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size:] in self._starts:
                tail, text = self._put_away(text[-size:], hidden), text[:-size]
                break
        return head + self._hide_inside(text, hidden) + tail

    def _hide_inside(self, text: str, hidden: list[str]) -> str:
        return self._special.sub(lambda match: self._put_away(match[0], hidden), text)

    def _put_away(self, part: str, hidden: list[str]) -> str:
        hidden.append(part)
        return self._placeholder.format(len(hidden) - 1)


def _rename_tokens(serialized: str, names: dict[str, str]) -> str:
    """Give the special tokens of a serialized tokenizer other names. Their ids stay."""
    config = json.loads(serialized)
    for token in config["added_tokens"]:
        if token["special"]:
            token["content"] = names.get(token["content"], token["content"])
    model = config["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        merges = []
        for merge in model["merges"]:
            parts = merge.split(" ") if isinstance(merge, str) else merge
            # Drop merges that need or make a renamed token.
            if names.keys().isdisjoint([*parts, "".join(parts)]):
                merges.append(merge)
        model["merges"] = merges
    return json.dumps(config, ensure_ascii=False)
