"""One HTTP request: its generations, and news not yet sent by its response."""

from __future__ import annotations

import asyncio
import time
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from pd.core.errors import AbortedError, InvalidRequestError, PDError
from pd.proxy.dispatch.generation import FinishReason

if TYPE_CHECKING:
    from pd.proxy.dispatch.generation import Choice, Generation
    from pd.proxy.requests.grammar_fields import GrammarFields

# A client with more than this unread counts as gone: tokens per choice, and bytes of all choices
# together.
MAX_UNREAD_TOKENS = 1024
MAX_UNREAD_BYTES = 1 << 20


class ClientState(Enum):
    """The state of a job's response. The values of the last two are labels of metrics."""

    # The response has not begun.
    WAITING = "waiting"
    # The response is encoding news, so we must not overtake it.
    ENCODING = "encoding"
    # All news taken by the response are written. We may write news ourselves.
    IDLE = "idle"
    # The response waits until the client has read.
    SENDING = "sending"
    DISCONNECTED = "disconnect"
    # The client left too much unread, so we ended the job.
    UNREAD = "slow_reader"


_GONE = (ClientState.DISCONNECTED, ClientState.UNREAD)


class EventSink(Protocol):
    """The client's end of a streamed job."""

    def write_news(self) -> bool:
        """Write the job's news at once and return True, or leave them to the response's task."""

    def close_client(self) -> None:
        """Close the client's connection. Whatever it has not read is lost."""


