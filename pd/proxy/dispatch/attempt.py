"""An attempt to prefill a prompt on one or two nodes, or to continue one of its choices."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from pd.core.messages import ROOM_BYTES
from pd.core.sampling_params import choice_seed
from pd.proxy.dispatch.generation import Failover
from pd.proxy.dispatch.suspicion import STEP_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from pd.core.messages import Output
    from pd.proxy.dispatch.generation import Choice, Generation
    from pd.proxy.dispatch.suspicion import Death, Request
    from pd.proxy.nodes.breaker import Breaker
    from pd.proxy.nodes.node_handle import NodeHandle
    from pd.proxy.routing.prediction import Predicted
    from pd.proxy.routing.routing import SentLoad

    IntArray = npt.NDArray[np.int32]


class History(NamedTuple):
    """The attempts before an attempt.

    Attributes:
        losses: number of lost attempts. The first refusal of each process of a node does not count.
        reason: why the last attempt was lost or moved; empty without attempts.
        deaths: deaths in a row of nodes with the request in their steps, without progress in
            between.
        died_at: tokens of the longest choice at the last death. None is replaced by the number of
            tokens at the start of the attempt.
        lost_at: nodes that lost the request or that it left, each with its instance id then.
        apart: pairs of nodes with a failed hand-off, in both orders.
        moves: how often a node gave the request back before starting it.
        produced: tokens of output given to the last attempt.
        keeps_last: nodes disagreed about the last known token under a grammar, so we do not ask for
            it again.
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
        """Whether there was no attempt before."""
        return not self.reason and not self.moves

    @property
    def avoided(self) -> frozenset[NodeHandle]:
        """Nodes that lost the request, unless they restarted since."""
        return frozenset(node for node, instance in self.lost_at if node.instance_id == instance)

    def add_lost(self, nodes: Iterable[NodeHandle]) -> History:
        """Add nodes that lost the request."""
        return self._replace(lost_at=self.lost_at | {(node, node.instance_id) for node in nodes})


# A first attempt has this history.
NO_HISTORY = History()


