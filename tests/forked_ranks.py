"""Workers of tensor-parallel nodes in the test process that are forked from one which has imported
everything, for tests.

A worker takes almost two seconds of processor time to import torch and pd's modules.
``engine/test_tensor_parallel_processes.py`` has workers of the ordinary kind.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

_CONTEXT = multiprocessing.get_context("forkserver")


class Descriptor:
    """A descriptor of this process, which is a number of its own in the process that gets it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _received, (DupFd(self._number),)


def _received(sent: Any) -> int:
    number: int = sent.detach()
    return number


class _ForkedRank:
    """Stands for the :class:`subprocess.Popen` of a worker."""

    def __init__(self, command: list[str], *, pass_fds: list[int], **_: Any) -> None:
        _ensure_server()
        descriptors = [Descriptor(number) for number in pass_fds]
        self._process = _CONTEXT.Process(target=_serve, args=(descriptors,), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _serve(descriptors: list[int]) -> None:
    """Run like ``python -m pd.engine.tensor_parallel.worker``."""
    from pd.engine.tensor_parallel import worker

    os.setpgid(0, 0)
    os.dup2(2, 1)
    sys.argv = ["", *map(str, descriptors)]
    worker.main()


def _ensure_server() -> None:
    """Start the process that forks workers, unless it runs."""
    import pytest  # which that process does not need

    _CONTEXT.set_forkserver_preload(["forked_ranks", "pd.engine.tensor_parallel.worker"])
    with pytest.MonkeyPatch.context() as patch:
        # The server does not get this process's sys.path.
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()


def stop_server() -> None:
    """Stop it, and wait, so that what it and its children took is counted."""
    forkserver._forkserver._stop()


def fork_ranks(patch: pytest.MonkeyPatch) -> None:
    """Fork workers as long as ``patch`` lasts, from a process that the first one starts."""
    forking = SimpleNamespace(
        Popen=_ForkedRank, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    patch.setattr("pd.engine.tensor_parallel.leader.subprocess", forking)
