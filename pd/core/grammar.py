"""Grammars: the form of a request's output."""

from __future__ import annotations

from typing import Literal

import msgspec

from pd.core.errors import InvalidRequestError

# Bytes of a grammar's text.
MAX_GRAMMAR_BYTES = 1 << 18

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The language of an output.

    Attributes:
        kind: form of ``text``: a JSON schema, a regular expression, a grammar in GBNF, or one of
            xgrammar's structural tags as JSON.
    """

    kind: GrammarKind
    text: str

    def validate(self) -> None:
        """Raise InvalidRequestError if the text is too long or cannot be encoded in UTF-8."""
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"{self.kind} has a lone surrogate, \\u{ord(self.text[error.start]):04x}",
                param=self.kind,
            ) from None
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                f"{self.kind} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are accepted",
                param=self.kind,
            )
