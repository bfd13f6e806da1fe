"""The main loop of every node."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from pd.core.errors import NodeFailedError
from pd.core.exit import STUCK_PREFIX
from pd.scheduling.step import LaunchedStep, Work, launch

if TYPE_CHECKING:
    from pd.node.node import Node

logger = logging.getLogger(__name__)

_IDLE_WAIT = 0.05
# Steps take fractions of a second, but for kernels that are compiled in one.
STEP_LIMIT_SECONDS = 300.0


class Scheduler(threading.Thread):
    """Plans a step under the node's lock, computes it without, accounts for it under the lock.

    With overlap, the next step is planned and launched before the last one is accounted for, as
    long as the node says that it may be (:meth:`pd.node.node.Node.may_plan_ahead`): while the GPU
    computes one step the CPU is busy with its neighbours. At most two steps are launched.
    """

    def __init__(self, node: Node, *, overlap: bool) -> None:
        super().__init__(name="scheduler", daemon=True)
        self._node = node
        self._overlap = overlap
        self._launched: LaunchedStep | None = None
        # When the steps that are under way began, or the older of them.
        self._busy_since: float | None = None
        self._stopping = False
        self._broken = False

    @property
    def running(self) -> bool:
        """Requests that are queued now will be computed."""
        return self.is_alive() and not (self._stopping or self._broken)

    @property
    def broken(self) -> bool:
        """It gave up."""
        return self._broken

    def stop(self) -> None:
        """End after the present step, unless that may never end."""
        self._stopping = True
        self._node.work_available.set()
        if self.is_alive():
            self.join(timeout=1 if self._broken else 30)
            if self.is_alive():
                self.name = STUCK_PREFIX + self.name

    def run(self) -> None:
        try:
            self._node.engine.activate()
            while not (self._stopping or self._broken):
                self._step()
            if self._launched is not None:
                self._account(self._launched)
        except Exception as error:
            # The node's books are wrong and nothing here can mend them.
            logger.critical("the scheduler failed", exc_info=True)
            self._give_up(f"the scheduler failed: {error!r}")

    def check_progress(self, now: float) -> None:
        """Give up if a step has been under way for so long that it will not end. Any thread."""
        since = self._busy_since
        if since is not None and now - since > STEP_LIMIT_SECONDS and not self._broken:
            self.engine_failed(f"a step has not ended within {STEP_LIMIT_SECONDS:g} s")

    def engine_failed(self, reason: str) -> None:
        """Nothing can be computed any more. May be called from any thread, during a step too."""
        logger.critical("the engine failed: %s", reason)
        self._give_up(f"the engine failed: {reason}")

    def _give_up(self, reason: str) -> None:
        """Fail all requests; the node is not ready any more."""
        self._broken = True
        self._fail_all(NodeFailedError(reason))

    def _step(self) -> None:
        node, last = self._node, self._launched
        works: list[Work] = []
        with node.event():
            # NOTE: before the look: what comes after it is not missed.
            node.work_available.clear()
            if last is None or node.may_plan_ahead(last.works):
                works = node.plan()
        if not works and last is None:
            node.work_available.wait(_IDLE_WAIT)
            return
        began = time.monotonic()
        self._busy_since = self._busy_since or began
        self._launched = self._launch(works, last) if works else None
        if last is not None:
            self._account(last)
        self._busy_since = began if self._launched is not None else None
        if self._launched is not None and not self._overlap:
            self._account(self._launched)
            self._launched = self._busy_since = None

    def _launch(self, works: list[Work], last: LaunchedStep | None) -> LaunchedStep | None:
        node, engine = self._node, self._node.engine
        try:
            return launch(engine.runner, engine.sampler, works, node.on_layers_done(works), last)
        except Exception as error:
            logger.exception("a step failed")
            self._step_failed(works, NodeFailedError(f"the step failed: {error}"))
            return None

    def _account(self, step: LaunchedStep) -> None:
        node = self._node
        try:
            step.complete()
        except Exception as error:
            logger.exception("a step failed")
            self._step_failed(step.works, NodeFailedError(f"the step failed: {error}"))
            return
        with node.event():
            if self._broken:  # what the step left behind need not be its result
                self._forget(step.works)
            else:
                node.process(step.works)
            node.closing.look_after_step()
            node.outbox.flush()

    def _step_failed(self, works: list[Work], error: NodeFailedError) -> None:
        """Requests of a step that could not be computed fail; the node goes on."""
        # NOTE: before any page changes its owner. On a GPU that is broken this raises, and the node
        # is not ready any more.
        self._node.engine.synchronize()
        with self._node.event():
            self._forget(works)
            for work in works:
                self._node.fail(work.sequence.request, error)
            self._node.closing.look_after_step()

    @staticmethod
    def _forget(works: list[Work]) -> None:
        """A step is over, and of no use."""
        for work in works:
            if work.sequence.launched is work:
                work.sequence.launched = None

    def _fail_all(self, error: NodeFailedError) -> None:
        with self._node.event():
            for request in list(self._node.requests.values()):
                try:
                    self._node.fail(request, error)
                except Exception:  # whatever is wrong with one, the others must hear of it
                    logger.exception("cannot end room %s", request.room.hex())
