"""Copies between host and device without waiting for the device, and timing of its work.

A copy from or to ordinary host memory waits until everything on the stream is done. With
page-locked memory the copy is only queued. Torch keeps page-locked memory until all copies that use
it are done.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


def to_device(values: npt.ArrayLike, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy host values to a contiguous tensor on ``device``. On a GPU the values arrive in stream
    order."""
    host = torch.as_tensor(np.asarray(values, order="C"), dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Copies of tensors on the host. The constructor queues them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if not (tensors and tensors[0].is_cuda):
            self._tensors = list(tensors)
            return
        self._tensors = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors
        ]
        for host, tensor in zip(self._tensors, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensors[0].device))

    @property
    def is_complete(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._event is None or self._event.query()

    def wait(self) -> list[torch.Tensor]:
        """Wait until the copies are complete and return them. Other threads may run meanwhile."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


class DeviceTimer:
    """Measures how long a GPU takes for the work queued between the constructor and :meth:`stop`.

    The time starts when the GPU is done with earlier work, or at once if it is idle.

    Args:
        device: on a CPU nothing is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._record_event()

    def start_part(self) -> None:
        """End the current part and start the next one."""
        self._record_event()

    def stop(self) -> None:
        """End the measurement."""
        self._record_event()

    def _record_event(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)

    @property
    def has_measured(self) -> bool:
        """Whether you may call :meth:`read_seconds` and :meth:`read_parts` after :meth:`stop`."""
        return bool(self._events)

    def read_seconds(self) -> float:
        """Wait for the end and return the time in seconds."""
        begin, *_, end = self._events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def read_parts(self) -> list[float]:
        """Wait for the end and return the time of each part in seconds. They add up to the whole
        time."""
        self._events[-1].synchronize()
        pairs = itertools.pairwise(self._events)
        return [float(begin.elapsed_time(end)) / 1e3 for begin, end in pairs]
