"""Keeps special tokens that a client wrote from becoming control tokens.

To a tokenizer ``<|im_end|>`` is one control token, whether the chat template wrote it or a user.
Here the template's have names of their own: a copy of the tokenizer knows every special token under
a secret name only, so that it encodes what a client wrote as any other text, in one piece with what
stands around it. (Added tokens that are not marked as special, such as runs of spaces, stay what
they are, as with transformers' ``split_special_tokens``.)

A template's output must be told from what it was given. So special tokens in the client's strings,
and ends of these strings that could become one together with what the template writes beside them,
are replaced by placeholders before the template is rendered, and put back after its own special
tokens have got their secret names.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from tokenizers import Tokenizer

from pd.core.errors import UsageError


class SpecialTokens:
    """The special tokens of one tokenizer, and a copy of it to which they are text.

    Attributes:
        tokenizer: encodes what clients wrote, and what :meth:`reveal` returns.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Takes about as long as loading the tokenizer.

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
            self.tokenizer = Tokenizer.from_str(_renamed(tokenizer.to_str(), self._names))
        except Exception as error:  # tokenizers raises nothing more specific
            raise UsageError(
                f"--split-special-tokens does not work with this model's tokenizer: {error}"
            ) from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def hide_messages(
        self, messages: list[dict[str, Any]], hidden: list[str]
    ) -> list[dict[str, Any]]:
        """Messages after :meth:`hide`, but for their roles, which are known words."""
        return [
            {key: item if key == "role" else self.hide(item, hidden) for key, item in m.items()}
            for m in messages
        ]

    def hide(self, value: Any, hidden: list[str]) -> Any:
        """The same JSON value with placeholders in it; ``hidden`` takes what they replace."""
        if isinstance(value, str):
            return self._hide(value, hidden)
        if isinstance(value, list):
            return [self.hide(item, hidden) for item in value]
        if isinstance(value, dict):
            # Fields that templates look for have no special token in their names.
            return {
                self._hide_inside(key, hidden): self.hide(item, hidden)
                for key, item in value.items()
            }
        return value

    def reveal(self, rendered: str, hidden: list[str]) -> str:
        """The text that :attr:`tokenizer` is to encode, from a template's output."""
        named = self._special.sub(lambda match: self._names[match[0]], rendered)
        return self._hidden.sub(lambda match: hidden[int(match[1])], named)

    def _hide(self, text: str, hidden: list[str]) -> str:
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


def _renamed(serialized: str, names: dict[str, str]) -> str:
    """The tokenizer with other names for special tokens, which keep their ids."""
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
        model["merges"] = [m for m in model["merges"] if not _makes(m, names)]
    return json.dumps(config, ensure_ascii=False)


def _makes(merge: str | list[str], names: dict[str, str]) -> bool:
    """Whether a merge needs or makes a token that has another name now."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    return not names.keys().isdisjoint([*parts, "".join(parts)])