class Job:
    """Collects the news of all choices until they are sent.

    We merge news per choice, so a client slower than the model gets fewer, larger events.

    Attributes:
        rid: name of the request. The prompts of a batch have names of their own.
        shown: name of the request in the response.
        owner: hash of the client's key. Only the owner may abort the request by name.
        is_named: the client chose the name of the request or of a prompt.
        num_prompts: final number of generations of the job.
        num_done: number of finished generations.
        timeout: seconds from ``started`` after which we give up; None never.
        ended_by: error that ended all prompts, including prompts no node has seen yet.
        error: error that failed the request.
        client: state of the response.
        grammar_fields: request fields from which the proxy made a grammar.
        abort_is_result: an abort ends the choices with the output so far instead of failing.
        is_probe: the proxy sent the request to check a node, so no other node may answer.
        is_batch: all prompts want one token each and go to one node in one message. The node then
            computes a common prefix once and the rest together.
        keeps_logprobs: keep log probabilities after they were taken, until the job ends.
        sink: writes the news of a streamed job.
    """

    __slots__ = (
        "__weakref__",
        "_changed",
        "_news",
        "_unread_bytes",
        "_unread_tokens",
        "abort_is_result",
        "client",
        "ended_by",
        "endpoint",
        "error",
        "generations",
        "grammar_fields",
        "is_batch",
        "is_named",
        "is_probe",
        "is_streamed",
        "keeps_logprobs",
        "num_done",
        "num_prompts",
        "owner",
        "rid",
        "shown",
        "sink",
        "started",
        "timeout",
    )

    def __init__(
        self,
        rid: str,
        endpoint: str,
        *,
        shown: str = "",
        owner: str = "",
        is_named: bool = False,
        is_streamed: bool = False,
        abort_is_result: bool = False,
        is_batch: bool = False,
        is_probe: bool = False,
    ) -> None:
        self.num_done = 0
        self.rid = rid
        self.shown = shown
        self.owner = owner
        self.is_named = is_named
        self.endpoint = endpoint
        self.is_streamed = is_streamed
        self.abort_is_result = abort_is_result
        self.is_batch = is_batch
        self.is_probe = is_probe
        self.generations: list[Generation] = []
        self.num_prompts = 0
        self.timeout: float | None = None
        self.started = time.monotonic()
        self.ended_by: PDError | None = None
        self.error: PDError | None = None
        self.client = ClientState.WAITING
        self.sink: EventSink | None = None
        self.grammar_fields: GrammarFields | None = None
        self.keeps_logprobs = True
        self._changed = asyncio.Event()
        self._news: dict[Choice, None] = {}
        self._unread_tokens = 0
        self._unread_bytes = 0

    @property
    def time_left(self) -> float | None:
        """Seconds until we give up, or None."""
        if self.timeout is None:
            return None
        return max(0.0, self.started + self.timeout - time.monotonic())

    @property
    def is_done(self) -> bool:
        """Whether no more news will come."""
        return self.num_done == self.num_prompts or self.error is not None

    @property
    def is_abandoned(self) -> bool:
        """Whether the client is gone."""
        return self.client in _GONE

    @property
    def outcome(self) -> str:
        """The outcome of the request as a label of metrics."""
        if self.is_abandoned:
            return self.client.value
        return self.error.kind if self.error else "ok"

    @property
    def unread_bytes(self) -> int:
        """Estimate how many bytes of JSON the news take."""
        return self._unread_bytes

    def set_client(self, state: ClientState) -> None:
        """Note a new state of the response. A client stays gone."""
        if not self.is_abandoned:
            self.client = state

    def count_ended(self) -> None:
        """Count a finished generation, and wake the response even if no news follow."""
        self.num_done += 1
        self._changed.set()

    def add_news(self, choice: Choice, new_tokens: int) -> bool:
        """Note new tokens or the end of a choice. The caller flushes later.

        Returns:
            Whether the client has left too much unread, so we should end the job.
        """
        if not choice.has_given_end and choice not in self._news:
            if self.is_streamed and not choice.is_due:
                return False
            self._news[choice] = None
            new_tokens = choice.num_untaken  # includes tokens too few for an event before
        self._unread_tokens += new_tokens
        self._unread_bytes += new_tokens * choice.token_bytes
        return self.client is ClientState.SENDING and self._has_too_much_unread()

    def _has_too_much_unread(self) -> bool:
        if self._unread_bytes > MAX_UNREAD_BYTES:
            return True
        if self._unread_tokens <= MAX_UNREAD_TOKENS:
            return False
        choices = self.num_prompts * self.generations[0].spec.params.n
        return self._unread_tokens > MAX_UNREAD_TOKENS * choices

    def flush_news(self) -> None:
        """Write the news if the response is idle, or wake its task."""
        if self.client is not ClientState.IDLE or self.sink is None or not self.sink.write_news():
            self._changed.set()

    def fail_generation(self, generation: Generation, error: PDError) -> None:
        """Note that a generation failed. The first error becomes the error of the request."""
        is_result = self.abort_is_result and not self.is_abandoned
        if isinstance(error, AbortedError) and is_result:
            for choice in generation.choices:
                if choice.finish is None:
                    choice.end_choice(FinishReason("abort", message=error.message))
                    self.add_news(choice, 0)
        elif self.error is None:
            grammar = generation.spec.params.grammar
            self.error = error  # before anything may fail, because the client needs an error
            if self.grammar_fields and grammar and isinstance(error, InvalidRequestError):
                self.error = self.grammar_fields.rename_error(error, grammar)
        self._changed.set()

    async def wait_for_news(self) -> list[Choice]:
        """Wait until choices changed, and take them. The list is empty if the request failed."""
        while not (self._news or self.is_done):
            self._changed.clear()
            await self._changed.wait()
        return self.take_news()

    def take_news(self) -> list[Choice]:
        """Take the choices changed since the last call.

        If the request failed, include every choice with unsent tokens.
        """
        news, self._news = self._news, {}
        if self.error is not None:
            choices = [choice for generation in self.generations for choice in generation.choices]
            news |= dict.fromkeys(choice for choice in choices if choice.num_untaken)
        self._unread_tokens = self._unread_bytes = 0
        return list(news)

    async def wait_done(self) -> None:
        """Wait for the end. Raises the error of the request."""
        while not self.is_done:
            self._changed.clear()
            await self._changed.wait()
        if self.error is not None:
            raise self.error
