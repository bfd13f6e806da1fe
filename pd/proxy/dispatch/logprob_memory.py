"""Bounds the memory of log probabilities held by unsent answers."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd.proxy.dispatch.job import Job

# Limit for all processes of a proxy together. The requests of one owner may hold half of it.
MAX_BYTES = 2 << 30
# Bytes of an entry, and of each of its likeliest tokens.
_ENTRY_BYTES, _TOP_BYTES = 256, 72


def estimate_entry_bytes(top: int) -> int:
    """Estimate the bytes of the log probability of one token with ``top`` likeliest tokens."""
    return _ENTRY_BYTES + _TOP_BYTES * top


class LogprobMemory:
    """Counts the bytes of arrived log probabilities, per request and owner.

    Admission limits their maximum number. Few answers reach their maximum length, so that limit
    alone would reject many requests or allow too much memory.
    """

    def __init__(self, processes: int = 1) -> None:
        """``processes``: number of processes of the proxy, which share the memory evenly."""
        self._limit = MAX_BYTES // processes
        self._held: dict[str, dict[Job, int]] = defaultdict(dict)
        self._total = 0

    @property
    def total(self) -> int:
        """Bytes of all requests."""
        return self._total

    @property
    def owner_limit(self) -> int:
        """Bytes that the requests of one owner may hold."""
        return self._limit // 2

    def add_bytes(self, job: Job, more: int) -> Job | None:
        """Count the bytes of log probabilities received for a request.

        Returns:
            The request to end if the memory is exceeded: the largest one of the owner holding most.
        """
        jobs = self._held[job.owner]
        jobs[job] = jobs.get(job, 0) + more
        self._total += more
        owner = job.owner
        if self._total > self._limit:
            owner = max(self._held, key=lambda name: sum(self._held[name].values()))
        elif sum(jobs.values()) <= self.owner_limit:
            return None
        held = self._held[owner]
        return max(held, key=held.__getitem__)

    def release_job(self, job: Job) -> None:
        """Forget a finished request."""
        jobs = self._held[job.owner]
        self._total -= jobs.pop(job, 0)
        if not jobs:
            del self._held[job.owner]
