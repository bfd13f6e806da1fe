"""The plan that a load process gets before it starts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from pd.bench.load.endpoints import Options, Sampling
from pd.bench.load.target import EndpointAddress


@dataclass(frozen=True)
class Plan:
    """Settings of one load process.

    Attributes:
        process: its name in the records.
        endpoint: path of the API; ``target`` may have a prefix before it.
        max_concurrency: sessions of this process at a time; None for no limit.
        timeout: seconds until a request is given up.
        name: begin of the request ids of this run, see :meth:`request_id`.
        keep_texts: records have the texts of answers.
    """

    process: str
    target: EndpointAddress
    endpoint: str
    sampling: Sampling
    options: Options
    max_concurrency: int | None
    timeout: float
    name: str
    keep_texts: bool = False

    def request_id(self, session: int, turn: int, kind: str = "") -> str:
        """The X-Request-Id of a request; ``kind`` tells those that are not measured."""
        return f"{self.name}{kind}-{session}-{turn}"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Plan:
        parts: dict[str, Any] = {
            "target": EndpointAddress(**row["target"]),
            "sampling": Sampling(**row["sampling"]),
            "options": Options(**row["options"]),
        }
        return cls(**{**row, **parts})
