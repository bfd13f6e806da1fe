"""From a proxy's message to a request that waits in the right queue, or is refused."""

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
from pd.core.messages import Abort, Generate, GenerateTogether, TakeBack, TakenBack
from pd.core.request import RequestState
from pd.core.seldom import Seldom
from pd.core.work_queue import WorkQueue
from pd.node.validation import check_length, request_from
from pd.scheduling.resumed import restore_sampling

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.node_info import Role
    from pd.core.request import Request
    from pd.grammar.grammars import MakeRules
    from pd.node.proxies import Proxies
    from pd.scheduling.combined import CombinedScheduler
    from pd.scheduling.core import NodeCore
    from pd.scheduling.handlers import Handlers
    from pd.scheduling.transfer_end import PromptReceiver, PromptSender

logger = logging.getLogger(__name__)


class Intake:
    """Handles messages about requests of proxies. The caller holds the node's lock, in an event.

    The request and the parts of the node decide where a request begins. One that names a registry
    receives its KV from a peer, where there is a receiving end. Any other is computed here; if it
    names a peer, its KV is sent there, where there is a sending end. A decode node computes resumed
    requests alone.

    Args:
        ready: whether the node accepts requests.

    Attributes:
        compiling: requests that wait for their grammar.
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
        # One at a time: a grammar may take seconds for a long output, which the node's lock must
        # not be held for.
        self._replays = WorkQueue("grammar-replay", 1, self._replay)
        self._dropped = Seldom(logger)

    def register(self, handlers: Handlers) -> None:
        """Register the handlers of messages from proxies."""
        handlers.on(Generate, self._on_generate)
        handlers.on(GenerateTogether, self._on_generate_together)
        handlers.on(Abort, self._on_abort)
        handlers.on(TakeBack, self._on_take_back)

    def _on_generate(self, identity: bytes, message: Generate) -> None:
        rooms = self._core.rooms
        self._proxies.renew(identity)
        if rooms.has_tombstone(message.room):
            return
        existing = rooms.get(message.room)
        if existing is not None:
            self._dropped.warn(f"dropped a duplicate of room {message.room.hex()}")
            if existing.proxy != identity:
                error = InvalidRequestError(f"room {message.room.hex()} is in use")
                rooms.outputs.failed(identity, message.room, error)
            return
        try:
            if not self._ready():
                name = f"{self._role} node {self._core.instance_id}"
                raise RefusedError(f"{name} takes no requests")
            request = request_from(message, identity, self._core.engine.model_config.vocab_size)
            self._check(request)
        except PDError as error:
            rooms.outputs.failed(identity, message.room, error)
            return
        rooms.add(request)
        if request.params.grammar is None:
            self._admit(request)
            return
        request.state = RequestState.COMPILING
        self.compiling.append(request)
        done = partial(self._compiled, request)
        self._core.grammars.want(request.params.grammar, done, request.owner)

    def _on_generate_together(self, identity: bytes, message: GenerateTogether) -> None:
        for request in message.requests:
            self._on_generate(identity, request)

    def _compiled(self, request: Request, found: MakeRules | PDError) -> None:
        """A request has its rules, or cannot have any. Any thread."""
        if isinstance(found, PDError) or not request.num_produced:
            self._ruled(request, found)
            return
        request.make_rules = found
        try:
            self._replays.put(request)
        except UnavailableError as error:
            logger.warning("the output so far of %s cannot be replayed: %s", request.rid, error)
            self._ruled(request, error)

    def _replay(self, request: Request) -> None:
        """Have a grammar follow the output of a resumed request."""
        if request.state.terminal:
            return
        assert request.make_rules is not None
        found: MakeRules | PDError = request.make_rules
        try:
            self._restore(request)
        except PDError as error:
            found = error
        except Exception as error:
            # Whatever a grammar's library raises: the request must not wait for ever.
            logger.exception("an output could not be replayed")
            found = NodeFailedError(f"the output so far could not be replayed: {error}")
        self._ruled(request, found)

    def _restore(self, request: Request) -> None:
        """Raises PDError."""
        model = self._core.engine.model_config
        restore_sampling(request, model.eos_token_ids, model.vocab_size)

    def _ruled(self, request: Request, found: MakeRules | PDError) -> None:
        with self._core.events.event():
            if request.state.terminal:
                return
            self.compiling.remove(request)
            if isinstance(found, PDError):
                self._core.rooms.fail(request, found)
                return
            request.make_rules = found
            # Peers may take as long again as for a request that has just come.
            request.times.arrived = time.monotonic()
            self._admit(request)

    def ended(self, request: Request) -> None:
        """Forget a request that was marked as ended."""
        if request in self.compiling:
            self.compiling.remove(request)

    def close(self) -> None:
        """Replay no more outputs: every request has ended."""
        self._replays.close()

    def _admit(self, request: Request) -> None:
        """Queue a request that lacks nothing but its turn."""
        if request.resumed is None:
            try:
                self._restore(request)
            except PDError as error:
                self._core.rooms.fail(request, error)
                return
        self._accept(request)
        continues = self._decodes(request) and request.max_new_tokens > 1
        if self._core.drafter is not None and continues and not request.state.terminal:
            self._core.drafter.expect(request.sequence)
        self._core.events.work_available.set()

    def _receives(self, request: Request) -> bool:
        """Whether the request's KV comes from a peer."""
        if self._receiving is None or (request.num_produced and not request.peer):
            return False
        return self._scheduler.prefill is None or bool(request.peer_bootstrap)

    def _sends(self, request: Request) -> bool:
        """Whether the request's KV goes to a peer."""
        return self._sending is not None and bool(request.peer) and not self._receives(request)

    def _decodes(self, request: Request) -> bool:
        """Whether the request's tokens after the first are computed here."""
        return self._scheduler.decode is not None and not self._sends(request)

    def _check(self, request: Request) -> None:
        """Raise InvalidRequestError for a request that could never be served here."""
        sends, decodes = self._sends(request), self._decodes(request)
        # The last token is generated, but its KV is never needed.
        needed = len(request.prompt) + (request.max_new_tokens - 1 if decodes else 0)
        memory = self._core.memory
        pool = memory.num_pages * memory.page_size
        check_length(request, needed, self._core.engine.context_length, pool, self._role)
        if not (sends or decodes) and request.max_new_tokens > 1:
            raise InvalidRequestError("more than one token needs a decode node")
        if self._receives(request) and not (request.peer and request.peer_bootstrap):
            raise InvalidRequestError("a decode node needs the prefill node's address")

    def _accept(self, request: Request) -> None:
        """Queue a new request."""
        if self._receiving is not None and self._receives(request):
            self._receiving.accept(request)
            return
        request.state = RequestState.WAITING
        if self._sending is not None and self._sends(request):
            self._sending.accept(request)
        if request.state.terminal:
            return
        if self._scheduler.prefill is not None:
            self._scheduler.prefill.add(request)
        else:
            assert self._scheduler.decode is not None
            self._scheduler.decode.resume(request)

    def _on_abort(self, identity: bytes, message: Abort) -> None:
        rooms = self._core.rooms
        request = rooms.get(message.room)
        if request is None:
            rooms.add_tombstone(message.room)
            return
        if request.state.terminal:
            return
        if request.proxy != identity:
            self._dropped.warn(f"dropped an abort of room {message.room.hex()} by another proxy")
            return
        if message.index is not None:
            if not 0 <= message.index < request.params.n:
                self._dropped.warn(f"dropped an abort of choice {message.index} of {request.rid}")
                return
            request.ended_choices.add(message.index)
            if self._scheduler.end_choice(request, message.index):
                return
            if len(request.ended_choices) < request.params.n:
                return
        rooms.fail(request, AbortedError(message.reason), tell_proxy=False)

    def _on_take_back(self, identity: bytes, message: TakeBack) -> None:
        """Give a request back to its proxy, unless its prompt is begun."""
        rooms = self._core.rooms
        request = rooms.get(message.room)
        taken = False
        if request is not None and request.proxy == identity:
            taken = self._scheduler.has_not_begun(request)
            if taken:
                rooms.fail(request, AbortedError("its proxy took it back"), tell_proxy=False)
        answer = TakenBack(
            to=identity.decode(errors="replace"),
            sender=self._core.instance_id,
            room=message.room,
            taken=taken,
        )
        self._core.post(identity, answer)
