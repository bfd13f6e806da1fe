"""The transfer backends that end-to-end tests run over, in one list."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from lacking import skip_or_fail

from pd.core.errors import SetupError
from pd.transfer.registry import check_backend

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _pytest.mark import ParameterSet


@dataclass(frozen=True)
class Backend:
    """One way for KV to travel.

    Attributes:
        name: in the names of tests.
        flag: of ``--transfer-backend``.
        env: what its processes need in their environment.
        keeps: descriptors and threads that its library keeps for the next peer, at most.
    """

    name: str
    flag: str
    env: dict[str, str] = field(default_factory=dict, hash=False)
    keeps: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        return self.name

    def require(self) -> None:
        """Skip the test if this machine lacks the backend's library. In CI that is a failure."""
        why = _missing(self.flag)
        if why is not None:
            skip_or_fail(why)


@functools.cache
def _missing(flag: str) -> str | None:
    try:
        check_backend(flag)
    except SetupError as error:
        return error.message
    return None


TCP = Backend("tcp", "tcp")
FAKE = Backend("fake", "fake")
NIXL = Backend("nixl", "nixl")
# UCX reads it once for each process. Without it shared memory is used on one machine, even between
# network namespaces.
NIXL_TCP = Backend("nixl-tcp", "nixl", {"UCX_TLS": "tcp"})
# Its engines are never destroyed: a node that loses peers comes to have eight or so.
MOONCAKE = Backend("mooncake", "mooncake", keeps=(64, 24))
# Between pools on GPUs only, so it is in none of the lists: see tests/gpu.
NVLINK = Backend("nvlink", "nvlink")

IN_PROCESS = (TCP, FAKE, NIXL, MOONCAKE)
PROCESSES = (TCP, NIXL, NIXL_TCP, MOONCAKE)
ACROSS_HOSTS = (TCP, NIXL_TCP, MOONCAKE)
# By way of staging slots, into which a library may write late.
STAGED = (NIXL, NIXL_TCP, MOONCAKE)


def params(
    backends: Iterable[Backend], sample: Iterable[Backend] | None = None
) -> list[ParameterSet]:
    """For a fixture; those outside ``sample`` in ``make test-all`` only."""
    chosen = tuple(backends) if sample is None else tuple(sample)
    return [
        pytest.param(b, id=b.name, marks=() if b in chosen else pytest.mark.full) for b in backends
    ]


def over(
    backends: Iterable[Backend], sample: Iterable[Backend] | None = None
) -> pytest.MarkDecorator:
    """Run a test over each backend by its fixture ``backend``; see :func:`params`."""
    return pytest.mark.parametrize("backend", params(backends, sample), indirect=True)