class Attempt:
    """A room on one or two nodes, in which they compute choices of a generation.

    The first attempt computes all choices. Later attempts do so, too, as long as the client has
    received nothing. Otherwise each continues one choice after the known tokens.

    Attributes:
        choices: in the order in which the nodes number them.
        room: identifies the attempt on its nodes.
        first_node: the prefilling node (prefill or unified), or a decode node resuming a request
            alone. None until nodes are chosen.
        decode_node: the node generating the rest, if it is another one.
        hand_off: breaker of the pair; None if each node is blamed for its own failures.
        token_ids: the prompt, followed by ``produced`` tokens of output.
        params: sampling parameters for the nodes.
        predicted: the prediction by which nodes were chosen; None if the policy chose.
        sent_load: load added to the nodes; None once removed.
        has_begun: the first node reported the start of the prefill.
        uncached_tokens: tokens counted in ``first_node.pending_tokens``; 0 once they are computed.
        progress: grows whenever :attr:`has_computed_prompt` or :attr:`needs_first_node` may change.
        decode_has_sent: the decode node has sent output, so it has all of the KV.
        has_added: the attempt produced a token new to the client.
    """

    __slots__ = (
        "_begins_at",
        "_silent",
        "choices",
        "decode_has_sent",
        "decode_node",
        "first_node",
        "generation",
        "hand_off",
        "has_added",
        "has_begun",
        "history",
        "is_whole",
        "params",
        "predicted",
        "produced",
        "progress",
        "room",
        "sent_load",
        "token_ids",
        "uncached_tokens",
    )

    def __init__(
        self,
        generation: Generation,
        choices: list[Choice],
        history: History = NO_HISTORY,
        *,
        is_whole: bool = True,
    ) -> None:
        """``is_whole``: the choices are all of the generation, computed from the prompt on."""
        self.generation = generation
        self.choices = tuple(choices)
        self.room = secrets.token_bytes(ROOM_BYTES)
        self.first_node: NodeHandle | None = None
        self.decode_node: NodeHandle | None = None
        self.hand_off: Breaker | None = None
        self.is_whole = is_whole
        self.token_ids = generation.spec.token_ids
        self.params = generation.spec.params
        self.produced = 0
        self._begins_at = 0 if is_whole else len(choices[0].output_ids)
        if not is_whole:
            self._continue_choice(choices[0], history)
        if history.died_at is None:
            history = history._replace(died_at=self._begins_at)
        self.history = history
        self.predicted: Predicted | None = None
        self.sent_load: SentLoad | None = None
        self.has_begun = False
        self.uncached_tokens = 0
        self.progress = 0
        self.decode_has_sent = False
        # Choices for which the first node has sent nothing.
        self._silent = set(range(len(choices)))
        self.has_added = False

    def _continue_choice(self, choice: Choice, history: History) -> None:
        """Set parameters and tokens to continue one choice: with its own seed, after its tokens."""
        spec = self.generation.spec
        self.params = replace(
            spec.params,
            n=1,
            seed=choice_seed(spec.params.seed, choice.index),
            prompt_logprobs_start=None,
        )
        output = choice.output_ids
        # NOTE: a grammar may force tokens after the first one of an attempt. The decode node adds
        # them when it gets the first token from a prefill node. A node resuming after that token
        # would sample them instead, so we ask for the token again. All later tokens arrive together
        # with their forced ones.
        is_first = len(output) == history.produced + 1
        if spec.params.grammar is not None and is_first and not history.keeps_last:
            output = output[:-1]
        self.token_ids = np.concatenate([spec.token_ids, np.array(output, np.int32)])
        self.produced = len(output)

    @property
    def nodes(self) -> list[NodeHandle]:
        if self.decode_node is None:
            return [] if self.first_node is None else [self.first_node]
        return (
            [self.decode_node] if self.first_node is None else [self.first_node, self.decode_node]
        )

    def get_partner(self, node: NodeHandle) -> NodeHandle | None:
        """Return the other node."""
        return self.first_node if node is self.decode_node else self.decode_node

    @property
    def has_computed_prompt(self) -> bool:
        """Whether the first token of every choice came from the first node."""
        return not self._silent

    @property
    def needs_first_node(self) -> bool:
        """Whether the death of the first node would still matter."""
        return self.decode_node is None or not (self.has_computed_prompt and self.decode_has_sent)

    @property
    def has_progressed(self) -> bool:
        """Whether the attempt got further since the last death than one step can."""
        tokens = max(len(choice.output_ids) for choice in self.choices)
        return tokens - (self.history.died_at or 0) > STEP_TOKENS

    @property
    def request(self) -> Request:
        """Owner and rid of the client's request."""
        return self.generation.job.owner, self.generation.job.rid

    @property
    def repeats_last(self) -> bool:
        """Whether we asked again for the client's last token, and the nodes have not got
        further."""
        return self._begins_at == self.produced + 1 and not self.has_added

    def is_computed_by(self, node: NodeHandle) -> bool:
        """Whether a step of the node may include the attempt."""
        if node is self.decode_node:
            return self.decode_has_sent
        return self.decode_node is None or not self.has_computed_prompt

    @property
    def is_finished(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.finish is not None for choice in self.choices)

    def accept_output(self, node: NodeHandle, output: Output) -> int:
        """Merge an output of one of the nodes. Return the number of new tokens.

        Raises NodeFailedError if the output makes no sense here.
        """
        generation, from_first = self.generation, node is self.first_node
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
            self.progress += not self.decode_has_sent
            self.decode_has_sent = True
        generation.note_facts(self, output, from_first=from_first)
        if choice.finish is not None:
            return 0
        first_may_come = not from_first and output.index in self._silent
        added = choice.accept_output(output, first_may_come=first_may_come)
        if added:
            self._note_tokens(choice)
        return added

    def _note_tokens(self, choice: Choice) -> None:
        """Record when tokens arrived and, after a failover, how long the client waited."""
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
