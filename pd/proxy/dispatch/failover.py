"""Resumes lost attempts on other nodes, after the tokens of the client."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from pd.core.errors import NodeFailedError, UnavailableError
from pd.core.messages import HEARTBEAT_INTERVAL
from pd.proxy.dispatch.attempt import Attempt
from pd.proxy.dispatch.attempts import list_active, make_connection_error
from pd.proxy.dispatch.suspicion import Suspicion
from pd.proxy.nodes.breaker import STUCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.errors import PDError
    from pd.core.messages import Fault, Output
    from pd.proxy.dispatch.attempt import History
    from pd.proxy.dispatch.attempts import Attempts
    from pd.proxy.dispatch.generation import Generation
    from pd.proxy.dispatch.proxy_metrics import Metrics
    from pd.proxy.dispatch.suspicion import Death
    from pd.proxy.nodes.node_handle import NodeHandle

logger = logging.getLogger(__name__)

# Nodes that start leaving within this time count as leaving together. Their streams stay until
# every node has sent a heartbeat after that.
TOGETHER_SECONDS = HEARTBEAT_INTERVAL / 2


class Failovers:
    """Replaces lost attempts. Runs on the event loop.

    Args:
        max_failovers: how often a choice may fail over; 0 turns off failover, breakers and moves.
        wait_seconds: how long an attempt waits for a node.
        fail: ends a generation without success.
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
        # Attempts without a node, each with the error of the attempt before and the start of its
        # wait.
        self._waiting: dict[Attempt, tuple[PDError, float]] = {}
        self._suspicion, self._trials = Suspicion(), Trials()
        # Suspected attempts waiting for their trial, with the error of the attempt before.
        self._suspects: dict[Attempt, PDError] = {}
        self._retry_timer: asyncio.TimerHandle | None = None
        # When the last heartbeat of each node arrived, and since when nodes are leaving. Streams
        # move away once every other node has sent a heartbeat since.
        self._last_heartbeats: WeakKeyDictionary[NodeHandle, float] = WeakKeyDictionary()
        self._leaving: dict[NodeHandle, float] = {}

    # ---- what happens to attempts

    def lose_node(self, node: NodeHandle, error: NodeFailedError, *, died: bool) -> None:
        """Fail over the requests lost by a node.

        Args:
            died: the node died, maybe in a step with one of the requests.
        """
        attempts = list_active(node)
        if not died:
            for attempt in attempts:
                self.fail_over(attempt, error, node)
            return
        in_step = [attempt for attempt in attempts if attempt.is_computed_by(node)]
        requests = (attempt.request for attempt in in_step)
        death = self._suspicion.note_death(node.instance_id, requests, others=node.num_others > 0)
        for attempt in attempts:
            if attempt in in_step:
                self._on_death(attempt, node, error, death)
            else:
                self.fail_over(attempt, error, node)

    def _on_death(
        self, attempt: Attempt, node: NodeHandle, error: NodeFailedError, death: Death
    ) -> None:
        """Handle the death of a node whose step may have included the attempt."""
        deaths = (death,) if attempt.has_progressed else (*attempt.history.deaths, death)
        if self._is_wanted(attempt) and self._suspicion.is_guilty(attempt.request, deaths):
            message = f"; the request was in the steps in which {len(deaths)} nodes died in a row"
            self._give_up(attempt, NodeFailedError(error.message + message), "suspected")
            return
        self.fail_over(attempt, error, node, deaths=deaths)

    def report_failure(
        self, attempt: Attempt, node: NodeHandle, error: PDError, fault: Fault = "node"
    ) -> None:
        """Handle a node's report that it ended an attempt without success.

        Args:
            fault: who caused the failure, according to the node.
        """
        if fault == "nobody":
            self.fail_over(attempt, error, node, is_refusal=True)
            return
        if self._max_failovers and isinstance(error, NodeFailedError):
            _blame_nodes(attempt, node, fault, error.message)
        partner = attempt.get_partner(node)
        if fault != "node" and partner is not None and attempt.is_computed_by(partner):
            self._suspicion.note_report(partner.instance_id, attempt.request)
        apart = attempt.history.apart
        if fault != "node" and attempt.first_node is not None and attempt.decode_node is not None:
            first, decode = attempt.first_node, attempt.decode_node
            apart |= {(first, decode), (decode, first)}
        # A node that lost its peer still serves others.
        lost = partner if fault == "peer" else None
        self.fail_over(attempt, error, lost, apart=apart)

    def report_step_failure(
        self, attempts: list[Attempt], node: NodeHandle, error: NodeFailedError
    ) -> None:
        """Handle the failure of a step that included these attempts."""
        if self._max_failovers:
            node.breaker.note_failure(attempts, error.message)
        requests = (attempt.request for attempt in attempts)
        death = self._suspicion.note_step_failure(
            node.instance_id, requests, others=node.num_others > 0
        )
        for attempt in attempts:
            self._on_death(attempt, node, error, death)

    def fail_over(
        self,
        attempt: Attempt,
        error: PDError,
        at: NodeHandle | None = None,
        *,
        deaths: tuple[Death, ...] | None = None,
        apart: frozenset[tuple[NodeHandle, NodeHandle]] | None = None,
        is_refusal: bool = False,
    ) -> None:
        """Replace a lost attempt by attempts on other nodes, or fail its generation.

        Args:
            at: the node that failed; None if it may have been either.
            deaths, apart: see :class:`pd.proxy.dispatch.attempt.History`; None keeps them.
            is_refusal: the node takes no requests. This is not counted as a failover, unless the
                node lost the request before.
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
        history = attempt.history.add_lost(attempt.nodes if at is None else [at])
        history = history._replace(losses=losses, reason=error.message)
        if deaths is not None:
            history = history._replace(deaths=deaths, died_at=None)
        if apart is not None:
            history = history._replace(apart=apart)
        self._continue_attempt(attempt, error, history)

    def _move_attempt(self, attempt: Attempt, node: NodeHandle) -> None:
        """Move an attempt to other nodes, if there are any. Otherwise it stays."""
        is_probe = attempt.generation.job.is_probe
        if is_probe or not self._is_wanted(attempt) or not self._attempts.has_nodes_for(attempt):
            return
        error = NodeFailedError(f"{node.role} node {node.instance_id} is leaving")
        history = attempt.history.add_lost([node])._replace(reason=error.message)
        self._continue_attempt(attempt, error, history)

    @staticmethod
    def _is_wanted(attempt: Attempt) -> bool:
        return not attempt.generation.is_done and attempt in attempt.generation.attempts

    def _give_up(self, attempt: Attempt, error: PDError, outcome: str) -> None:
        if self._is_wanted(attempt):
            self._metrics.failovers.labels(outcome).inc()
            self._fail(attempt.generation, error)

    def _continue_attempt(self, attempt: Attempt, error: PDError, history: History) -> None:
        logger.info("%s fails over: %s", attempt.generation.spec.rid, error.message)
        successors = self._replace_attempt(attempt, error.message, history)
        self._metrics.failovers.labels("moved").inc(len(successors))
        self._open_all(successors, error)

    def place_again(self, attempt: Attempt) -> None:
        """Place a request again after its node gave it back unstarted.

        This is no failover: nothing was lost, and we do not tell the client.
        """
        error = UnavailableError("its node gave the request back")
        history = attempt.history._replace(moves=attempt.history.moves + 1)
        self._open_all(self._replace_attempt(attempt, error.message, history), error)

    def keep_last_token(self, attempt: Attempt, error: PDError) -> None:
        """Continue after the last known token without asking for it again.

        We do this if nodes chose another token when asked again, or if we can ask none. Rounding
        may decide between two equally likely tokens, so no node is at fault and nothing counts as
        lost.
        """
        if self._is_wanted(attempt):
            history = attempt.history._replace(keeps_last=True)
            self._open_all(self._replace_attempt(attempt, error.message, history), error)

    def _replace_attempt(self, attempt: Attempt, reason: str, history: History) -> list[Attempt]:
        """End an attempt on its nodes. Return its successors, which the caller opens."""
        self._attempts.abort_attempt(attempt, reason)
        self._attempts.close_attempt(attempt)
        successors = _make_successors(attempt, history)
        attempt.generation.attempts += successors
        return successors

    def _open_all(self, attempts: list[Attempt], error: PDError) -> None:
        for attempt in attempts:
            if self._is_wanted(attempt):  # failing to send one attempt may end the others
                self._open_attempt(attempt, error)

    # ---- attempts that go on

    def _open_attempt(self, attempt: Attempt, error: PDError) -> None:
        """Send an attempt now, or as soon as there are nodes for it."""
        if is_suspected(attempt):
            self._suspects[attempt] = error
            self._try_suspects()
        else:
            self._try_open(attempt, error)

    def _try_open(self, attempt: Attempt, error: PDError) -> bool:
        """Send an attempt. Return False if trials of other requests occupy all nodes."""
        suspected = is_suspected(attempt)
        occupied = self._trials.find_occupied(attempt) if suspected else frozenset()
        try:
            if not self._attempts.place_attempt(attempt, _find_sibling(attempt), occupied):
                return False
        except UnavailableError:
            if attempt.repeats_last and self._attempts.could_resume_alone(attempt):
                self.keep_last_token(attempt, error)
                return True
            self._waiting.setdefault(attempt, (error, time.monotonic()))
            self._retry_later()
            return True
        self._waiting.pop(attempt, None)
        if suspected:
            self._trials.add_trial(attempt)
        unreached = self._attempts.send_attempt(attempt)
        if unreached is not None:
            self.fail_over(attempt, make_connection_error(unreached), unreached)
        return True

    def _try_suspects(self) -> None:
        """Try suspected attempts in order, as many as there are nodes for."""
        while self._suspects:
            attempt = next(iter(self._suspects))
            error = self._suspects.pop(attempt)
            if self._is_wanted(attempt) and not self._try_open(attempt, error):
                self._suspects = {attempt: error} | self._suspects
                self._waiting.pop(attempt, None)  # there are nodes
                self._retry_later()
                return

    def note_output(self, attempt: Attempt) -> None:
        """Let others be tried if output of a suspected attempt has cleared it."""
        if self._suspects and not is_suspected(attempt):
            self._try_suspects()

    def retry_waiting(self) -> None:
        """Retry waiting attempts, because a node became ready or is gone."""
        self._try_suspects()
        for attempt, (error, since) in list(self._waiting.items()):
            if attempt not in self._waiting:
                continue  # giving up an attempt may free a node, which calls this method
            # An attempt waiting for its trial does not wait for nodes: there are some.
            if not self._is_wanted(attempt) or attempt in self._suspects:
                del self._waiting[attempt]
            elif time.monotonic() - since > self._wait_seconds:
                del self._waiting[attempt]
                text = f"{error.message}; no other node could go on within {self._wait_seconds:g} s"
                refused = isinstance(error, UnavailableError)
                kind = UnavailableError if refused else NodeFailedError
                self._give_up(attempt, kind(text), "no_node")
            else:
                self._open_attempt(attempt, error)

    def _retry_later(self) -> None:
        """Retry soon even if no node changes, because a breaker may have enabled one."""
        if self._retry_timer is None:
            loop = asyncio.get_running_loop()
            self._retry_timer = loop.call_later(HEARTBEAT_INTERVAL, self._retry_now)

    def _retry_now(self) -> None:
        self._retry_timer = None
        try:
            self.retry_waiting()
        finally:
            if self._waiting or self._suspects:
                self._retry_later()

    # ---- nodes

    def note_heartbeat(self, node: NodeHandle) -> None:
        """Handle a heartbeat: move the requests of a stuck or leaving node."""
        if not self._max_failovers:
            return
        node.breaker.is_stuck = node.is_stuck
        if node.is_stuck:
            error = NodeFailedError(f"{node.role} node {node.instance_id}: {STUCK}")
            self.lose_node(node, error, died=True)
        elif node.is_accepting:
            self._suspicion.note_recovery(node.instance_id)
        self._move_from_leaving(node)

    def _move_from_leaving(self, sender: NodeHandle) -> None:
        """Move streams away from leaving nodes.

        We first wait to learn of other leaving nodes, because a stream moved to one of them would
        have to move again.
        """
        now = time.monotonic()
        if not self._leaving and not sender.is_leaving:
            self._last_heartbeats[sender] = now
            return
        before = self._earliest_heartbeat()
        self._last_heartbeats[sender] = now
        self._leaving = {node: at for node, at in self._leaving.items() if node.is_leaving}
        if sender.is_leaving:
            self._leaving.setdefault(sender, now)
        for node, since in self._leaving.items():
            known_at = since + TOGETHER_SECONDS
            # With each heartbeat of their node, we retry streams that no other node could take.
            if self._earliest_heartbeat() >= known_at and (node is sender or before < known_at):
                for attempt in list_active(node):
                    self._move_attempt(attempt, node)

    def _earliest_heartbeat(self) -> float:
        """Return the time since which every ready node has sent a heartbeat."""
        return min(
            (at for node, at in self._last_heartbeats.items() if node.is_alive and node.is_ready),
            default=math.inf,
        )


def _blame_nodes(attempt: Attempt, node: NodeHandle, fault: Fault, reason: str) -> None:
    """Report a node's failure to breakers.

    An elastic node can serve without its peer. If one of the two is elastic, the breaker of the
    pair therefore counts failures blamed on the peer or on both. Otherwise we blame both nodes for
    a failure of the pair: with other partners, only the faulty one will keep failing.
    """
    if fault != "node" and attempt.hand_off is not None:
        was_in = attempt.hand_off.allows_requests
        attempt.hand_off.note_failure([attempt], reason, attempt.decode_node)
        for each in attempt.nodes:
            if each.breaker.is_probed_by(attempt):
                each.breaker.note_failure([attempt], reason, attempt.get_partner(each))
        if was_in and not attempt.hand_off.allows_requests:
            urls = " to ".join(each.url for each in attempt.nodes)
            logger.warning("hand-offs from %s are disabled: %s", urls, attempt.hand_off.problem)
        return
    for each in attempt.nodes:
        if fault == "pair" or (each is node) == (fault == "node"):
            partner = None if fault == "node" else attempt.get_partner(each)
            each.breaker.note_failure([attempt], reason, partner)


def credit_nodes(attempt: Attempt, node: NodeHandle, output: Output, *, decode_began: bool) -> None:
    """Report a node's success to breakers, after we accepted its output.

    The prefill node and the pair have succeeded as soon as the decode node has the KV. First tokens
    are no success of the generating node, because the decode node only repeats them, and a node
    serving alone computes them in the prefill step. Later tokens are.

    Args:
        decode_began: the output is the first one of the decode node.
    """
    if attempt.generation.job.is_probe:
        # A probe enables its nodes only by a complete answer.
        if attempt.is_finished:
            for each in attempt.nodes:
                each.breaker.note_success(attempt)
            if attempt.hand_off is not None:
                attempt.hand_off.note_success(attempt)
        return
    if decode_began:
        assert attempt.first_node is not None
        attempt.first_node.breaker.note_success(attempt)
        if attempt.hand_off is not None:
            attempt.hand_off.note_success(attempt)
    has_ended = attempt.choices[output.index].finish is not None
    if has_ended or output.position > attempt.produced:
        node.breaker.note_success(attempt)


def _make_successors(attempt: Attempt, history: History) -> list[Attempt]:
    """Make the attempts to continue the choices of a lost attempt."""
    generation = attempt.generation
    keeps_last = history.keeps_last and not attempt.has_added
    history = history._replace(produced=attempt.produced, keeps_last=keeps_last)
    if attempt.is_whole and not generation.has_output:
        generation.forget_output()
        return [Attempt(generation, generation.choices, history)]
    unfinished = [choice for choice in attempt.choices if choice.finish is None]
    for choice in unfinished:
        choice.prepare_failover()
    return [Attempt(generation, [choice], history, is_whole=False) for choice in unfinished]


def _find_sibling(attempt: Attempt) -> NodeHandle | None:
    """Return the node of the other prompts of a batch, unless the attempt avoids it."""
    job = attempt.generation.job
    if not job.is_batch:
        return None
    others = (a.first_node for g in job.generations for a in g.attempts if a.history.reason)
    avoided = attempt.history.avoided
    return next((node for node in others if node is not None and node not in avoided), None)


class Trials:
    """Suspected attempts being tried, at most one per node. If the node dies, no other suspect was
    in its step."""

    def __init__(self) -> None:
        self._attempts: dict[Attempt, None] = {}

    def add_trial(self, attempt: Attempt) -> None:
        """Record that a suspected attempt was sent."""
        self._attempts[attempt] = None

    def find_occupied(self, attempt: Attempt) -> frozenset[NodeHandle]:
        """Find the nodes on which other requests are tried."""
        for other in list(self._attempts):
            if other not in other.generation.attempts or not is_suspected(other):
                del self._attempts[other]
        job = attempt.generation.job
        others = (other for other in self._attempts if other.generation.job is not job)
        return frozenset(node for other in others for node in other.nodes)


def is_suspected(attempt: Attempt) -> bool:
    """Whether two or more nodes died with the attempt in their steps, without progress since."""
    return len(attempt.history.deaths) > 1 and not attempt.has_progressed
