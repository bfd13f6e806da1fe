"""Copies between host and device that do not wait for the device, and how long its work takes.

A copy from or to ordinary host memory waits until everything queued on the stream is done; one that
uses page-locked memory is only queued. Torch keeps page-locked memory until the copies that use it
are over.
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
    """Make a contiguous tensor of host values on ``device``; on a GPU its content arrives in stream
    order."""
    host = torch.as_tensor(np.asarray(values, order="C"), dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Copies of tensors to the host; the constructor queues them."""

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
        """Wait until the copies are complete and return them; other threads may run meanwhile."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


class DeviceTimer:
    """Measures how long a GPU works on what is queued on the current stream between the constructor
    and :meth:`stop`; from when it is idle, or else done with what was queued before.

    Args:
        device: on a CPU nothing is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._mark()

    def split(self) -> None:
        """End a part of what is measured; the next begins."""
        self._mark()

    def stop(self) -> None:
        """End what is measured."""
        self._mark()

    def _mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)

    @property
    def measures(self) -> bool:
        """Whether :meth:`seconds` and :meth:`parts` may be called after :meth:`stop`."""
        return bool(self._events)

    def seconds(self) -> float:
        """Wait for the end, and return the time."""
        begin, *_, end = self._events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def parts(self) -> list[float]:
        """Wait for the end, and return the time of each part; they add up to all of it."""
        self._events[-1].synchronize()
        pairs = itertools.pairwise(self._events)
        return [float(begin.elapsed_time(end)) / 1e3 for begin, end in pairs]
