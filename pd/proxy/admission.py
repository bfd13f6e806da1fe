"""Admission of requests into the system, and their names."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pd.core.errors import InvalidRequestError, QueueFullError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.proxy.generation import Spec
    from pd.proxy.job import Job
    from pd.proxy.ledger import Ledger

# Prompt tokens of all requests in the system: 512 MiB here, and as much in messages.
MAX_TOKENS = 1 << 27
# Log probabilities that the answers in the system may hold, over all processes of the proxy. Each
# takes some 80 bytes here, so they take 5 GiB if every answer becomes as long as it may.
MAX_LOGPROBS = 1 << 26


class Admission:
    """Counts prompts in the system, whether they were handed to nodes already or not, and keeps the
    names of requests. Everything runs on the event loop.

    Args:
        max_queue: prompts times their ``n`` that may be in the system.
        ledger: has the counts of all processes of the proxy.

    Attributes:
        is_closed: nothing is admitted any more.
    """

    def __init__(self, max_queue: int, ledger: Ledger) -> None:
        self.is_closed = False
        self._max_queue = max_queue
        self._ledger = ledger
        # Names of requests under way, each with its owner.
        self._rids: set[tuple[str, str]] = set()

    def check(self, num_choices: int, num_tokens: int = 0, num_logprobs: int = 0) -> None:
        """Refuse before any work is done. Raises QueueFullError, UnavailableError or, for a request
        that could never be admitted, InvalidRequestError.

        Args:
            num_choices: prompts, times the answers that are wanted of each as far as that is known.
            num_tokens: of the prompts, as far as that is known.
            num_logprobs: log probabilities that the answers may hold, as far as that is known.
        """
        if self.is_closed:
            raise UnavailableError("the proxy is shutting down")
        if num_choices > self._max_queue:
            raise InvalidRequestError(
                f"a batch of {num_choices} prompts times `n` exceeds the queue of "
                f"{self._max_queue}; send smaller batches"
            )
        if num_logprobs > MAX_LOGPROBS:
            raise InvalidRequestError(
                f"the answers may hold {num_logprobs} log probabilities; at most {MAX_LOGPROBS} "
                "are given at once, so ask for shorter answers, a smaller n, fewer likeliest "
                "tokens or fewer prompts"
            )
        self._check_room(num_choices, num_tokens, num_logprobs)

    def admit(self, job: Job, specs: Sequence[Spec]) -> set[tuple[str, str]]:
        """Count the prompts and log probabilities of a job and take its names; :meth:`release`
        gives back the last two. A probe is admitted to a full queue: the node that it may let back
        in is what shortens the queue.

        Raises UnavailableError, QueueFullError, or InvalidRequestError for a name that is in use.
        """
        num_choices = sum(spec.params.n for spec in specs)
        num_tokens = sum(len(spec.token_ids) for spec in specs)
        num_logprobs = sum(spec.num_logprobs for spec in specs)
        if not job.is_probe:
            self.check(num_choices, num_tokens, num_logprobs)
        rids = self._take_rids(job, specs)
        self._ledger.add(num_choices, num_tokens, num_logprobs)
        if self._ledger.is_shared and not job.is_probe:
            try:
                # Another process of the proxy may have admitted others at the same moment.
                self._check_room(0, 0, 0)
            except QueueFullError:
                self._ledger.add(-num_choices, -num_tokens, 0)
                self.release(rids, specs)
                raise
        return rids

    def ended(self, spec: Spec) -> None:
        """A prompt has left the system; its answers are kept until their job ends."""
        self._ledger.add(-spec.params.n, -len(spec.token_ids), 0)

    def release(self, rids: set[tuple[str, str]], specs: Sequence[Spec]) -> None:
        """A job has ended: free its names and the room of its log probabilities."""
        self._rids -= rids
        self._ledger.add(0, 0, -sum(spec.num_logprobs for spec in specs))

    def _check_room(self, num_choices: int, num_tokens: int, num_logprobs: int) -> None:
        """Raises QueueFullError if so many more would be too many."""
        choices, tokens = self._ledger.prompts, self._ledger.tokens
        if choices + num_choices > self._max_queue:
            raise QueueFullError(
                f"{choices} requests times `n` are in the system, at most {self._max_queue} may "
                "be; try again later"
            )
        if tokens + num_tokens > MAX_TOKENS:
            raise QueueFullError(
                f"prompts of {tokens} tokens are in the system, at most {MAX_TOKENS} may be; try "
                "again later"
            )
        logprobs = self._ledger.logprobs
        if logprobs + num_logprobs > MAX_LOGPROBS:
            raise QueueFullError(
                f"answers that may hold {logprobs} log probabilities are in the system, at most "
                f"{MAX_LOGPROBS} may be; try again later, or ask for shorter answers or fewer "
                "likeliest tokens"
            )

    def _take_rids(self, job: Job, specs: Sequence[Spec]) -> set[tuple[str, str]]:
        """Every rid stands for one request of its owner at a time. Raises InvalidRequestError."""
        given = Counter(spec.rid for spec in specs)
        rid, count = given.most_common(1)[0]
        if count > 1:
            raise InvalidRequestError(f"the batch has the rid {rid!r} twice", param="rid")
        taken = {(job.owner, rid) for rid in (job.rid, *given)}
        if not taken.isdisjoint(self._rids):
            _, rid = min(taken & self._rids)
            raise InvalidRequestError(
                f"the rid {rid!r} is in use by a request that has not ended", param="rid"
            )
        self._rids |= taken
        return taken
