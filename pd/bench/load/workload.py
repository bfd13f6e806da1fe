"""Sessions of turns, which are what a run sends. A plain request is a session of one turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

# Token ids or text, or messages of a chat.
Prompt = list[int] | str | list[dict[str, Any]]


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        prompt: what this turn adds to the conversation; all of the prompt in the first turn.
        num_tokens: tokens of ``prompt`` as they were planned; 0 where only the server can tell.
        max_tokens: length of the answer at most, and with ``ignore_eos`` exactly.
        think_time: seconds between the end of the answer before and this turn.
        schema: JSON schema that the answer has to follow; None for free text.
        extra: further fields of the request's body.
    """

    prompt: Prompt
    num_tokens: int
    max_tokens: int
    think_time: float = 0.0
    schema: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Session:
    """Turns that are sent one after the other.

    Attributes:
        number: place in the schedule, from 0.
        arrival: seconds after the start; None: as soon as one of ``max_concurrency`` places is
            free.
        cancel_after: seconds after each turn was sent at which its client hangs up, or None; a turn
            that ends before goes on with the next.
    """

    number: int
    turns: tuple[Turn, ...]
    arrival: float | None = None
    cancel_after: float | None = None

    def to_json(self) -> dict[str, Any]:
        turns = [vars(turn) for turn in self.turns]
        return {**vars(self), "turns": turns}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Session:
        return cls(**{**row, "turns": tuple(Turn(**turn) for turn in row["turns"])})


def longest(turns: Sequence[Turn]) -> int:
    """Tokens of a session's last prompt and answer, if every answer is as long as it may be."""
    return sum(turn.num_tokens + turn.max_tokens for turn in turns)
