"""Calls back when a forward pass has written the KV that is to be sent."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Any

import torch

from pd.core.exit import STUCK_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

# A step may be under way.
_CLOSE_SECONDS = 10.0


class Computed:
    """P: calls back when the work queued on the calling thread's current stream is complete.

    A backend is given only complete KV. So KV that is ready never waits behind a step, not even one
    of another room; a copy that a backend has begun ends soon, also when its room is aborted or the
    peer dies; and if nothing moves, the peer is at fault.

    If the stream is idle, its work is complete and the call is made at once. Otherwise a thread
    waits for CUDA events, in the order in which they were recorded. Calls made at once may overtake
    others.

    Args:
        device: of the pool; in host memory everything is complete.
        backend: gives the thread its name.
    """

    def __init__(self, device: torch.device, backend: str) -> None:
        self._device = device
        self._marks: queue.SimpleQueue[tuple[Any, Callable[[str], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            name = f"pd-{backend}-computed"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def then(self, call: Callable[[str], None]) -> None:
        """Have ``call`` called, at once or by another thread, when the work is complete: with an
        empty text, or with the reason why it failed. Does not wait."""
        if self._thread is None:
            call("")
            return
        try:
            stream = torch.cuda.current_stream(self._device)
            event = None
            if not stream.query():
                # A blocking event: waiting for it takes no processor time.
                event = torch.cuda.Event(blocking=True)
                event.record(stream)
        except RuntimeError as error:
            # After an error CUDA does nothing more for this process.
            call(str(error))
            return
        if event is None:
            call("")
        else:
            self._marks.put((event, call))

    def close(self) -> None:
        """Wait until all calls were made, for 10 seconds at most: a GPU may hang."""
        if self._thread is None:
            return
        self._marks.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.error("the forward pass did not end within %g s", _CLOSE_SECONDS)
            self._thread.name = STUCK_PREFIX + self._thread.name

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while (mark := self._marks.get()) is not None:
            event, call = mark
            try:
                event.synchronize()
                reason = ""
            except Exception as error:
                logger.exception("the KV to be sent was not computed")
                reason = str(error)
            try:
                call(reason)
            except Exception:
                logger.exception("KV that was computed cannot be sent")
            # The call holds memory, and the next one may come much later.
            del mark, event, call
