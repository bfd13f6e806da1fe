"""The settings of a load process."""

from __future__ import annotations

from dataclasses import dataclass

# msgspec reads these types when a load process decodes its plan.
from pd.bench.load.endpoints import Options, Sampling  # noqa: TC001
from pd.bench.load.target import EndpointAddress  # noqa: TC001


@dataclass(frozen=True)
class Plan:
    """Settings of one load process.

    Attributes:
        process: name of the process in records.
        endpoint: path of the API; ``target`` may have a prefix before it.
        max_concurrency: sessions of this process at a time; None for no limit.
        timeout: seconds until a request fails.
        name: prefix of the run's request ids, see :meth:`request_id`.
        keep_texts: whether records have the texts of answers.
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
        """Make the X-Request-Id of a request; ``kind`` marks warm-up requests."""
        return f"{self.name}{kind}-{session}-{turn}"
