"""Resumes lost attempts on other nodes, behind the tokens that clients have."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from pd.core.errors import NodeFailedError, UnavailableError
from pd.core.messages import HEARTBEAT_INTERVAL
from pd.proxy.attempt import Attempt
from pd.proxy.attempts import connection_lost
from pd.proxy.breaker import STUCK
from pd.proxy.suspicion import Suspicion, Trials, is_suspected

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.errors import PDError
    from pd.core.messages import Fault, Output
    from pd.proxy.attempt import History
    from pd.proxy.attempts import Attempts
    from pd.proxy.generation import Generation
    from pd.proxy.metrics import Metrics
    from pd.proxy.node_handle import NodeHandle
    from pd.proxy.suspicion import Death

logger = logging.getLogger(__name__)

# A node may leave up to so long after another one and still counts as leaving with it: the streams
# of neither move before the proxy heard from every node later than that.
TOGETHER_SECONDS = HEARTBEAT_INTERVAL / 2


class Failovers:
    """Takes over attempts that were lost. Everything runs on the event loop.

    Args:
        max_failovers: times that a choice goes on elsewhere after a failure, at most; 0 turns off
            failover, breakers and moves.
        wait_seconds: how long an attempt waits for a node that can go on with it.
        fail: ends a generation that cannot go on.
    """

    def __init__(
        self,
        attempts: Attempts,
        metrics: Metrics,
        max_failovers: int,
        wait_seconds: float,
        fail: Callable[[Generation, PDError], None],
    ) -> None:
        self._attempts = attempts
        self._metrics = metrics
        self._max_failovers = max_failovers
        self._wait_seconds = wait_seconds
        self._fail = fail
        # Attempts for which there is no node: the error of those before them, and when they began
        # to wait.
        self._waiting: dict[Attempt, tuple[PDError, float]] = {}
        self._suspicion, self._trials = Suspicion(), Trials()
        # Suspected attempts whose turn to be tried has not come, and the errors of those before.
        self._turns: dict[Attempt, PDError] = {}
        self._look: asyncio.TimerHandle | None = None
        # When the last heartbeat of each node came, and since when nodes are to be empty. Streams
        # leave these once every other node has told its state since.
        self._heard: WeakKeyDictionary[NodeHandle, float] = WeakKeyDictionary()
        self._leaving: dict[NodeHandle, float] = {}

    # ---- what happens to attempts

    def node_lost(self, node: NodeHandle, error: NodeFailedError, *, died: bool) -> None:
        """A node has lost its requests.

        Args:
            died: maybe in a step, of one of them.
        """
        attempts = list(node.active)
        if not died:
            for attempt in attempts:
                self.lost(attempt, error, node)
            return
        in_step = [attempt for attempt in attempts if attempt.is_computed_by(node)]
        requests = (attempt.request for attempt in in_step)
        death = self._suspicion.note(node.instance_id, requests, others=node.others > 0)
        for attempt in attempts:
            if attempt in in_step:
                self._died_with(attempt, node, error, death)
            else:
                self.lost(attempt, error, node)

    def _died_with(
        self, attempt: Attempt, node: NodeHandle, error: NodeFailedError, death: Death
    ) -> None:
        """A node died, and an attempt may have been in its step."""
        deaths = (death,) if attempt.has_got_on else (*attempt.history.deaths, death)
        if self._is_wanted(attempt) and self._suspicion.convicts(attempt.request, deaths):
            message = f"; the request was in the steps in which {len(deaths)} nodes died in a row"
            self._give_up(attempt, NodeFailedError(error.message + message), "suspected")
            return
        self.lost(attempt, error, node, deaths=deaths)

    def failed(
        self, attempt: Attempt, node: NodeHandle, error: PDError, fault: Fault = "node"
    ) -> None:
        """A node ended an attempt without success.

        Args:
            fault: the node at fault, as this one says.
        """
        if fault == "nobody":
            self.lost(attempt, error, node, is_refusal=True)
            return
        if self._max_failovers and isinstance(error, NodeFailedError):
            _blame(attempt, node, fault, error.message)
        partner = attempt.partner_of(node)
        if fault != "node" and partner is not None and attempt.is_computed_by(partner):
            self._suspicion.reported(partner.instance_id, attempt.request)
        apart = attempt.history.apart
        if fault != "node" and attempt.first is not None and attempt.decode is not None:
            first, decode = attempt.first, attempt.decode
            apart |= {(first, decode), (decode, first)}
        # A node that reports the loss of its peer serves others.
        lost = partner if fault == "peer" else None
        self.lost(attempt, error, lost, apart=apart)

    def step_failed(
        self, attempts: list[Attempt], node: NodeHandle, error: NodeFailedError
    ) -> None:
        """A node could not compute a step in which these attempts were."""
        if self._max_failovers:
            node.breaker.failed(attempts, error.message)
        requests = (attempt.request for attempt in attempts)
        death = self._suspicion.note_step(node.instance_id, requests, others=node.others > 0)
        for attempt in attempts:
            self._died_with(attempt, node, error, death)

    def lost(
        self,
        attempt: Attempt,
        error: PDError,
        at: NodeHandle | None = None,
        *,
        deaths: tuple[Death, ...] | None = None,
        apart: frozenset[tuple[NodeHandle, NodeHandle]] | None = None,
        is_refusal: bool = False,
    ) -> None:
        """An attempt is over without success: go on elsewhere, or fail its generation.

        Args:
            at: the node that failed; None if it may have been any.
            deaths, apart: see :class:`pd.proxy.attempt.History`; None if there are no others.
            is_refusal: the node takes no requests. That is no failover, unless the node had its
                turn before.
        """
        if not self._is_wanted(attempt):
            return
        is_probe = attempt.generation.job.is_probe
        is_temporary = isinstance(error, NodeFailedError | UnavailableError)
        if not is_temporary or is_probe or not self._max_failovers:
            self._fail(attempt.generation, error)
            return
        counts = not is_refusal or at in attempt.history.avoided
        losses = attempt.history.losses + counts
        if losses > self._max_failovers:
            self._give_up(attempt, error, "exhausted")
            return
        history = attempt.history.avoiding(attempt.nodes if at is None else [at])
        history = history._replace(losses=losses, reason=error.message)
        if deaths is not None:
            history = history._replace(deaths=deaths, died_at=None)
        if apart is not None:
            history = history._replace(apart=apart)
        self._go_on(attempt, error, history)

    def _move(self, attempt: Attempt, node: NodeHandle) -> None:
        """Have other nodes go on with an attempt, if there are any; this one need not fail for
        it."""
        is_probe = attempt.generation.job.is_probe
        if is_probe or not self._is_wanted(attempt) or not self._attempts.have_nodes(attempt):
            return
        error = NodeFailedError(f"{node.role} node {node.instance_id} is to be empty")
        history = attempt.history.avoiding([node])._replace(reason=error.message)
        self._go_on(attempt, error, history)

    @staticmethod
    def _is_wanted(attempt: Attempt) -> bool:
        return not attempt.generation.done and attempt in attempt.generation.attempts

    def _give_up(self, attempt: Attempt, error: PDError, outcome: str) -> None:
        if self._is_wanted(attempt):
            self._metrics.failovers.labels(outcome).inc()
            self._fail(attempt.generation, error)

    def _go_on(self, attempt: Attempt, error: PDError, history: History) -> None:
        logger.info("%s goes on elsewhere: %s", attempt.generation.spec.rid, error.message)
        successors = self._replace(attempt, error.message, history)
        self._metrics.failovers.labels("moved").inc(len(successors))
        self._open_all(successors, error)

    def place_anew(self, attempt: Attempt) -> None:
        """Send a request, which its node gave back before it had begun, to the nodes that are best
        now. That is no failover: nothing was lost, and the client is told nothing."""
        error = UnavailableError("its node gave the request back")
        history = attempt.history._replace(moves=attempt.history.moves + 1)
        self._open_all(self._replace(attempt, error.message, history), error)

    def keep_last(self, attempt: Attempt, error: PDError) -> None:
        """Go on behind the last known token, where nodes that were asked for it again chose another
        one, or where there are none that could be asked. Both tokens may be as likely but for
        rounding, so no node is at fault and nothing counts as lost."""
        if self._is_wanted(attempt):
            history = attempt.history._replace(keeps_last=True)
            self._open_all(self._replace(attempt, error.message, history), error)

    def _replace(self, attempt: Attempt, reason: str, history: History) -> list[Attempt]:
        """End an attempt at its nodes; returns those that follow it, which are not sent yet."""
        self._attempts.abort(attempt, reason)
        self._attempts.close(attempt)
        successors = _successors(attempt, history)
        attempt.generation.attempts += successors
        return successors

    def _open_all(self, attempts: list[Attempt], error: PDError) -> None:
        for attempt in attempts:
            if self._is_wanted(attempt):  # one that cannot be sent may end the others
                self._open(attempt, error)

    # ---- attempts that go on

    def _open(self, attempt: Attempt, error: PDError) -> None:
        """Send an attempt, now or as soon as there are nodes for it."""
        if is_suspected(attempt):
            self._turns[attempt] = error
            self._give_turns()
        else:
            self._try_open(attempt, error)

    def _try_open(self, attempt: Attempt, error: PDError) -> bool:
        """Send an attempt, unless all nodes are occupied by others that are tried."""
        suspected = is_suspected(attempt)
        occupied = self._trials.occupied(attempt) if suspected else frozenset()
        try:
            if not self._attempts.open(attempt, _sibling(attempt), occupied):
                return False
        except UnavailableError:
            if attempt.repeats_last and self._attempts.could_go_on_alone(attempt):
                self.keep_last(attempt, error)
                return True
            self._waiting.setdefault(attempt, (error, time.monotonic()))
            self._look_later()
            return True
        self._waiting.pop(attempt, None)
        if suspected:
            self._trials.begin(attempt)
        unreached = self._attempts.send(attempt)
        if unreached is not None:
            self.lost(attempt, connection_lost(unreached), unreached)
        return True

    def _give_turns(self) -> None:
        """Try those that are suspected, in their order and as many as there are nodes for."""
        while self._turns:
            attempt = next(iter(self._turns))
            error = self._turns.pop(attempt)
            if self._is_wanted(attempt) and not self._try_open(attempt, error):
                self._turns = {attempt: error} | self._turns
                self._waiting.pop(attempt, None)  # there are nodes
                self._look_later()
                return

    def got_output(self, attempt: Attempt) -> None:
        """An attempt of which a node may have died has output."""
        if self._turns and not is_suspected(attempt):
            self._give_turns()

    def nodes_changed(self) -> None:
        """A node became ready, or is no more."""
        self._give_turns()
        for attempt, (error, since) in list(self._waiting.items()):
            if attempt not in self._waiting:
                continue  # to give one up may set a node free, of which this method was told
            # One whose turn to be tried has not come waits for no node: there are some.
            if not self._is_wanted(attempt) or attempt in self._turns:
                del self._waiting[attempt]
            elif time.monotonic() - since > self._wait_seconds:
                del self._waiting[attempt]
                text = f"{error.message}; no other node could go on within {self._wait_seconds:g} s"
                refused = isinstance(error, UnavailableError)
                kind = UnavailableError if refused else NodeFailedError
                self._give_up(attempt, kind(text), "no_node")
            else:
                self._open(attempt, error)

    def _look_later(self) -> None:
        """Try again without a change of nodes: a breaker may have let one in."""
        if self._look is None:
            loop = asyncio.get_running_loop()
            self._look = loop.call_later(HEARTBEAT_INTERVAL, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        try:
            self.nodes_changed()
        finally:
            if self._waiting or self._turns:
                self._look_later()

    # ---- nodes

    def heard_from(self, node: NodeHandle) -> None:
        """Take a node's heartbeat: move the requests of one that is stuck or is being emptied."""
        if not self._max_failovers:
            return
        node.breaker.stuck = node.stuck
        if node.stuck:
            error = NodeFailedError(f"{node.role} node {node.instance_id}: {STUCK}")
            self.node_lost(node, error, died=True)
        elif node.accepting:
            self._suspicion.works(node.instance_id)
        self._empty_nodes(node)

    def _empty_nodes(self, heard: NodeHandle) -> None:
        """Move the streams of nodes that are to be empty, when it is known which other nodes are,
        too: a stream that moved to one of those would be cut off there."""
        now = time.monotonic()
        if not self._leaving and not heard.leaving:
            self._heard[heard] = now
            return
        before = self._all_heard_at()
        self._heard[heard] = now
        self._leaving = {node: at for node, at in self._leaving.items() if node.leaving}
        if heard.leaving:
            self._leaving.setdefault(heard, now)
        for node, since in self._leaving.items():
            known_at = since + TOGETHER_SECONDS
            # A stream that no other node could take is tried again with each heartbeat of its own.
            if self._all_heard_at() >= known_at and (node is heard or before < known_at):
                for attempt in list(node.active):
                    self._move(attempt, node)

    def _all_heard_at(self) -> float:
        """The time since which every node that takes requests has sent a heartbeat."""
        return min(
            (at for node, at in self._heard.items() if node.alive and node.ready), default=math.inf
        )


