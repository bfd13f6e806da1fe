"""One HTTP request while it is served: its generations, and what its response waits for."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from pd.core.errors import AbortedError, InvalidRequestError, PDError
from pd.proxy.generation import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.proxy.generation import Choice, Generation
    from pd.proxy.grammar_fields import GrammarFields

# What a client that does not read may leave lying here of each choice, and of all together, before
# it counts as gone.
MAX_UNREAD_TOKENS = 1024
MAX_UNREAD_BYTES = 1 << 20


class Job:
    """Collects news of all choices until the response takes them.

    Because news are merged per choice, a client slower than the model gets fewer, larger events.

    Attributes:
        rid: the request's name; the prompts of a batch have their own as well.
        owner: whose key it came with; only they may abort it by name.
        is_named: whether the client chose a name, of the request or of a prompt.
        num_prompts: generations that there will be.
        num_done: generations that have ended.
        timeout: seconds until the request is given up, from its start; None: never.
        ended_by: what ended all prompts, those too that no node has seen yet.
        error: what ended the request, if it failed.
        outcome: label of the metrics, once it is known.
        grammar_fields: the fields that a grammar of the proxy's own was made from.
        abort_is_result: an abort ends choices with what there was instead of failing the request.
        is_probe: it is no client's: the proxy asks whether a node works, and no other may answer.
        together: all prompts, of which each wants one token, go to the same node in one message,
            so that what they share is computed once and the rest in one batch.
        writing: the response waits for the client to read.
        on_overflow: called once when the client has left too much unread.
        write_news: writes the news to the client at once, if it can; returns whether it did.
    """

    __slots__ = (
        "__weakref__",
        "_changed",
        "_news",
        "_unread_bytes",
        "_unread_tokens",
        "abort_is_result",
        "ended_by",
        "endpoint",
        "error",
        "generations",
        "grammar_fields",
        "is_named",
        "is_probe",
        "num_done",
        "num_prompts",
        "on_overflow",
        "outcome",
        "owner",
        "rid",
        "started",
        "streaming",
        "timeout",
        "together",
        "write_news",
        "writing",
    )

    def __init__(
        self,
        rid: str,
        endpoint: str,
        *,
        owner: str = "",
        is_named: bool = False,
        streaming: bool = False,
        abort_is_result: bool = False,
        together: bool = False,
        is_probe: bool = False,
    ) -> None:
        self.num_done = 0
        self.rid = rid
        self.owner = owner
        self.is_named = is_named
        self.endpoint = endpoint
        self.streaming = streaming
        self.abort_is_result = abort_is_result
        self.together = together
        self.is_probe = is_probe
        self.generations: list[Generation] = []
        self.num_prompts = 0
        self.timeout: float | None = None
        self.started = time.monotonic()
        self.ended_by: PDError | None = None
        self.error: PDError | None = None
        self.outcome: str | None = None
        self.grammar_fields: GrammarFields | None = None
        self.writing = False
        self.on_overflow: Callable[[], None] | None = None
        self.write_news: Callable[[], bool] | None = None
        self._changed = asyncio.Event()
        self._news: dict[Choice, None] = {}
        self._unread_tokens = 0
        self._unread_bytes = 0

    @property
    def time_left(self) -> float | None:
        """Seconds until the request is given up, or None."""
        if self.timeout is None:
            return None
        return max(0.0, self.started + self.timeout - time.monotonic())

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        return self.num_done == self.num_prompts or self.error is not None

    @property
    def unread_bytes(self) -> int:
        """About how many bytes of JSON the news are."""
        return self._unread_bytes

    def ended_one(self) -> None:
        """A generation ended. What waits for news looks again, even without :meth:`deliver`."""
        self.num_done += 1
        self._changed.set()

    def notify(self, choice: Choice, new_tokens: int) -> None:
        """A choice gained tokens or ended. :meth:`deliver` follows."""
        if not choice.end_taken and choice not in self._news:
            if self.streaming and not choice.is_due:
                return
            self._news[choice] = None
            new_tokens = choice.untaken  # with those that were no news yet
        self._unread_tokens += new_tokens
        self._unread_bytes += new_tokens * choice.token_bytes
        if self.writing and self._overflows and self.on_overflow is not None:
            callback, self.on_overflow = self.on_overflow, None
            callback()

    @property
    def _overflows(self) -> bool:
        if self._unread_bytes > MAX_UNREAD_BYTES:
            return True
        if self._unread_tokens <= MAX_UNREAD_TOKENS:
            return False
        choices = self.num_prompts * self.generations[0].spec.params.n
        return self._unread_tokens > MAX_UNREAD_TOKENS * choices

    def deliver(self) -> None:
        """All that is new for now was notified: write it, or wake the task that waits for it."""
        if self.write_news is None or not self.write_news():
            self._changed.set()

    def fail(self, generation: Generation, error: PDError) -> None:
        """A generation ended without success; the first error is the request's."""
        if isinstance(error, AbortedError) and self.abort_is_result:
            for choice in generation.choices:
                if choice.finish is None:
                    choice.end(FinishReason("abort", message=error.message))
                    self.notify(choice, 0)
        elif self.error is None:
            grammar = generation.spec.params.grammar
            self.error = error  # first of all: nothing below may leave the client without one
            if self.grammar_fields and grammar and isinstance(error, InvalidRequestError):
                self.error = self.grammar_fields.renamed(error, grammar)
        self._changed.set()

    async def news(self) -> list[Choice]:
        """Wait for something new; the choices that changed (none if the request failed)."""
        while not (self._news or self.done):
            self._changed.clear()
            await self._changed.wait()
        return self.take_news()

    def take_news(self) -> list[Choice]:
        """The choices that have news since the last call; when the request failed, all that
        gained anything."""
        news, self._news = self._news, {}
        if self.error is not None:
            choices = [choice for generation in self.generations for choice in generation.choices]
            news |= dict.fromkeys(choice for choice in choices if choice.untaken)
        self._unread_tokens = self._unread_bytes = 0
        return list(news)

    async def finished(self) -> None:
        """Wait for the end. Raises the request's error."""
        while not self.done:
            self._changed.clear()
            await self._changed.wait()
        if self.error is not None:
            raise self.error
