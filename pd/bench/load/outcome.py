"""Makes the record of a request from its answer."""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.bench.load.answers import UNFINISHED
from pd.bench.load.records import (
    CANCELLED,
    CLIENT,
    CONNECT,
    ERROR,
    INTERRUPTED,
    OK,
    Record,
    second_token_time,
)

if TYPE_CHECKING:
    from pd.bench.load.answers import Answer
    from pd.bench.load.plan import Plan
    from pd.bench.load.workload import Session

# The client's machine has no ports, descriptors or memory.
_ERRORS_OF_THE_CLIENT = frozenset(
    (errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
)
_STATUS_OF_CUT = {"cancelled": CANCELLED, "interrupted": INTERRUPTED}


@dataclass
class Asked:
    """One request as the client saw it; times of ``time.perf_counter``.

    Attributes:
        scheduled, due: see :class:`~pd.bench.load.records.Record`.
        lag: seconds by which the client was late to connect, and then to write.
        failure: why it was not sent; ``failure_kind`` is its kind in the record.
        cut_reason: why the client closed the connection early; None if it did not.
    """

    session: Session
    turn: int
    scheduled: float | None
    due: float
    sent: float = 0.0
    lag: float = 0.0
    connect: float | None = None
    failure: str | None = None
    failure_kind: str = CONNECT
    cut_reason: str | None = None

    def note_sent(self, begin: float, connected: float, written: float) -> None:
        """Note when we began to connect, were connected, and wrote the request."""
        self.connect = connected - begin
        late = max(0.0, begin - self.due)
        self.lag = late + max(0.0, written - max(self.due, connected))
        self.sent = written if connected <= self.due else self.due

    def note_connection_error(self, error: OSError) -> None:
        """Note why there is no connection, and whether that is the client's fault."""
        self.failure, self.sent = f"{type(error).__name__}: {error}", self.due
        self.failure_kind = CLIENT if error.errno in _ERRORS_OF_THE_CLIENT else CONNECT

    def note_interruption(self) -> None:
        """Note that the run ended while the request waited for its connection."""
        self.cut_reason, self.sent = "interrupted", self.due


def make_record(asked: Asked, answer: Answer, plan: Plan, start: float) -> Record:
    """Make the record of a request. Its times are relative to ``start``."""
    turn = asked.session.turns[asked.turn]
    times = [at - start for at in answer.times]
    record = Record(
        session=asked.session.number,
        turn=asked.turn,
        request_id=plan.request_id(asked.session.number, asked.turn),
        process=plan.process,
        http_status=answer.http_status or None,
        planned_prompt_tokens=turn.num_tokens,
        max_tokens=turn.max_tokens,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        output_tokens=answer.num_tokens,
        counted_by=answer.counted_by,
        finish_reason=answer.finish_reason,
        scheduled=None if asked.scheduled is None else asked.scheduled - start,
        due=asked.due - start,
        sent=asked.sent - start,
        lag=asked.lag,
        connect=asked.connect,
        first=times[0] if times else None,
        second=second_token_time(times, answer.counts),
        last=times[-1] if times else None,
        end=None if answer.end is None else answer.end - start,
        times=times,
        tokens=answer.counts,
        stages=answer.stages,
        text=answer.text if plan.keep_texts else None,
    )
    _set_status(record, asked, answer)
    if turn.schema is not None and record.status == OK:
        record.valid_output = _is_json(answer.text)
    return record


def _set_status(record: Record, asked: Asked, answer: Answer) -> None:
    if asked.failure is not None:
        record.status, record.error = ERROR, asked.failure
        record.error_kind = asked.failure_kind
    elif answer.error_kind is None:
        record.status = OK
    elif asked.cut_reason in _STATUS_OF_CUT and answer.error_kind in UNFINISHED:
        record.status = _STATUS_OF_CUT[asked.cut_reason]
    elif asked.cut_reason in ("timeout", "too long"):
        message = f"given up by the client: {asked.cut_reason}"
        record.status, record.error_kind, record.error = ERROR, asked.cut_reason, message
    else:
        record.status, record.error_kind, record.error = ERROR, answer.error_kind, answer.error


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
