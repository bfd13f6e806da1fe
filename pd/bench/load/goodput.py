"""Objectives of requests, and which requests met them (`--goodput ttft:…,tpot:…,itl:…,e2el:…`).

Limits are milliseconds, or have a unit (``s``, ``ms``, ``us``). The limit of TTFT may grow with the
prompt, ``base+per_token``: ``ttft:1s+40us`` gives a prompt of 30,000 tokens 2.2 s, and one of 100
tokens 1.004 s. ``tpot`` limits a request's mean time per token, ``itl`` every gap between two of
its events, ``e2el`` the time to its last token.
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
    """Limits in seconds; None where there is none.

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
        """Read objectives, separated by commas or spaces. Raises UsageError."""
        limits: dict[str, float] = {}
        for part in filter(None, re.split(r"[,\s]+", text)):
            name, _, value = part.partition(":")
            base, plus, per_token = value.partition("+")
            if name not in NAMES or (plus and name != "ttft"):
                raise UsageError(
                    f"--goodput is {', '.join(f'{n}:MS' for n in NAMES)} (ttft also as "
                    f"ttft:BASE+PER_TOKEN), not {part}"
                )
            limits[name] = _seconds(part, base)
            if plus:
                limits["ttft_per_token"] = _seconds(part, per_token)
        if not limits:
            raise UsageError("--goodput has no objective; give one such as ttft:1000,tpot:50")
        return cls(**limits)

    def missed(self, record: Record) -> list[str]:
        """Names of the objectives that a whole answer missed.

        An objective whose time is unknown is missed where there must have been such a time: TTFT
        and the end for every answer, TPOT for two tokens or more, gaps where
        :attr:`~pd.bench.load.records.Record.lacks_gaps`. An answer of one token, or in one event,
        has no gap and misses none.
        """
        limits = {
            "ttft": self.ttft_limit(record.num_prompt_tokens),
            "tpot": self.tpot,
            "itl": self.itl,
            "e2el": self.e2el,
        }
        gaps = record.gaps
        found = {
            "ttft": record.ttft,
            "tpot": record.tpot,
            "itl": max(gaps) if gaps else None,
            "e2el": record.e2e,
        }
        unknown = {
            "ttft": record.ttft is None,
            "tpot": record.tpot is None and record.output_tokens > 1,
            "itl": record.lacks_gaps,
            "e2el": record.e2e is None,
        }
        return [
            name
            for name, limit in limits.items()
            if limit is not None and (unknown[name] or (found[name] or 0.0) > limit)
        ]

    def ttft_limit(self, prompt_tokens: int) -> float | None:
        """Limit of the time to the first token of a prompt."""
        return None if self.ttft is None else self.ttft + self.ttft_per_token * prompt_tokens


def _seconds(part: str, text: str) -> float:
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"--goodput {part}: a limit is a number of ms, or like 1.5s or 40us")
    return float(found[1]) * _UNITS[found[2]]


@dataclass(frozen=True)
class Goodput:
    """Requests that met every objective.

    Attributes:
        good: their number.
        counted: all requests that should have: those of clients that hung up are left out, errors
            are not.
        missed: by objective, how many requests missed it; "error" counts those that failed.
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
        names = objectives.missed(record) if record.status == OK else ["error"]
        good += not names
        for name in names:
            missed[name] += 1
    return Goodput(good, len(counted), {name: count for name, count in missed.items() if count})
