"""The state of one prompt at the proxy, and the choices that come back."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from msgspec.structs import astuple

from pd.core.errors import NodeFailedError
from pd.core.messages import Stages
from pd.proxy.positions import TokenMerger, check_logprobs
from pd.proxy.reasoning_count import ReasoningCounter
from pd.proxy.stop_strings import StopMatcher, StopSearch
from pd.proxy.tokenizer import new_detokenizer

if TYPE_CHECKING:
    from asyncio import TimerHandle

    import numpy as np
    import numpy.typing as npt

    from pd.core.messages import Finish, Output, TokenLogprobs
    from pd.core.sampling_params import SamplingParams
    from pd.proxy.attempt import Attempt
    from pd.proxy.job import Job
    from pd.proxy.node_handle import NodeHandle
    from pd.proxy.positions import NewTokens
    from pd.proxy.reasoning_count import ReasoningStart
    from pd.proxy.tokenizer import TextModel

    IntArray = npt.NDArray[np.int32]

# About how many bytes of JSON a token is, and each log probability.
TOKEN_BYTES = 64
NO_STOPS = StopSearch(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The request for one prompt, after validation.

    Attributes:
        stop: stop strings; the nodes know nothing of them.
        skip_special_tokens: leave special tokens out of the text.
        stream_interval: tokens that an event of a stream has at least, but for the first and the
            last event.
        kept_special_tokens: special tokens that stay in the text all the same.
        discard_output: only the prompt's log probabilities are wanted; the one token that must be
            generated to get them is not shown.
        shows_stop: the stop string or token that ends an answer is a part of its text.
        reasoning: where the answers begin in the model's reasoning; None if no parser tells that
            from the rest.
    """

    rid: str
    model: str
    token_ids: IntArray
    params: SamplingParams
    text_model: TextModel | None
    stop: StopSearch = NO_STOPS
    namespace: str = ""
    priority: int = 0
    stream_interval: int = 1
    skip_special_tokens: bool = True
    kept_special_tokens: frozenset[str] = frozenset()
    discard_output: bool = False
    shows_stop: bool = False
    reasoning: ReasoningStart | None = None

    @property
    def num_prompt_logprobs(self) -> int:
        """Number of prompt tokens whose log probabilities were asked for."""
        start = self.params.prompt_logprobs_start
        return 0 if start is None else len(self.token_ids) - start

    @property
    def num_logprobs(self) -> int:
        """Number of log probabilities, those of the likeliest tokens included, that the answers
        hold if they become as long as they may. Each of the ``n`` answers has those of the
        prompt."""
        params = self.params
        tokens = self.num_prompt_logprobs + (params.max_tokens if params.logprobs else 0)
        return tokens * (1 + params.top_logprobs) * params.n


class FinishReason(NamedTuple):
    """Reason why a choice ended.

    Attributes:
        matched: the token id or the stop string.
        message: of what ended a choice before its own end (``abort``).
    """

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str | None = None

    def told(self, length: int) -> dict[str, Any]:
        """The reason as ``/generate`` tells it; ``length``: tokens of the choice."""
        if self.type == "length":
            return {"type": "length", "length": length}
        if self.type == "abort":
            return {"type": "abort", "message": self.message}
        return {"type": "stop"} | ({} if self.matched is None else {"matched": self.matched})


