"""Processes of a proxy that are forked from one which has imported everything, for tests.

A process that ``pd-launch proxy --workers N`` starts takes most of a second of processor time to
import its modules. :func:`fork_children` has the parent of a proxy fork its processes from a server
instead, which imports them once. ``test_proxy_processes.py`` has processes of the ordinary kind.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from forked_ranks import Descriptor

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["preloaded_child"])


class ForkedChild:
    """Stands for the :class:`subprocess.Popen` of a child. It gets the constants of this process's
    proxy, which tests patch.

    Attributes:
        living: how many there are.
        ended: how many have ended, since a test began.
    """

    living = ended = 0

    def __init__(self, command: list[str], *, pass_fds: tuple[int, ...], **_: Any) -> None:
        descriptors = [Descriptor(number) for number in pass_fds]
        rest = command[-2:]  # how many there are, and the number of this one
        arguments = (descriptors, rest, _constants())
        self._process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        self._status: int | None = None
        ForkedChild.living += 1

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        if self._status is None and (status := self._process.exitcode) is not None:
            self._status = status
            ForkedChild.living -= 1
            ForkedChild.ended += 1
        return self._status

    def kill(self) -> None:
        self._process.kill()


def _constants() -> dict[str, dict[str, Any]]:
    """Numbers, and limits on connections, that modules of the proxy have as constants."""
    from pd.net.connection_limits import ConnectionLimits

    return {
        module: {
            name: value
            for name, value in vars(sys.modules[module]).items()
            if name.isupper() and isinstance(value, int | float | ConnectionLimits)
        }
        for module in sys.modules
        if module.startswith("pd.proxy.")
    }


def _serve(descriptors: list[int], rest: list[str], constants: dict[str, dict[str, Any]]) -> None:
    """Do what ``python -m pd.proxy.workers.child`` does."""
    # The server ignores modules that it cannot import: everything would just be slow.
    assert "preloaded_child" in sys.modules, "preloaded_child.py could not be imported"
    from pd.proxy.workers import child

    for module, values in constants.items():
        if module in sys.modules:
            vars(sys.modules[module]).update(values)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = ["", *map(str, descriptors), *rest]
    child.main()


def fork_children() -> Iterator[None]:
    """Body of a fixture: children of proxies are forked while it lasts."""
    with pytest.MonkeyPatch.context() as patch:
        # The server does not get this process's sys.path.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
        forkserver.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        forking = SimpleNamespace(Popen=ForkedChild, DEVNULL=subprocess.DEVNULL)
        patch.setattr("pd.proxy.workers.process.subprocess", forking)
        yield
    forkserver._forkserver._stop()  # waits, so that what it and its children took is counted