def _blame(attempt: Attempt, node: NodeHandle, fault: Fault, reason: str) -> None:
    """Tell breakers of a failure that a node reports.

    An elastic node can serve without its peer, so the breaker of the pair counts what a node says
    of its peer or of both. Without such a node both are blamed for the latter: with other partners,
    only the one at fault goes on failing.
    """
    if fault != "node" and attempt.hand_off is not None:
        was_in = attempt.hand_off.lets_in
        attempt.hand_off.failed([attempt], reason, attempt.decode)
        for each in attempt.nodes:
            if each.breaker.is_probed_by(attempt):
                each.breaker.failed([attempt], reason, attempt.partner_of(each))
        if was_in and not attempt.hand_off.lets_in:
            urls = " to ".join(each.url for each in attempt.nodes)
            logger.warning("nothing is handed off from %s: %s", urls, attempt.hand_off.problem)
        return
    for each in attempt.nodes:
        if fault == "pair" or (each is node) == (fault == "node"):
            partner = None if fault == "node" else attempt.partner_of(each)
            each.breaker.failed([attempt], reason, partner)


def credit(attempt: Attempt, node: NodeHandle, output: Output, *, decode_began: bool) -> None:
    """Tell breakers what a node got done by an output that was taken.

    The prefill node and the pair have done their part as soon as the decode node has the KV. The
    decode node repeats the first token before it computes anything, and the prompt's step computes
    it at a node that serves alone, so only what follows is a success of the node that generates.

    Args:
        decode_began: it is the first output of the decode node.
    """
    if attempt.generation.job.is_probe:
        # Nothing less than the whole answer lets in the nodes that it probes.
        if attempt.finished:
            for each in attempt.nodes:
                each.breaker.succeeded(attempt)
            if attempt.hand_off is not None:
                attempt.hand_off.succeeded(attempt)
        return
    if decode_began:
        assert attempt.first is not None
        attempt.first.breaker.succeeded(attempt)
        if attempt.hand_off is not None:
            attempt.hand_off.succeeded(attempt)
    has_ended = attempt.choices[output.index].finish is not None
    if has_ended or output.position > attempt.asked.produced:
        node.breaker.succeeded(attempt)


def _successors(attempt: Attempt, history: History) -> list[Attempt]:
    """Attempts that go on with the choices of one that is over."""
    generation = attempt.generation
    keeps_last = history.keeps_last and not attempt.has_added
    history = history._replace(produced=attempt.asked.produced, keeps_last=keeps_last)
    if attempt.is_whole and not generation.has_output:
        generation.begin_again()
        return [Attempt(generation, generation.choices, history)]
    going_on = [choice for choice in attempt.choices if choice.finish is None]
    for choice in going_on:
        choice.go_on_elsewhere()
    return [Attempt(generation, [choice], history, is_whole=False) for choice in going_on]


def _sibling(attempt: Attempt) -> NodeHandle | None:
    """The node of the other prompts of a job that belong together, unless the attempt avoids it."""
    job = attempt.generation.job
    if not job.together:
        return None
    others = (a.first for g in job.generations for a in g.attempts if a.history.reason)
    avoided = attempt.history.avoided
    return next((node for node in others if node is not None and node not in avoided), None)