class Delta(NamedTuple):
    """Tokens and text of a choice that are new since the last delta.

    Attributes:
        first: whether this is the choice's first delta.
        total: tokens of the choice so far, with those of this delta.
        pieces: pieces of text of the choice so far, with those of this delta.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish: FinishReason | None
    first: bool
    total: int
    pieces: int


class Choice:
    """One of the ``n`` answers to a prompt.

    Attributes:
        end_taken: whether a delta with the choice's end was taken, so that no other will come.
        token_bytes: about how many bytes of JSON a token is.
        text_ends: length of the text after each token (for ``text_offset``), if log probabilities
            were asked for.
    """

    # What every token touches lies together: between two steps all of it leaves the caches.
    __slots__ = (
        "_detokenizer",
        "_interval",
        "_merger",
        "_min_tokens",
        "_pieces",
        "_reasoning",
        "_shows_stop",
        "_stops",
        "_taken",
        "_taken_pieces",
        "_taken_tokens",
        "_text_length",
        "_with_logprobs",
        "end_taken",
        "finish",
        "generation",
        "index",
        "last_token_at",
        "logprobs",
        "output_ids",
        "text_ends",
        "token_bytes",
    )

    def __init__(self, generation: Generation, index: int) -> None:
        spec = generation.spec
        self.generation = generation
        self.index = index
        self.finish: FinishReason | None = None
        self.end_taken = False
        self.logprobs: list[TokenLogprobs] = []
        self.text_ends: list[int] = []
        self.token_bytes = TOKEN_BYTES * (1 + spec.params.top_logprobs)
        self.last_token_at: float | None = None
        self._pieces: list[str] = []
        self._text_length = 0
        self._taken = False
        self._taken_tokens = 0
        self._taken_pieces = 0
        self._merger = TokenMerger(
            spec.params.max_tokens, generation.vocab_size, spec.params.logprobs
        )
        # The merger's, which appends; tokens behind a stop string are taken out again.
        self.output_ids = self._merger.token_ids
        self._interval = spec.stream_interval
        self._min_tokens = spec.params.min_tokens
        self._with_logprobs = spec.params.logprobs
        # A grammar is about the whole text, so a special token that it allowed is a part of it.
        skips = spec.skip_special_tokens and spec.params.grammar is None
        self._detokenizer = new_detokenizer(spec.text_model, skips, spec.kept_special_tokens)
        self._reasoning: ReasoningCounter | None = None
        if spec.reasoning is not None and spec.reasoning.stage != "behind":
            self._reasoning = ReasoningCounter(self._detokenizer, spec.reasoning)
            self._detokenizer = self._reasoning
        self._stops = StopMatcher(spec.stop, keeps=spec.shows_stop)
        self._shows_stop = spec.shows_stop

    @property
    def text_length(self) -> int:
        """Characters of the text so far."""
        return self._text_length

    @property
    def untaken(self) -> int:
        """Tokens that are new since the last delta."""
        return len(self.output_ids) - self._taken_tokens

    @property
    def is_due(self) -> bool:
        """Whether what is new makes an event of a stream: the first token, the end, or as many
        tokens as the request wants in one."""
        if self.untaken >= self._interval:
            return True
        return self.finish is not None or not self._taken

    def reasoning_tokens(self, total: int) -> int:
        """Tokens of reasoning among the choice's first ``total`` ones. From any thread."""
        return 0 if self._reasoning is None else self._reasoning.count(total)

    @property
    def started(self) -> bool:
        """Whether the first token is known."""
        return bool(self.output_ids)

    def accept(self, output: Output, *, first_may_come: bool) -> int:
        """Take a node's message; returns the number of new tokens.

        Raises NodeFailedError if it does not fit what is known.
        """
        added = 0
        for new in self._merger.accept(output, first_may_come=first_may_come):
            added += self._append(new)
            if self.finish is not None:
                break
        return added

    def go_on_elsewhere(self) -> None:
        """Other nodes go on behind the tokens that are there."""
        self._merger.forget_early()

    def take(self) -> Delta:
        """Take the part of the choice that is new since the last call."""
        delta = Delta(
            "".join(self._pieces[self._taken_pieces :]),
            self.output_ids[self._taken_tokens :],
            self.logprobs[self._taken_tokens :],
            self.finish,
            not self._taken,
            len(self.output_ids),
            len(self._pieces),
        )
        self._taken = True
        self._taken_pieces = len(self._pieces)
        self._taken_tokens = len(self.output_ids)
        self.end_taken = self.finish is not None
        return delta

    def text_until(self, delta: Delta) -> str:
        """Everything that may be shown, up to what ``delta`` holds. From any thread."""
        return "".join(self._pieces[: delta.pieces])

    def text_begins(self, start: int, count: int) -> list[int]:
        """Offsets in the text at which ``count`` tokens begin, from token ``start`` on."""
        if count == 0:
            return []
        if start == 0:
            return [0, *self.text_ends[: count - 1]]
        return self.text_ends[start - 1 : start + count - 1]

    def end(self, reason: FinishReason) -> None:
        """End the choice; text that was held back for a stop string is shown."""
        self._show(self._stops.push(self._detokenizer.flush()))
        if self._stops.matched is not None:
            reason = FinishReason("stop", self._stops.matched)
        self._show(self._stops.flush())
        self.finish = reason

    def _append(self, new: NewTokens) -> int:
        count, stops = len(new.token_ids), self._stops
        hides = not self._shows_stop and _ends_with_token(new.finish)
        hidden = count - 1 if hides else count
        for i, token in enumerate(new.token_ids):
            if i != hidden:
                text = self._detokenizer.push(token)
                self._text_length += len(text)
                shown = stops.push(text, may_match=new.position + i >= self._min_tokens)
                if shown:
                    self._pieces.append(shown)
            if self._with_logprobs:
                self.logprobs.append(new.logprobs[i])
                self.text_ends.append(self._text_length)
            if stops.matched is not None:
                self.finish = FinishReason("stop", stops.matched)
                del self.output_ids[new.position + i + 1 :]
                return i + 1
        if new.finish is not None:
            self.end(FinishReason(new.finish.type, new.finish.matched))
        return count

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(text)


