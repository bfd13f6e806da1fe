"""Turns token ids into text, one token at a time, without splitting a character.

The texts concatenate to the text of all ids decoded at once, with one exception. Tokenizers with
byte fallback decode a run of byte tokens as a whole, and if one byte belongs to no character, they
turn every byte of the run into U+FFFD. We return a character as soon as its last byte is there and
cannot take it back, so only the bytes outside characters become U+FFFD, one each.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so a text that still looks incomplete after this many tokens
# is wrong, and waiting longer would not help.
_MAX_INCOMPLETE_TOKENS = 8


class Detokenizer(Protocol):
    """The text of one sequence, which grows token by token."""

    def add_token(self, token_id: int) -> str:
        """Add a token, and return the text that is certain now. It may lag some tokens."""

    def flush(self) -> str:
        """Return the rest of the text after the last token."""


class NoDetokenizer:
    """Returns no text, because the proxy has no tokenizer."""

    def add_token(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _make_byte_level_alphabet() -> dict[str, int]:
    """Invert GPT-2's mapping of bytes to printable characters.

    Printable bytes of Latin-1 stand for themselves. The others are mapped to U+0100 and up, in
    order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class TokenTable:
    """Texts and bytes of a tokenizer's tokens, computed once per token."""

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token.content: i for i, token in added.items() if token.special}
        self._special_ids = frozenset(self._special.values())
        self.byte_level = decoder is not None and decoder["type"] == "ByteLevel"
        parts = decoder.get("decoders", [decoder]) if decoder else []
        kinds = {part["type"] for part in parts}
        self.byte_fallback = "ByteFallback" in kinds
        self._decoder = tokenizer.decoder
        self._metaspace = bool(kinds & {"Metaspace", "Replace"})
        self._alphabet = _make_byte_level_alphabet()
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    def get_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def get_text(self, token_id: int) -> str | None:
        """Return a token's text; None if the token holds a part of a character."""
        try:
            return self._texts[token_id]
        except KeyError:
            pass
        try:
            text: str | None = self.get_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self._texts[token_id] = text
        return text

    def get_piece(self, token_id: int) -> str | None:
        """Return the vocabulary's entry. Ids of a padded vocabulary may have none."""
        piece: str | None = self.tokenizer.id_to_token(token_id)
        return piece

    def join_pieces(self, pieces: list[str]) -> str:
        """Decode pieces as the tokenizer does."""
        text: str = " ".join(pieces) if self._decoder is None else self._decoder.decode(pieces)
        return text

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self.get_piece(token_id)
        if token is None:
            return b""
        if self.byte_level:
            # A token with a character outside the alphabet was added verbatim.
            if all(char in self._alphabet for char in token):
                return bytes(self._alphabet[char] for char in token)
            return token.encode()
        if self.byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        if self._metaspace:
            return token.replace("▁", " ").encode()
        text: str = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text.encode()

    def make_detokenizer(
        self, skip_special_tokens: bool, kept: frozenset[str] = frozenset()
    ) -> Detokenizer:
        """Make a detokenizer for a sequence. It never skips the special tokens in ``kept``."""
        skipped: frozenset[int] = self._special_ids if skip_special_tokens else frozenset()
        if kept:
            skipped -= {self._special[text] for text in kept if text in self._special}
        if self.byte_level:
            return _ByteLevelDetokenizer(self, skipped)
        return _WindowDetokenizer(self, skipped)


class _ByteLevelDetokenizer:
    """Detokenizes byte-level BPE. Incremental UTF-8 is exact: a text is its tokens' bytes."""

    __slots__ = ("_is_inside", "_skipped", "_table", "_utf8")

    def __init__(self, table: TokenTable, skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside = False  # inside a character's bytes

    def add_token(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        text = None if self._is_inside else self._table.get_text(token_id)
        if text is None:
            text = self._utf8.decode(self._table.get_bytes(token_id))
            self._is_inside = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _ByteRun:
    """Splits a run of byte tokens into characters (UTF-8)."""

    def __init__(self) -> None:
        self._open = b""  # up to three bytes of an incomplete character

    def add_byte(self, token: str) -> list[str]:
        """Return the pieces that are certain now.

        The bytes of whole characters are byte tokens, as before. A byte outside characters is
        U+FFFD.
        """
        self._open += bytes([int(token[3:5], 16)])
        settled: list[str] = []
        while self._open:
            try:
                self._open.decode()
            except UnicodeDecodeError as error:
                if error.end == len(self._open) and error.reason == "unexpected end of data":
                    break
                settled += [_REPLACEMENT] * error.end
                self._open = self._open[error.end :]
            else:
                settled += [f"<0x{byte:02X}>" for byte in self._open]
                self._open = b""
        return settled

    def end_run(self) -> list[str]:
        """End the run, and return U+FFFD for each byte of an incomplete character."""
        left, self._open = len(self._open), b""
        return [_REPLACEMENT] * left


class _WindowDetokenizer:
    """Detokenizes with all other decoders, by decoding a window that begins one step back.

    Decoders treat the first token of a text differently (they strip a leading space). So the window
    keeps the tokens of the previous step, and we subtract their text.
    """

    def __init__(self, table: TokenTable, skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._bytes = _ByteRun()
        self._window: list[str] = []
        self._known = 0  # number of pieces whose text was returned

    def add_token(self, token_id: int) -> str:
        piece = self._table.get_piece(token_id)
        if token_id in self._skipped or piece is None:
            return ""
        if not self._table.byte_fallback:
            self._window.append(piece)
            return self._advance(hold_incomplete=True)
        if _BYTE_TOKEN.fullmatch(piece):
            self._window += self._bytes.add_byte(piece)
        else:
            self._window += [*self._bytes.end_run(), piece]
        return self._advance()

    def flush(self) -> str:
        self._window += self._bytes.end_run()
        return self._advance()

    def _advance(self, hold_incomplete: bool = False) -> str:
        pending = len(self._window) - self._known
        if not pending:
            return ""
        before = self._table.join_pieces(self._window[: self._known])
        now = self._table.join_pieces(self._window)
        if hold_incomplete and now.endswith(_REPLACEMENT) and pending < _MAX_INCOMPLETE_TOKENS:
            return ""
        self._window = self._window[self._known :]
        self._known = len(self._window)
        return now[len(before) :]
