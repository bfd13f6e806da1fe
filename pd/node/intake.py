"""Turns a proxy's message into a queued request, or rejects it."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING

from pd.core.errors import (
    AbortedError,
    InvalidRequestError,
    NodeFailedError,
    PDError,
    RefusedError,
    UnavailableError,
)
from pd.core.messages import Abort, EndPrefixLease, Generate, GenerateTogether, TakeBack, TakenBack
from pd.engine.rule_budget import RuleBudget
from pd.engine.sampling_state import find_ending_tokens
from pd.node.validation import build_request, check_length
from pd.scheduling.request import RequestState
from pd.scheduling.resumed import restore_sampling
from pd.util.warning_limit import WarningLimit
from pd.util.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.node_info import Role
    from pd.grammar.grammars import MakeRules
    from pd.node.proxies import Proxies
    from pd.scheduling.combined import CombinedScheduler
    from pd.scheduling.core import NodeCore
    from pd.scheduling.handlers import Handlers
    from pd.scheduling.request import Request
    from pd.scheduling.transfer_end import PromptReceiver, PromptSender

logger = logging.getLogger(__name__)

# Threads that replay outputs through grammars. Each owner occupies one of them at most.
_REPLAYS = 4


class Intake:
    """Handles messages of proxies about requests. The caller holds the node's lock, in an event.

    The request and the parts of the node decide where a request starts. If it names a registry and
    there is a receiving end, its KV comes from a peer. Otherwise this node prefills it; if it names
    a peer and there is a sending end, its KV goes to that peer. A decode node prefills only resumed
    requests.

    Args:
        ready: tells whether the node accepts requests.

    Attributes:
        compiling: requests waiting for their grammar.
    """

    def __init__(
        self,
        core: NodeCore,
        role: Role,
        scheduler: CombinedScheduler,
        sending: PromptSender | None,
        receiving: PromptReceiver | None,
        proxies: Proxies,
        ready: Callable[[], bool],
    ) -> None:
        self._core, self._role, self._scheduler = core, role, scheduler
        self._sending, self._receiving = sending, receiving
        self._proxies, self._ready = proxies, ready
        self.compiling: list[Request] = []
        # Replaying a long output through a grammar may take seconds. We neither hold the node's
        # lock meanwhile nor let other owners wait.
        self._replays = WorkQueue("grammar-replay", _REPLAYS, self._replay_output, 1)
        self._dropped = WarningLimit(logger)

    def register_handlers(self, handlers: Handlers) -> None:
        """Register the handlers of messages from proxies."""
        handlers.add_handler(Generate, self._on_generate)
        handlers.add_handler(GenerateTogether, self._on_generate_together)
        handlers.add_handler(Abort, self._on_abort)
        handlers.add_handler(EndPrefixLease, self._on_end_prefix_lease)
        handlers.add_handler(TakeBack, self._on_take_back)

    def _on_generate(self, identity: bytes, message: Generate) -> None:
        requests = self._core.requests
        self._proxies.renew_lease(identity)
        if requests.has_tombstone(message.room):
            return
        existing = requests.find_request(message.room)
        if existing is not None:
            self._dropped.log_warning(f"dropped a duplicate of room {message.room.hex()}")
            if existing.proxy != identity:
                error = InvalidRequestError(f"room {message.room.hex()} is in use")
                requests.outputs.report_failure(identity, message.room, error)
            return
        try:
            if not self._ready():
                name = f"{self._role} node {self._core.instance_id}"
                raise RefusedError(f"{name} takes no requests")
            request = build_request(message, identity, self._core.engine.model_config.vocab_size)
            self._check_request(request)
        except PDError as error:
            requests.outputs.report_failure(identity, message.room, error)
            return
        requests.add_request(request)
        if request.params.grammar is None:
            self._start_request(request)
            return
        request.state = RequestState.COMPILING
        self.compiling.append(request)
        done = partial(self._on_grammar_compiled, request)
        is_resumed = request.num_produced > 0
        grammars, grammar = self._core.grammars, request.params.grammar
        grammars.request_rules(grammar, done, request.owner, is_resumed=is_resumed)

    def _on_generate_together(self, identity: bytes, message: GenerateTogether) -> None:
        for request in message.requests:
            self._on_generate(identity, request)

    def _on_grammar_compiled(self, request: Request, result: MakeRules | PDError) -> None:
        """Continue with a request whose grammar is compiled or invalid. Any thread."""
        error = result if isinstance(result, PDError) else None
        if not isinstance(result, PDError):
            share = partial(self._core.grammars.shares.get_share, request.owner)
            is_resumed = request.num_produced > 0
            rules = result.for_request(RuleBudget(request.owner, share, is_resumed=is_resumed))
            request.make_rules = rules
            if not is_resumed:
                error = rules.check_choices(request.params)
                if error is None and not rules.has_first_mask(self._is_ending(request)):
                    request.prepare_rules = partial(
                        rules.compute_first_mask, self._is_ending(request)
                    )
        if error is not None or not (request.num_produced or request.prepare_rules):
            self._on_rules_made(request, error)
            return
        try:
            self._replays.put(request, request.owner)
        except UnavailableError as lack:
            logger.warning("cannot replay the output so far of %s: %s", request.rid, lack)
            self._on_rules_made(request, lack)

    def _is_ending(self, request: Request) -> list[int]:
        model = self._core.engine.model_config
        return find_ending_tokens(request.params, model.eos_token_ids, model.vocab_size)

    def _replay_output(self, request: Request) -> None:
        """Advance a grammar over a resumed request's output, or compute its first mask."""
        if request.state.is_terminal:
            return
        error: PDError | None = None
        try:
            if request.prepare_rules is not None:
                request.prepare_rules()
            self._restore_rules(request)
        except PDError as failure:
            error = failure
        except Exception as failure:
            # A grammar library may raise anything, and the request must not wait forever.
            logger.exception("cannot replay an output")
            error = NodeFailedError(f"the output so far could not be replayed: {failure}")
        self._on_rules_made(request, error)

    def _restore_rules(self, request: Request) -> None:
        """Restore the request's sampling state. Raises PDError."""
        model = self._core.engine.model_config
        restore_sampling(request, model.eos_token_ids, model.vocab_size)

    def _on_rules_made(self, request: Request, error: PDError | None) -> None:
        """Start a request whose rules are ready, or fail it. Any thread."""
        with self._core.events.event():
            if request.state.is_terminal:
                return
            self.compiling.remove(request)
            if error is not None:
                self._core.requests.fail_request(request, error)
                return
            # Peers get the full time again, because the grammar may have used most of it.
            request.times.arrived = time.monotonic()
            self._start_request(request)

    def forget_request(self, request: Request) -> None:
        """Forget a request marked as ended."""
        if request in self.compiling:
            self.compiling.remove(request)

    def close(self) -> None:
        """Stop replaying outputs. Every request has ended."""
        self._replays.close()

    def _start_request(self, request: Request) -> None:
        """Enqueue a request, and wake the step loop. Its grammar, if any, is compiled."""
        if request.resumed_state is None:
            try:
                self._restore_rules(request)
            except PDError as error:
                self._core.requests.fail_request(request, error)
                return
        self._enqueue_request(request)
        continues = self._decodes_here(request) and request.max_new_tokens > 1
        if self._core.drafter is not None and continues and not request.state.is_terminal:
            self._core.drafter.expect_sequence(request.sequence)
        self._core.events.work_available.set()

    def _receives_kv(self, request: Request) -> bool:
        """Whether the request's KV comes from a peer."""
        if self._receiving is None or (request.num_produced and not request.peer):
            return False
        return self._scheduler.prefill is None or bool(request.peer_bootstrap)

    def _sends_kv(self, request: Request) -> bool:
        """Whether the request's KV goes to a peer."""
        return self._sending is not None and bool(request.peer) and not self._receives_kv(request)

    def _decodes_here(self, request: Request) -> bool:
        """Whether this node computes the request's tokens after the first."""
        return self._scheduler.decode is not None and not self._sends_kv(request)

    def _check_request(self, request: Request) -> None:
        """Raise InvalidRequestError for a request this node could never serve."""
        sends, decodes = self._sends_kv(request), self._decodes_here(request)
        # We never need the KV of the last generated token.
        needed = len(request.prompt) + (request.max_new_tokens - 1 if decodes else 0)
        memory = self._core.memory
        pool = memory.num_tokens
        check_length(request, needed, self._core.engine.context_length, pool, self._role)
        if not (sends or decodes) and request.max_new_tokens > 1:
            raise InvalidRequestError("max_tokens is above 1, which needs a decode node")
        if self._receives_kv(request) and not (request.peer and request.peer_bootstrap):
            raise InvalidRequestError("the address of the prefill node is missing")

    def _enqueue_request(self, request: Request) -> None:
        """Put a new request into its first queue."""
        if self._receiving is not None and self._receives_kv(request):
            self._receiving.accept_request(request)
            return
        request.state = RequestState.WAITING
        if self._sending is not None and self._sends_kv(request):
            self._sending.accept_request(request)
        if request.state.is_terminal:
            return
        if self._scheduler.prefill is not None:
            self._scheduler.prefill.add_request(request)
        else:
            assert self._scheduler.decode is not None
            self._scheduler.decode.add_resumed(request)

    def _on_abort(self, identity: bytes, message: Abort) -> None:
        requests = self._core.requests
        request = requests.find_request(message.room)
        if request is None:
            requests.add_tombstone(message.room)
            return
        if request.state.is_terminal:
            return
        if request.proxy != identity:
            self._dropped.log_warning(
                f"dropped an abort of room {message.room.hex()} by another proxy"
            )
            return
        if message.index is not None:
            if not 0 <= message.index < request.params.n:
                self._dropped.log_warning(
                    f"dropped an abort of choice {message.index} of {request.rid}"
                )
                return
            request.ended_choices.add(message.index)
            if self._scheduler.end_choice(request, message.index):
                return
            if len(request.ended_choices) < request.params.n:
                return
        requests.fail_request(request, AbortedError(message.reason), tell_proxy=False)

    def _on_end_prefix_lease(self, identity: bytes, message: EndPrefixLease) -> None:
        self._core.memory.prefix_leases.end_lease(message.owner, message.rid)

    def _on_take_back(self, identity: bytes, message: TakeBack) -> None:
        """Return a request to its proxy, unless its prefill has started."""
        requests = self._core.requests
        request = requests.find_request(message.room)
        taken = False
        if request is not None and request.proxy == identity:
            taken = self._scheduler.has_not_started(request)
            if taken:
                requests.fail_request(
                    request, AbortedError("its proxy took it back"), tell_proxy=False
                )
        answer = TakenBack(
            to=identity.decode(errors="replace"),
            sender=self._core.instance_id,
            room=message.room,
            taken=taken,
        )
        self._core.post(identity, answer)