def _ends_with_token(finish: Finish | None) -> bool:
    """Whether the last token ended the answer and so is no part of the text."""
    return finish is not None and finish.type == "stop" and finish.matched is not None


class Failover(NamedTuple):
    """A choice, or several, went on elsewhere.

    Attributes:
        position: tokens that the choice had.
        choice: its number; None for all, of which nothing had been delivered.
        reason: why it could not go on where it was.
        pause: seconds between its tokens before and after, or since the request came.
    """

    position: int
    choice: int | None
    reason: str
    pause: float


class Generation:
    """One prompt under way: its choices, and the attempts of nodes to compute them.

    Attributes:
        number: which prompt of its job this is.
        attempts: those that are not over.
        holder: the node with the most KV of it, as far as is known.
        failovers: times that choices went on elsewhere, once they did.
        first_token_at: when the first token of any choice came, on the monotonic clock.
        held: new tokens that the job does not know of yet, since log probabilities of the prompt
            go before them.
        unannounced: choices whose end the job does not know yet.
        linger: ends the wait of a finished answer for what only the first node knows.
        lacks_prompt_logprobs: whether log probabilities of the prompt were asked for and are not
            complete.
        cached_tokens: as the first attempt that said so.
        predicted_cached: leading tokens that the first node was expected to have cached, or None.
        predicted_ttft: seconds until the first token by which the nodes were chosen, or None.
    """

    __slots__ = (
        "_reporting",
        "_stages",
        "attempts",
        "cached_tokens",
        "choices",
        "created",
        "done",
        "failovers",
        "finished_at",
        "first_token_at",
        "held",
        "holder",
        "job",
        "lacks_prompt_logprobs",
        "linger",
        "number",
        "predicted_cached",
        "predicted_ttft",
        "prompt_logprobs",
        "spec",
        "unannounced",
        "vocab_size",
    )

    def __init__(self, spec: Spec, job: Job, vocab_size: int | None) -> None:
        self.spec = spec
        self.job = job
        self.vocab_size = vocab_size
        self.number = len(job.generations)
        self.attempts: list[Attempt] = []
        self.holder: NodeHandle | None = None
        self.failovers: list[Failover] = []
        self.done = False
        self.created = time.monotonic()
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.cached_tokens = 0
        self.choices = [Choice(self, index) for index in range(spec.params.n)]
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.predicted_ttft: float | None = None
        self.predicted_cached: int | None = None
        self.unannounced: list[Choice] = []
        self.held: dict[Choice, int] = {}
        self.linger: TimerHandle | None = None
        self.lacks_prompt_logprobs = self.spec.num_prompt_logprobs > 0
        self._reporting: Attempt | None = None
        self._stages: dict[str, Stages] = {}

    @property
    def has_output(self) -> bool:
        """Whether the client may know of any token."""
        started = any(choice.output_ids for choice in self.choices)
        return started and not self.lacks_prompt_logprobs

    @property
    def awaits_first(self) -> bool:
        """Whether the node that computes the prompt has still to say what only it knows."""
        return any(attempt.is_whole and not attempt.prompt_computed for attempt in self.attempts)

    @property
    def finished(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.finish is not None for choice in self.choices)

    @property
    def missing_prompt_logprobs(self) -> str | None:
        """The error of the prompt's log probabilities; None if they are complete or were not asked
        for."""
        if not self.lacks_prompt_logprobs:
            return None
        wanted, have = self.spec.num_prompt_logprobs, len(self.prompt_logprobs)
        return f"the prefill node sent log probabilities of {have} prompt tokens, not {wanted}"

    @property
    def completion_tokens(self) -> int:
        return 0 if self.spec.discard_output else sum(len(c.output_ids) for c in self.choices)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning in all choices."""
        return sum(c.reasoning_tokens(len(c.output_ids)) for c in self.choices)

    def told_failovers(self) -> list[dict[str, object]]:
        """The failovers as clients are told of them."""
        return [failover._asdict() for failover in self.failovers]

    def begin_again(self) -> None:
        """Forget what came, of which the client knows nothing."""
        self.stop_lingering()
        self.choices = [Choice(self, index) for index in range(self.spec.params.n)]
        self.prompt_logprobs.clear()
        self.lacks_prompt_logprobs = self.spec.num_prompt_logprobs > 0
        self.unannounced.clear()
        self.held.clear()

    def stop_lingering(self) -> None:
        """The answer has not ended, or waits no longer."""
        if self.linger is not None:
            self.linger.cancel()
            self.linger = None

    def note_facts(self, attempt: Attempt, output: Output, *, from_first: bool) -> None:
        """Keep what the first attempt that has output says beside tokens. Raises NodeFailedError if
        that cannot be."""
        most = len(self.spec.token_ids) + self.spec.params.max_tokens
        if output.cached_tokens is not None and not 0 <= output.cached_tokens <= most:
            raise NodeFailedError(f"the node says that {output.cached_tokens} tokens were cached")
        if output.stages is not None and not _make_sense(output.stages):
            raise NodeFailedError(f"the node's times are impossible: {output.stages}")
        if self._reporting is None:
            self._reporting = attempt
        if attempt is not self._reporting:
            return
        if from_first and output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        if output.stages is not None:
            node = "first" if from_first else "decode"
            self._stages[node] = _merged(self._stages.get(node, Stages()), output.stages)

    def add_prompt_logprobs(self, more: list[TokenLogprobs]) -> None:
        """Add log probabilities of the prompt's next tokens. Raises NodeFailedError for too many,
        and for some that make no sense."""
        check_logprobs(more, self.vocab_size)
        self.prompt_logprobs += more
        self.lacks_prompt_logprobs = len(self.prompt_logprobs) != self.spec.num_prompt_logprobs
        if len(self.prompt_logprobs) > len(self.spec.token_ids):
            raise NodeFailedError("the prefill node sent log probabilities of too many tokens")

    def stages(self) -> dict[str, float]:
        """Seconds per stage. Each stage is reported by the node on which it happened."""
        first = self._stages.get("first", Stages())
        decode = self._stages.get("decode", first)
        measured = 0.0
        if self.first_token_at is not None:
            measured = (self.finished_at or time.monotonic()) - self.first_token_at
        sources: dict[str, tuple[Any, Any]] = {
            "queue": (first.queue, decode.queue),
            "bootstrap": (first.bootstrap, decode.bootstrap),
            "prefill": (first.prefill, decode.prefill),
            "transfer": (decode.transfer, first.transfer),
            "decode": (decode.decode, measured),
        }
        return {
            name: next((value for value in values if value is not None), 0.0)
            for name, values in sources.items()
        }


def _make_sense(stages: Stages) -> bool:
    return all(seconds is None or 0.0 <= seconds < math.inf for seconds in astuple(stages))


def _merged(known: Stages, news: Stages) -> Stages:
    """A node reports a stage when it is over, so in several messages."""
    fields = (
        news_value if news_value is not None else known_value
        for known_value, news_value in zip(astuple(known), astuple(news), strict=True)
    )
    return Stages(*fields)
