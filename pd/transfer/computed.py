"""Calls back when a forward pass has written the KV to send."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import torch

from pd.util.call_thread import CallThread

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

# A step may be under way.
_CLOSE_SECONDS = 10.0


class Computed:
    """P: calls back when the work queued on the calling thread's current stream is complete.

    We give a backend only complete KV. So ready KV never waits for a step, not even for one of
    another room. A copy that a backend has begun ends soon, even if its room is aborted or the peer
    dies. And if nothing moves, we know that the peer is at fault.

    If the stream is idle, its work is complete and we call back at once. Otherwise a thread waits
    for CUDA events in the order of their recording. Calls made at once may overtake others.

    Args:
        device: device of the pool. In host memory everything is complete.
        backend: gives the thread its name.
    """

    def __init__(self, device: torch.device, backend: str) -> None:
        self._device = device
        self._thread: CallThread | None = None
        if device.type == "cuda":
            self._thread = CallThread(f"pd-{backend}-computed")
            self._thread.post(partial(torch.cuda.set_device, device))

    def call_when_done(self, call: Callable[[str], None]) -> None:
        """Have ``call`` called when the work is complete, at once or by another thread. Does not
        wait.

        Args:
            call: gets an empty text, or the reason why the work failed.
        """
        if self._thread is None:
            call("")
            return
        try:
            stream = torch.cuda.current_stream(self._device)
            event = None
            if not stream.query():
                # A blocking event, because waiting for it costs no CPU time.
                event = torch.cuda.Event(blocking=True)
                event.record(stream)
        except RuntimeError as error:
            # After an error CUDA does nothing more for this process.
            call(str(error))
            return
        if event is None:
            call("")
        else:
            self._thread.post(partial(_call_after, event, call))

    def close(self) -> None:
        """Wait until all calls were made, but at most 10 seconds, because a GPU may hang."""
        if self._thread is not None and not self._thread.close(_CLOSE_SECONDS):
            logger.error("the forward pass did not end within %g s", _CLOSE_SECONDS)


def _call_after(event: torch.cuda.Event, call: Callable[[str], None]) -> None:
    try:
        event.synchronize()
        reason = ""
    except Exception as error:
        # After an error CUDA does nothing more for this process.
        logger.exception("the KV to send was not computed")
        reason = str(error)
    call(reason)
