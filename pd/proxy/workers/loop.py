"""The event loop of a proxy process: uvloop if it is installed, otherwise asyncio.

All clients wait for it, so nothing else in the process may hold it up for long.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

# A thread tokenizing or parsing returns the interpreter to the loop after this time. The default is
# ten times as long, and large bodies would delay every stream by several such turns.
SWITCH_SECONDS = 0.0005


def new_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def run_loop(main: Coroutine[object, object, T]) -> T:
    """Run the main coroutine of a process."""
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)
