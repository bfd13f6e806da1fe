"""Admits requests to the proxy, and keeps their names unique."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pd.core.errors import InvalidRequestError, QueueFullError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.proxy.dispatch.generation import PromptSpec
    from pd.proxy.dispatch.job import Job
    from pd.proxy.workers.ledger import Ledger

# Limit of prompt tokens in the system: 512 MiB here, and as much in messages.
MAX_TOKENS = 1 << 27
# Limit of log probabilities in the answers of admitted requests at their maximum length, over all
# processes. LogprobMemory bounds the log probabilities that have arrived.
MAX_LOGPROBS = 1 << 26


class Admission:
    """Counts admitted prompts, whether nodes have them or not, and keeps the rids of requests.

    Runs on the event loop.

    Args:
        max_queue: limit of prompts times their ``n``.
        ledger: counts of all processes of the proxy.

    Attributes:
        is_closed: we admit nothing any more.
    """

    def __init__(self, max_queue: int, ledger: Ledger) -> None:
        self.is_closed = False
        self._max_queue = max_queue
        self._ledger = ledger
        # Rids of requests under way, each with its owner.
        self._rids: set[tuple[str, str]] = set()

    @property
    def is_half_full(self) -> bool:
        """Whether half of the queue is taken, in all processes of the proxy together."""
        return self._ledger.prompts >= max(1, self._max_queue // 2)

    def check_limits(self, num_choices: int, num_tokens: int = 0, num_logprobs: int = 0) -> None:
        """Reject a request before any work is done.

        Args:
            num_choices: prompts, times the answers to each as far as we know.
            num_tokens: tokens of the prompts as far as we know.
            num_logprobs: log probabilities of the answers at most, as far as we know.

        Raises:
            UnavailableError: the proxy is shutting down.
            QueueFullError: the client may try again later.
            InvalidRequestError: the request could never be admitted.
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

    def admit_job(self, job: Job, specs: Sequence[PromptSpec]) -> set[tuple[str, str]]:
        """Count the prompts and log probabilities of a job, and take its rids.

        We admit a probe even to a full queue, because it may add a node and so shorten the queue.

        Returns:
            The rids, for :meth:`release_job`.

        Raises:
            UnavailableError, QueueFullError: see :meth:`check_limits`.
            InvalidRequestError: a rid is in use.
        """
        num_choices = sum(spec.params.n for spec in specs)
        num_tokens = sum(len(spec.token_ids) for spec in specs)
        num_logprobs = sum(spec.num_logprobs for spec in specs)
        if not job.is_probe:
            self.check_limits(num_choices, num_tokens, num_logprobs)
        rids = self._take_rids(job, specs)
        self._ledger.add_counts(num_choices, num_tokens, num_logprobs)
        if self._ledger.is_shared and not job.is_probe:
            try:
                # Another process may have admitted requests at the same moment.
                self._check_room(0, 0, 0)
            except QueueFullError:
                self._ledger.add_counts(-num_choices, -num_tokens, 0)
                self.release_job(rids, specs)
                raise
        return rids

    def count_ended(self, spec: PromptSpec) -> None:
        """Count a finished prompt. We keep its answers until the job ends."""
        self._ledger.add_counts(-spec.params.n, -len(spec.token_ids), 0)

    def release_job(self, rids: set[tuple[str, str]], specs: Sequence[PromptSpec]) -> None:
        """Free the rids and the log probabilities of a finished job."""
        self._rids -= rids
        self._ledger.add_counts(0, 0, -sum(spec.num_logprobs for spec in specs))

    def _check_room(self, num_choices: int, num_tokens: int, num_logprobs: int) -> None:
        """Raise QueueFullError if this much more would exceed a limit."""
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

    def _take_rids(self, job: Job, specs: Sequence[PromptSpec]) -> set[tuple[str, str]]:
        """Take the rids of a job. Raises InvalidRequestError if the owner already uses one of
        them."""
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
