"""The state of one prompt at the proxy, and its choices."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from msgspec.structs import astuple

from pd.core.errors import NodeFailedError
from pd.core.messages import Stages, TokenLogprobs
from pd.proxy.dispatch.positions import TokenMerger, check_logprobs
from pd.proxy.text.reasoning_count import ReasoningCounter
from pd.proxy.text.stop_strings import StopMatcher, StopSearch
from pd.proxy.text.tokenizer import make_detokenizer

if TYPE_CHECKING:
    from asyncio import TimerHandle

    import numpy as np
    import numpy.typing as npt

    from pd.core.messages import Finish, Output
    from pd.core.sampling_params import SamplingParams
    from pd.proxy.dispatch.attempt import Attempt
    from pd.proxy.dispatch.job import Job
    from pd.proxy.dispatch.positions import NewTokens
    from pd.proxy.nodes.node_handle import NodeHandle, ServerInfo
    from pd.proxy.text.reasoning_count import ReasoningStart
    from pd.proxy.text.stop_patterns import StopPatternSearch
    from pd.proxy.text.tokenizer import TextModel

    IntArray = npt.NDArray[np.int32]

# Estimated bytes of JSON per token, and per log probability.
TOKEN_BYTES = 64
NO_STOPS = StopSearch(())
# Replaces log probabilities already sent by a stream, because we need not keep them.
_GIVEN = TokenLogprobs(0, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpec:
    """The request for one prompt, after validation.

    Attributes:
        stop: stop strings and patterns, unknown to nodes.
        skip_special_tokens: leave special tokens out of the text.
        stream_interval: minimum number of tokens in an event of a stream, except the first and the
            last.
        kept_special_tokens: special tokens kept in the text anyway.
        discard_output: the client wants only log probabilities of the prompt. We generate one token
            to get them, and do not show it.
        shows_stop: the text includes the stop string or token that ended it.
        reasoning: where in the model's reasoning answers begin; None without a reasoning parser.
    """

    rid: str
    model: str
    token_ids: IntArray
    params: SamplingParams
    text_model: TextModel | None
    stop: StopSearch | StopPatternSearch = NO_STOPS
    namespace: str = ""
    priority: int = 0
    prefix_lease: float = 0.0
    stream_interval: int = 1
    skip_special_tokens: bool = True
    kept_special_tokens: frozenset[str] = frozenset()
    discard_output: bool = False
    shows_stop: bool = False
    reasoning: ReasoningStart | None = None

    @property
    def num_prompt_logprobs(self) -> int:
        """Number of prompt tokens for which the client wants log probabilities."""
        start = self.params.prompt_logprobs_start
        return 0 if start is None else len(self.token_ids) - start

    @property
    def num_logprobs(self) -> int:
        """Number of log probabilities in answers of maximum length, including the likeliest tokens.

        Each of the ``n`` answers repeats those of the prompt.
        """
        params = self.params
        tokens = self.num_prompt_logprobs + (params.max_tokens if params.logprobs else 0)
        return tokens * (1 + params.other_logprobs) * params.n


class FinishReason(NamedTuple):
    """Why a choice ended.

    Attributes:
        matched: the token id or the stop string.
        message: for ``abort``: the reason.
    """

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str | None = None

    def to_json(self, length: int) -> dict[str, Any]:
        """Return the reason in the form of ``/generate``. ``length``: tokens of the choice."""
        if self.type == "length":
            return {"type": "length", "length": length}
        if self.type == "abort":
            return {"type": "abort", "message": self.message}
        return {"type": "stop"} | ({} if self.matched is None else {"matched": self.matched})


class Delta(NamedTuple):
    """Tokens and text of a choice since the last delta.

    Attributes:
        is_first: this is the first delta of the choice.
        total: tokens of the choice so far, including this delta.
        pieces: pieces of text of the choice so far, including this delta.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish: FinishReason | None
    is_first: bool
    total: int
    pieces: int


