"""Pieces of streamed variables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Lists in `meta_info` with an entry for each new token of an event.
LISTS_OF_OUTPUT = ("output_token_logprobs", "output_top_logprobs")


@dataclass(frozen=True)
class Piece:
    """Part of a streamed variable."""

    text: str
    meta: Any


@dataclass
class StreamedVariable:
    """Pieces of a variable, in the order in which they came."""

    pieces: list[Piece] = field(default_factory=list)
    is_done: bool = False


def join_pieces(one: Piece, other: Piece) -> Piece:
    """Join consecutive pieces: their texts, and their log probabilities."""
    if not isinstance(one.meta, dict) or not isinstance(other.meta, dict):
        return Piece(one.text + other.text, other.meta)
    meta = dict(other.meta)
    for name in LISTS_OF_OUTPUT:
        if name in one.meta or name in meta:
            meta[name] = [*one.meta.get(name, ()), *meta.get(name, ())]
    return Piece(one.text + other.text, meta)
