"""The proxy's event loop is uvloop's where that is installed, and asyncio's elsewhere."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

from pd.proxy.workers.loop import new_loop, run_loop

if TYPE_CHECKING:
    import pytest


class OtherLoop(asyncio.SelectorEventLoop):
    """In place of uvloop's, which need not be installed here."""


async def running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_without_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = new_loop()
    assert type(loop) is type(asyncio.new_event_loop())
    loop.close()


def test_with_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = SimpleNamespace(new_event_loop=OtherLoop)
    monkeypatch.setitem(sys.modules, "uvloop", stand_in)  # type: ignore[arg-type]
    assert isinstance(run_loop(running_loop()), OtherLoop)
