"""Records of requests, one JSON object a line of ``requests.jsonl``.

Times are seconds since the start of the run, which ``summary.json`` gives as ``start_time`` (Unix
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
# Kinds of errors of a request without a connection: the server gave it none, or the client's own
# machine had no ports, descriptors or memory for it.
CONNECT, CLIENT = "connect", "client"


@dataclass
class Record:
    """One request.

    Attributes:
        session, turn: which session it belongs to, and its place there, from 0.
        request_id: the X-Request-Id that it was sent with; empty if it is not known.
        process: load process that sent it, such as "local/0".
        status: "ok", "error", "cancelled" (by ``--cancel-rate``) or "interrupted" (by Ctrl-C).
        error_kind: such as "http 429", "connect", "client", "cut", "timeout"; ``error`` is the
            message.
        planned_prompt_tokens, max_tokens: what the dataset asked for.
        prompt_tokens, cached_tokens: as the server counts them.
        output_tokens: tokens that came; ``counted_by`` says how they were counted.
        scheduled: when the schedule wanted it sent; null for what waits for another request.
        due: when the client could send it: the scheduled time, or later if it waited for a place
            or for the turn before.
        sent: when it was written; if its connection was not there yet when it was due, ``due``,
            so the wait for the server to accept counts.
        lag: seconds by which the client was late to send it.
        connect: seconds to open the connection.
        first, second, last: when the first, second and last token came.
        end: when the last byte came.
        times: when each event that holds tokens came; ``tokens`` how many each had (null if only
            the sum is known).
        stages: seconds of each stage, where the server says so.
        valid_output: whether an answer with a schema is JSON.
        text: the answer, where ``--save-detailed`` wants it.
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
        """Tokens of the prompt: the server's count, or else what was planned."""
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
        """Intervals between events that hold tokens."""
        return [later - before for before, later in pairwise(self.times)]

    @property
    def lacks_gaps(self) -> bool:
        """Whether tokens came one after the other, but no interval between them is known.

        So it is with records of other harnesses that have the first and the last time only. Tokens
        that all came in one event have no interval.
        """
        at_once = self.first is not None and self.first == self.last
        return self.output_tokens > 1 and len(self.times) < 2 and not at_once

    def to_json(self) -> dict[str, Any]:
        """Fields with times in whole microseconds."""
        row = dataclasses.asdict(self)
        return {name: _rounded(value) for name, value in row.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return value


def write_records(path: Path, records: Iterable[Record]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record.to_json()) + "\n" for record in records)


def read_records(path: Path) -> list[Record]:
    """Records of a file. Raises UsageError for one that is none."""
    records = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                records.append(Record(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise UsageError(f"{path}:{number} is no record of a request: {error}") from None
    return records


def second_token_time(times: list[float], tokens: list[int] | None) -> float | None:
    """Time at which the second token came: with the first event, if that held two."""
    if tokens is not None and tokens and tokens[0] > 1:
        return times[0]
    return times[1] if len(times) > 1 else None
