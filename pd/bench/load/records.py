"""Records of requests, one JSON object per line of ``requests.jsonl``.

Times are seconds since the start of the run; ``summary.json`` has the start as ``start_time`` (Unix
time). Unknown fields are null.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# States of a record.
OK, ERROR, CANCELLED, INTERRUPTED = "ok", "error", "cancelled", "interrupted"
# Kinds of errors of a request without a connection: the server refused it, or the client's machine
# had no ports, descriptors or memory for it.
CONNECT, CLIENT = "connect", "client"


@dataclass
class Record:
    """One request.

    Attributes:
        session, turn: number of its session, and its place there, from 0.
        request_id: the X-Request-Id of the request; empty if unknown.
        process: load process that sent it, such as "local/0".
        status: "ok", "error", "cancelled" (by ``--cancel-rate``) or "interrupted" (by Ctrl-C).
        error_kind: such as "http 429", "connect", "client", "cut", "timeout"; ``error`` is the
            message.
        planned_prompt_tokens, max_tokens: planned lengths.
        prompt_tokens, cached_tokens: the server's counts.
        output_tokens: tokens of the answer; ``counted_by`` says how we counted them.
        scheduled: when the schedule planned to send it; null if it waits for another request.
        due: when the client could send it: as scheduled, or later if it waited for a place or for
            the previous turn.
        sent: when it was written. If it was due before its connection was open, ``sent`` is
            ``due``, so the wait for the server to accept counts.
        lag: seconds by which the client was late.
        connect: seconds to open the connection.
        first, second, last: when the first, second and last token arrived.
        end: when the last byte arrived.
        times: when each event with tokens arrived; ``tokens`` how many tokens each had (null if
            only their sum is known).
        stages: seconds of each stage, if the server says so.
        valid_output: whether an answer with a schema is JSON.
        text: the answer, with ``--save-detailed``.
    """

    session: int
    turn: int = 0
    request_id: str = ""
    process: str = ""
    status: str = OK
    error_kind: str | None = None
    error: str | None = None
    http_status: int | None = None
    planned_prompt_tokens: int = 0
    max_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    counted_by: str = "events"
    finish_reason: str | None = None
    scheduled: float | None = None
    due: float = 0.0
    sent: float = 0.0
    lag: float = 0.0
    connect: float | None = None
    first: float | None = None
    second: float | None = None
    last: float | None = None
    end: float | None = None
    times: list[float] = field(default_factory=list)
    tokens: list[int] | None = None
    stages: dict[str, float] | None = None
    valid_output: bool | None = None
    text: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt: the server's count, or else the planned number."""
        return self.planned_prompt_tokens if self.prompt_tokens is None else self.prompt_tokens

    @property
    def ttft(self) -> float | None:
        """Time to the first token."""
        return None if self.first is None else self.first - self.sent

    @property
    def second_token(self) -> float | None:
        """Time from the first token to the second."""
        if self.second is None or self.first is None:
            return None
        return self.second - self.first

    @property
    def e2e(self) -> float | None:
        """Time to the last token."""
        return None if self.last is None else self.last - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean time of a token after the first: ``(last - first) / (n - 1)``."""
        if self.first is None or self.last is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Intervals between events with tokens."""
        return [later - before for before, later in pairwise(self.times)]

    @property
    def lacks_gaps(self) -> bool:
        """Whether tokens arrived one after another, but no interval between them is known.

        That happens with records of other harnesses that only have the first and the last time.
        Tokens in one event have no interval.
        """
        at_once = self.first is not None and self.first == self.last
        return self.output_tokens > 1 and len(self.times) < 2 and not at_once

    def to_json(self) -> dict[str, Any]:
        """Return the fields, with times in whole microseconds."""
        row = dataclasses.asdict(self)
        return {name: _round_times(value) for name, value in row.items()}


def _round_times(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, list):
        return [_round_times(each) for each in value]
    return value


def write_records(path: Path, records: Iterable[Record]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record.to_json()) + "\n" for record in records)


def read_records(path: Path) -> list[Record]:
    """Read the records of a file. Raises UsageError for any other file."""
    records = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                records.append(Record(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise UsageError(f"{path}:{number} is no record of a request: {error}") from None
    return records


def second_token_time(times: list[float], tokens: list[int] | None) -> float | None:
    """Return when the second token arrived: with the first event, if it had two tokens."""
    if tokens is not None and tokens and tokens[0] > 1:
        return times[0]
    return times[1] if len(times) > 1 else None
