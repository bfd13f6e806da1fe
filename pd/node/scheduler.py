"""The main loop of every node."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from pd.core.errors import NodeFailedError
from pd.node.step import execute

if TYPE_CHECKING:
    from pd.node.node import Node
    from pd.node.step import Work

logger = logging.getLogger(__name__)

_IDLE_WAIT = 0.05


class Scheduler(threading.Thread):
    """Plans a step under the node's lock, computes it without, accounts for it under the lock."""

    def __init__(self, node: Node) -> None:
        super().__init__(name="scheduler", daemon=True)
        self._node = node
        self._stopping = False
        self._broken = False

    @property
    def running(self) -> bool:
        """Requests that are queued now will be computed."""
        return self.is_alive() and not (self._stopping or self._broken)

    def stop(self) -> None:
        """End after the present step."""
        with self._node.lock:
            self._stopping = True
            self._node.work_available.notify_all()
        if self.is_alive():
            self.join(timeout=30)

    def run(self) -> None:
        try:
            while not self._stopping:
                self._step()
        except Exception as error:
            # The node's books are wrong and nothing here can mend them: it is not ready any more.
            logger.critical("the scheduler failed", exc_info=True)
            self._broken = True
            self._fail_all(NodeFailedError(f"the scheduler failed: {error!r}"))

    def _step(self) -> None:
        node = self._node
        with node.lock:
            works = node.plan()
            if not works:
                node.work_available.wait(_IDLE_WAIT)
                return
        try:
            execute(node.engine.runner, node.engine.sampler, works, node.on_layers_done(works))
        except Exception as error:
            logger.exception("a step failed")
            self._step_failed(works, NodeFailedError(f"the step failed: {error}"))
            return
        with node.lock:
            node.process(works)
            node.close_ended()
            node.outbox.flush()

    def _step_failed(self, works: list[Work], error: NodeFailedError) -> None:
        """Requests of a step that could not be computed fail; the node goes on."""
        with self._node.lock:
            for work in works:
                work.sequence.in_step = False
            for work in works:
                self._node.fail(work.sequence.request, error)

    def _fail_all(self, error: NodeFailedError) -> None:
        with self._node.lock:
            for request in list(self._node.requests.values()):
                try:
                    self._node.fail(request, error)
                except Exception:  # whatever is wrong with one, the others must hear of it
                    logger.exception("cannot end room %s", request.room.hex())
