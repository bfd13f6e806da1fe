"""The event loop of a proxy's process: uvloop's where it is installed, else asyncio's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


def new_loop() -> asyncio.AbstractEventLoop:
    """A new event loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def run_loop(main: Coroutine[object, object, T]) -> T:
    """Run the main coroutine of a process."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)