class Choice:
    """One of the ``n`` answers to a prompt.

    Attributes:
        has_given_end: a delta with the end was taken, so there will be no other.
        token_bytes: estimated bytes of JSON per token.
        text_ends: length of the text after each token (for ``text_offset``), if the client wants
            log probabilities.
    """

    # We group the fields used for every token, because all of them leave the CPU's caches between
    # two steps.
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
        "finish",
        "generation",
        "has_given_end",
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
        self.has_given_end = False
        self.logprobs: list[TokenLogprobs] = []
        self.text_ends: list[int] = []
        self.token_bytes = TOKEN_BYTES * (1 + spec.params.other_logprobs)
        self.last_token_at: float | None = None
        self._pieces: list[str] = []
        self._text_length = 0
        self._taken = False
        self._taken_tokens = 0
        self._taken_pieces = 0
        self._merger = TokenMerger(
            spec.params.max_tokens, generation.vocab_size, spec.params.logprobs
        )
        # The merger appends to this list. We remove tokens after a stop string from it.
        self.output_ids = self._merger.token_ids
        self._interval = spec.stream_interval
        self._min_tokens = spec.params.min_tokens
        self._with_logprobs = spec.params.logprobs
        # A grammar covers the whole text, so the text includes special tokens allowed by the
        # grammar.
        skips = spec.skip_special_tokens and spec.params.grammar is None
        self._detokenizer = make_detokenizer(spec.text_model, skips, spec.kept_special_tokens)
        self._reasoning: ReasoningCounter | None = None
        if spec.reasoning is not None and spec.reasoning.stage != "after":
            self._reasoning = ReasoningCounter(self._detokenizer, spec.reasoning)
            self._detokenizer = self._reasoning
        self._stops = StopMatcher(spec.stop, keeps=spec.shows_stop)
        self._shows_stop = spec.shows_stop

    @property
    def text_length(self) -> int:
        """Characters of the text so far."""
        return self._text_length

    @property
    def num_untaken(self) -> int:
        """Tokens since the last delta."""
        return len(self.output_ids) - self._taken_tokens

    @property
    def is_due(self) -> bool:
        """Whether the news are enough for an event of a stream.

        An event needs the first token, the end, or as many tokens as the request wants in one
        event.
        """
        if self.num_untaken >= self._interval:
            return True
        return self.finish is not None or not self._taken

    def count_reasoning_tokens(self, total: int) -> int:
        """Count tokens of reasoning among the first ``total`` tokens. Any thread may call this."""
        return 0 if self._reasoning is None else self._reasoning.count_tokens(total)

    @property
    def has_started(self) -> bool:
        """Whether the first token is known."""
        return bool(self.output_ids)

    def accept_output(self, output: Output, *, first_may_come: bool) -> int:
        """Merge a node's output. Return the number of new tokens.

        Raises NodeFailedError if the output contradicts the known tokens.
        """
        added = 0
        for new in self._merger.merge_output(output, first_may_come=first_may_come):
            added += self._append_tokens(new)
            if self.finish is not None:
                break
        return added

    def prepare_failover(self) -> None:
        """Prepare for other nodes to continue after the known tokens."""
        self._merger.forget_early()

    def take_delta(self) -> Delta:
        """Take the news since the last call."""
        delta = Delta(
            "".join(self._pieces[self._taken_pieces :]),
            self.output_ids[self._taken_tokens :],
            self.logprobs[self._taken_tokens :],
            self.finish,
            not self._taken,
            len(self.output_ids),
            len(self._pieces),
        )
        if delta.logprobs and not self.generation.job.keeps_logprobs:
            self.logprobs[self._taken_tokens :] = [_GIVEN] * len(delta.logprobs)
        self._taken = True
        self._taken_pieces = len(self._pieces)
        self._taken_tokens = len(self.output_ids)
        self.has_given_end = self.finish is not None
        return delta

    def get_text_until(self, delta: Delta) -> str:
        """Return the text up to the end of ``delta``. Any thread may call this."""
        return "".join(self._pieces[: delta.pieces])

    def get_text_offsets(self, start: int, count: int) -> list[int]:
        """Return the offsets in the text of ``count`` tokens, from token ``start`` on."""
        if count == 0:
            return []
        if start == 0:
            return [0, *self.text_ends[: count - 1]]
        return self.text_ends[start - 1 : start + count - 1]

    def end_choice(self, reason: FinishReason) -> None:
        """End the choice, and show text held back because of a stop string."""
        self._add_piece(self._stops.add_text(self._detokenizer.flush()))
        if self._stops.matched is not None:
            reason = FinishReason("stop", self._stops.matched)
        self._add_piece(self._stops.flush())
        self.finish = reason

    def _append_tokens(self, new: NewTokens) -> int:
        count, stops = len(new.token_ids), self._stops
        hides = not self._shows_stop and _ends_with_token(new.finish)
        hidden = count - 1 if hides else count
        for i, token in enumerate(new.token_ids):
            if i != hidden:
                text = self._detokenizer.add_token(token)
                self._text_length += len(text)
                shown = stops.add_text(text, may_match=new.position + i >= self._min_tokens)
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
            self.end_choice(FinishReason(new.finish.type, new.finish.matched))
        return count

    def _add_piece(self, text: str) -> None:
        if text:
            self._pieces.append(text)


