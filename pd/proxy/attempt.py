"""One attempt of one or two nodes at a prompt, or at one choice of it that other nodes began."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from pd.core.messages import ROOM_BYTES
from pd.core.sampling_params import choice_seed
from pd.proxy.generation import Failover
from pd.proxy.suspicion import STEP_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from pd.core.messages import Output
    from pd.core.sampling_params import SamplingParams
    from pd.proxy.breaker import Breaker
    from pd.proxy.generation import Choice, Generation
    from pd.proxy.node_handle import NodeHandle
    from pd.proxy.prediction import Predicted
    from pd.proxy.routing import SentLoad
    from pd.proxy.suspicion import Death, Request

    IntArray = npt.NDArray[np.int32]


class GenerateInput(NamedTuple):
    """The part of a node's message that says what to compute.

    Attributes:
        token_ids: the prompt, followed by ``produced`` tokens of output.
    """

    token_ids: IntArray
    params: SamplingParams
    produced: int


class History(NamedTuple):
    """The attempts before one.

    Attributes:
        losses: how many of them were lost; the first refusal of each process of a node does not
            count.
        reason: why the last of them was lost, or moved; empty without any.
        deaths: those of nodes that died one after the other with one of them in their steps, while
            it got no further.
        died_at: tokens of the longest choice at the last of these; None stands for those with
            which the attempt begins.
        lost_at: nodes on which they were lost, or which they left, and the instance of each then.
        apart: pairs of nodes, in either order, between which the KV of one of them did not travel.
        moves: how many of them their nodes gave back before they had begun.
        produced: tokens of output that the last of them was given.
        keeps_last: whether other nodes chose another token under a grammar than the last one that
            is known, so that they are not asked for it again.
    """

    losses: int = 0
    reason: str = ""
    deaths: tuple[Death, ...] = ()
    died_at: int | None = 0
    lost_at: frozenset[tuple[NodeHandle, str]] = frozenset()
    apart: frozenset[tuple[NodeHandle, NodeHandle]] = frozenset()
    moves: int = 0
    produced: int = 0
    keeps_last: bool = False

    @property
    def is_first(self) -> bool:
        """Whether there are none."""
        return not self.reason and not self.moves

    @property
    def avoided(self) -> frozenset[NodeHandle]:
        """Nodes on which they were lost, and which were not started again since."""
        return frozenset(node for node, instance in self.lost_at if node.instance_id == instance)

    def avoiding(self, nodes: Iterable[NodeHandle]) -> History:
        """The same, with one that was lost at these nodes."""
        return self._replace(lost_at=self.lost_at | {(node, node.instance_id) for node in nodes})


# A first attempt has this history.
FIRST = History()


class Attempt:
    """A room on one or two nodes, in which choices of a generation are computed.

    The first attempt computes all choices from the prompt on. One that follows a lost attempt does
    so too as long as nothing was delivered; else it computes one choice from where that stands.

    Attributes:
        choices: in the order in which the nodes number them.
        room: identifies the attempt on its nodes.
        first: the node that computes the prompt (prefill or unified), or a decode node that
            computes a resumed request alone; None until nodes are chosen.
        decode: the node that generates the rest, if another one.
        hand_off: breaker of the pair; None if its nodes are blamed one by one.
        asked: what the nodes are to compute.
        predicted: what the nodes were chosen by; None if the policy chose by roles.
        sent_load: load that its nodes have by it; None if that is taken off.
        begun: whether the first node has said that it computes the prompt.
        uncached_tokens: tokens counted in ``first.pending_tokens``; 0 once computed.
        progress: grows with what :attr:`prompt_computed` and :attr:`needs_first` depend on.
        decode_spoke: whether the decode node has sent output, so that it has all of the KV.
        has_added: whether it brought a token that the client did not have.
    """

    __slots__ = (
        "_begins_at",
        "_silent",
        "asked",
        "begun",
        "choices",
        "decode",
        "decode_spoke",
        "first",
        "generation",
        "hand_off",
        "has_added",
        "history",
        "is_whole",
        "predicted",
        "progress",
        "room",
        "sent_load",
        "uncached_tokens",
    )

    def __init__(
        self,
        generation: Generation,
        choices: list[Choice],
        history: History = FIRST,
        *,
        is_whole: bool = True,
    ) -> None:
        """``is_whole``: the choices are all of the generation's, from the prompt on."""
        self.generation = generation
        self.choices = tuple(choices)
        self.room = secrets.token_bytes(ROOM_BYTES)
        self.first: NodeHandle | None = None
        self.decode: NodeHandle | None = None
        self.hand_off: Breaker | None = None
        self.is_whole = is_whole
        self.asked = (
            _all_choices(generation) if is_whole else _one_choice(generation, choices[0], history)
        )
        self._begins_at = 0 if is_whole else len(choices[0].output_ids)
        if history.died_at is None:
            history = history._replace(died_at=self._begins_at)
        self.history = history
        self.predicted: Predicted | None = None
        self.sent_load: SentLoad | None = None
        self.begun = False
        self.uncached_tokens = 0
        self.progress = 0
        self.decode_spoke = False
        # Choices of which the first node has sent nothing.
        self._silent = set(range(len(choices)))
        self.has_added = False

    @property
    def nodes(self) -> list[NodeHandle]:
        if self.decode is None:
            return [] if self.first is None else [self.first]
        return [self.decode] if self.first is None else [self.first, self.decode]

    def partner_of(self, node: NodeHandle) -> NodeHandle | None:
        """The other one of its nodes."""
        return self.first if node is self.decode else self.decode

    @property
    def prompt_computed(self) -> bool:
        """Whether the first token of every choice came from the node that computes the prompt."""
        return not self._silent

    @property
    def needs_first(self) -> bool:
        """Whether the death of the first node would still matter."""
        return self.decode is None or not (self.prompt_computed and self.decode_spoke)

    @property
    def has_got_on(self) -> bool:
        """Whether it got further since the last death than one step gets."""
        tokens = max(len(choice.output_ids) for choice in self.choices)
        return tokens - (self.history.died_at or 0) > STEP_TOKENS

    @property
    def request(self) -> Request:
        """Names the client's request."""
        return self.generation.job.owner, self.generation.job.rid

    @property
    def repeats_last(self) -> bool:
        """Whether its nodes are asked for the last token that the client has, and have not got
        further."""
        return self._begins_at == self.asked.produced + 1 and not self.has_added

    def is_computed_by(self, node: NodeHandle) -> bool:
        """Whether a node's steps may have the attempt in them."""
        if node is self.decode:
            return self.decode_spoke
        return self.decode is None or not self.prompt_computed

    @property
    def finished(self) -> bool:
        """Whether all its choices have ended."""
        return all(choice.finish is not None for choice in self.choices)

    def accept(self, node: NodeHandle, output: Output) -> int:
        """Take one output of one of its nodes; returns the number of new tokens.

        Raises NodeFailedError if the output makes no sense here.
        """
        generation, from_first = self.generation, node is self.first
        choice = self.choices[output.index]
        if from_first:
            if output.prompt_logprobs is not None and self.is_whole:
                generation.add_prompt_logprobs(output.prompt_logprobs)
                if not output.token_ids:
                    return 0  # the rest and token 1 follow
            if self._silent and output.index in self._silent:
                self._silent.remove(output.index)
                self.progress += 1
        else:
            self.progress += not self.decode_spoke
            self.decode_spoke = True
        generation.note_facts(self, output, from_first=from_first)
        if choice.finish is not None:
            return 0
        first_may_come = not from_first and output.index in self._silent
        added = choice.accept(output, first_may_come=first_may_come)
        if added:
            self._note_tokens(choice)
        return added

    def _note_tokens(self, choice: Choice) -> None:
        """Note when tokens came and, if they are the first, for how long the client waited."""
        generation, now = self.generation, time.monotonic()
        if self.history.reason and not self.has_added:
            number = None if self.is_whole else choice.index
            pause = now - (choice.last_token_at or generation.created)
            failover = Failover(self._begins_at, number, self.history.reason, pause)
            generation.failovers.append(failover)
        self.has_added = True
        choice.last_token_at = now
        if generation.first_token_at is None:
            generation.first_token_at = now


def _all_choices(generation: Generation) -> GenerateInput:
    return GenerateInput(generation.spec.token_ids, generation.spec.params, 0)


def _one_choice(generation: Generation, choice: Choice, history: History) -> GenerateInput:
    """Return the input that continues one choice: with its own seed, behind the tokens it has."""
    spec = generation.spec
    params = replace(
        spec.params,
        n=1,
        seed=choice_seed(spec.params.seed, choice.index),
        prompt_logprobs_start=None,
    )
    output = choice.output_ids
    # NOTE: a grammar may force tokens after the first one of an attempt, which the decode node adds
    # when it gets that from a prefill node. An attempt behind it would sample them. All other
    # tokens come with what is forced behind them.
    is_first = len(output) == history.produced + 1
    if spec.params.grammar is not None and is_first and not history.keeps_last:
        output = output[:-1]
    token_ids = np.concatenate([spec.token_ids, np.array(output, np.int32)])
    return GenerateInput(token_ids, params, len(output))
