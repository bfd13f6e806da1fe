"""The sessions of a run. A plain request is a session with one turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

# Token ids, text, or the messages of a chat.
Prompt = list[int] | str | list[dict[str, Any]]


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        prompt: addition of this turn to the conversation; the whole prompt in the first turn.
        num_tokens: planned tokens of ``prompt``; 0 if only the server can count them.
        max_tokens: most tokens of the answer; with ``ignore_eos`` its exact length.
        think_time: seconds between the end of the previous answer and this turn.
        schema: JSON schema for the answer; None for free text.
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
    """Turns that follow one another.

    Attributes:
        number: place in the schedule, from 0.
        arrival: seconds after the start; None: as soon as one of ``max_concurrency`` places is
            free.
        cancel_after: seconds after sending a turn at which the client hangs up, or None. If the
            turn ends before, the session goes on with the next.
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


def count_tokens(turns: Sequence[Turn]) -> int:
    """Count the tokens of a session's last prompt and answer, if all answers have full length."""
    return sum(turn.num_tokens + turn.max_tokens for turn in turns)
