"""Objectives of requests, and counts of good requests (`--goodput ttft:…,tpot:…,itl:…,e2el:…`).

Limits are milliseconds, or have a unit (``s``, ``ms``, ``us``). The limit of TTFT may grow with the
prompt, ``base+per_token``: ``ttft:1s+40us`` gives a prompt of 30,000 tokens 2.2 s, and one of 100
tokens 1.004 s. ``tpot`` limits a request's mean time per token, ``itl`` every gap between two of
its events, and ``e2el`` the time to its last token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.bench.load.records import CANCELLED, INTERRUPTED, OK
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.bench.load.records import Record

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "": 1e-3}
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(s|ms|us|µs|)")
NAMES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True)
class Objectives:
    """Limits in seconds; None for no limit.

    Attributes:
        ttft_per_token: added to ``ttft`` for each token of the prompt.
    """

    ttft: float | None = None
    ttft_per_token: float = 0.0
    tpot: float | None = None
    itl: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, text: str) -> Objectives:
        """Parse objectives, separated by commas or spaces. Raises UsageError."""
        limits: dict[str, float] = {}
        for part in filter(None, re.split(r"[,\s]+", text)):
            name, _, value = part.partition(":")
            base, plus, per_token = value.partition("+")
            if name not in NAMES or (plus and name != "ttft"):
                raise UsageError(
                    f"--goodput is {', '.join(f'{n}:MS' for n in NAMES)} (ttft also as "
                    f"ttft:BASE+PER_TOKEN), not {part}"
                )
            limits[name] = _parse_limit(part, base)
            if plus:
                limits["ttft_per_token"] = _parse_limit(part, per_token)
        if not limits:
            raise UsageError("--goodput has no objective; give one such as ttft:1000,tpot:50")
        return cls(**limits)

    def find_missed(self, record: Record) -> list[str]:
        """Return the names of the objectives missed by a whole answer.

        An unknown time misses its objective if the answer must have had one: TTFT and the end for
        every answer, TPOT for two tokens or more, gaps if
        :attr:`~pd.bench.load.records.Record.lacks_gaps`. An answer of one token, or in one event,
        has no gap, so it misses none.
        """
        many = record.output_tokens > 1
        # Limit, time, and whether the answer must have had such a time.
        objectives: dict[str, tuple[float | None, float | None, bool]] = {
            "ttft": (self.ttft_limit(record.num_prompt_tokens), record.ttft, True),
            "tpot": (self.tpot, record.tpot, many),
            "itl": (self.itl, max(record.gaps, default=None), record.lacks_gaps),
            "e2el": (self.e2el, record.e2e, True),
        }
        return [
            name
            for name, (limit, seconds, is_required) in objectives.items()
            if limit is not None and (is_required if seconds is None else seconds > limit)
        ]

    def ttft_limit(self, prompt_tokens: int) -> float | None:
        """Return the limit of the time to the first token for a prompt."""
        return None if self.ttft is None else self.ttft + self.ttft_per_token * prompt_tokens


def _parse_limit(part: str, text: str) -> float:
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--goodput {part}: a limit is a number of ms, or like 1.5s or 40us")
    return float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True)
class Goodput:
    """Counts of good requests, which met every objective.

    Attributes:
        good: number of these requests.
        counted: number of all requests; failed ones count, but not cancelled ones.
        missed: number of requests that missed each objective; "error" counts failed requests.
    """

    good: int
    counted: int
    missed: dict[str, int]

    @property
    def share(self) -> float:
        return self.good / self.counted if self.counted else 0.0


def count_good(records: Sequence[Record], objectives: Objectives) -> Goodput:
    counted = [record for record in records if record.status not in (CANCELLED, INTERRUPTED)]
    missed = dict.fromkeys((*NAMES, "error"), 0)
    good = 0
    for record in counted:
        names = objectives.find_missed(record) if record.status == OK else ["error"]
        good += not names
        for name in names:
            missed[name] += 1
    return Goodput(good, len(counted), {name: count for name, count in missed.items() if count})