def _ends_with_token(finish: Finish | None) -> bool:
    """Whether the last token ended the answer, so that it is not part of the text."""
    return finish is not None and finish.type == "stop" and finish.matched is not None


class Failover(NamedTuple):
    """A failover of one choice or of all.

    Attributes:
        position: number of tokens of the choice before.
        choice: its number; None for all choices, if the client had received nothing.
        reason: why the attempt before was lost.
        pause: seconds between the tokens before and after, or since the request arrived.
    """

    position: int
    choice: int | None
    reason: str
    pause: float


class Generation:
    """One prompt being served: its choices, and the attempts to compute them.

    Attributes:
        number: number of the prompt in its job.
        attempts: unfinished attempts.
        holder: the node with most of the KV, as far as we know.
        begun_on: the node of the first attempt as it was then; None before.
        failovers: failovers followed by tokens.
        first_token_at: when the first token of any choice arrived, on the monotonic clock.
        held: new tokens held back, because log probabilities of the prompt must be sent first.
        unannounced: finished choices without news of the end to the job.
        linger: timer limiting how long a finished answer waits for the first node's report.
        lacks_prompt_logprobs: the client wants log probabilities of the prompt, and some are
            missing.
        cached_tokens: number reported by the first attempt.
        predicted_cached: leading tokens expected in the first node's cache, or None.
        predicted_ttft: predicted seconds until the first token, or None.
    """

    __slots__ = (
        "_reporting",
        "_stages",
        "attempts",
        "begun_on",
        "cached_tokens",
        "choices",
        "created",
        "failovers",
        "finished_at",
        "first_token_at",
        "held",
        "holder",
        "is_done",
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

    def __init__(self, spec: PromptSpec, job: Job, vocab_size: int | None) -> None:
        self.spec = spec
        self.job = job
        self.vocab_size = vocab_size
        self.number = len(job.generations)
        self.attempts: list[Attempt] = []
        self.holder: NodeHandle | None = None
        self.begun_on: ServerInfo | None = None
        self.failovers: list[Failover] = []
        self.is_done = False
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
        """Whether the client may have received a token."""
        started = any(choice.output_ids for choice in self.choices)
        return started and not self.lacks_prompt_logprobs

    @property
    def awaits_first_node(self) -> bool:
        """Whether the prefilling node still has to report facts known only to it."""
        return any(
            attempt.is_whole and not attempt.has_computed_prompt for attempt in self.attempts
        )

    @property
    def is_finished(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.finish is not None for choice in self.choices)

    @property
    def missing_prompt_logprobs(self) -> str | None:
        """An error message if log probabilities of the prompt are missing, or None."""
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
        return sum(c.count_reasoning_tokens(len(c.output_ids)) for c in self.choices)

    def failovers_to_json(self) -> list[dict[str, object]]:
        """Return the failovers in the form for clients."""
        return [failover._asdict() for failover in self.failovers]

    def forget_output(self) -> None:
        """Forget all output. The client has received none of it."""
        self.stop_lingering()
        self.choices = [Choice(self, index) for index in range(self.spec.params.n)]
        self.prompt_logprobs.clear()
        self.lacks_prompt_logprobs = self.spec.num_prompt_logprobs > 0
        self.unannounced.clear()
        self.held.clear()

    def stop_lingering(self) -> None:
        """Cancel the wait for the first node, because the answer continues or has ended."""
        if self.linger is not None:
            self.linger.cancel()
            self.linger = None

    def note_facts(self, attempt: Attempt, output: Output, *, from_first: bool) -> None:
        """Keep additional facts reported by the first attempt with output.

        Raises NodeFailedError for impossible values.
        """
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
            # A node reports each stage at its end, so in several messages.
            known, news = astuple(self._stages.get(node, Stages())), astuple(output.stages)
            pairs = zip(known, news, strict=True)
            self._stages[node] = Stages(*(old if new is None else new for old, new in pairs))

    def add_prompt_logprobs(self, more: list[TokenLogprobs]) -> None:
        """Add log probabilities of the next prompt tokens. Raises NodeFailedError if there are too
        many or impossible ones."""
        check_logprobs(more, self.vocab_size)
        self.prompt_logprobs += more
        self.lacks_prompt_logprobs = len(self.prompt_logprobs) != self.spec.num_prompt_logprobs
        if len(self.prompt_logprobs) > len(self.spec.token_ids):
            raise NodeFailedError("the prefill node sent log probabilities of too many tokens")

    def measure_stages(self) -> dict[str, float]:
        """Return the seconds of each stage, as reported by its node."""
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
