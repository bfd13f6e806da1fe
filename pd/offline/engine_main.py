"""``python -m pd.offline.engine_main``: the engine process of a program.

It is a unified node without ports. See :mod:`pd.offline.engine_protocol` for its orders.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import selectors
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pd.core.errors import PDError
from pd.offline.engine_protocol import (
    CacheFlushed,
    EndEngine,
    EngineRefused,
    EngineStarted,
    FlushCache,
    StartEngine,
    order_decoder,
)
from pd.util.exit import exit_now, exit_within
from pd.util.logs import configure_logging

if TYPE_CHECKING:
    from typing import TextIO

    from pd.core.config import NodeConfig
    from pd.node.node import Node
    from pd.offline.engine_protocol import Report

logger = logging.getLogger(__name__)

# How often we check that the node can compute and that the program lives. Its end usually shows at
# once, because it closes our input.
_CHECK_SECONDS = 1.0
_END_SECONDS = 20.0


class Program:
    """The program at the other end of our standard input and output."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        # Libraries may print, so only we have the real standard output.
        self._output: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._input = sys.stdin.fileno()
        self._received = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._input, selectors.EVENT_READ)

    @property
    def is_gone(self) -> bool:
        """Whether the program ended, even if a child of it still holds our input open."""
        return os.getppid() != self._parent

    def send_report(self, report: Report) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, as our input shows
            self._output.write(msgspec.json.encode(report).decode() + "\n")
            self._output.flush()

    def end_with(self, is_serving: threading.Event) -> None:
        """End this process if the program ends while we load the model, which may take minutes.

        Runs on a thread of its own.
        """
        poller = select.poll()
        poller.register(self._input, 0)  # only for the hang-up, because we leave the input alone
        poller.poll()
        if not is_serving.is_set():
            os._exit(1)

    def read_line(self) -> bytes | None:
        """Return the next line, or None if none came for a while. Raises EOFError at the end."""
        while b"\n" not in self._received:
            if not self._selector.select(_CHECK_SECONDS):
                return None
            data = os.read(self._input, 1 << 16)
            if not data:
                raise EOFError
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return bytes(line)


def read_start(program: Program) -> StartEngine | None:
    """Wait for the first order. Returns None if the program has ended without one."""
    line = None
    while line is None:
        try:
            line = program.read_line()
        except EOFError:
            return None
    order = order_decoder.decode(line)
    assert isinstance(order, StartEngine)
    return order


def start_node(config: NodeConfig, cpu_threads: int | None) -> Node:
    """Load the model and start the node. Raises PDError."""
    from pd.launch import check_early, limit_threads

    check_early(config)
    limit_threads(config.role, cpu_threads)
    from pd.assembly import assemble_node

    node = assemble_node(config, f"engine-{os.getpid()}", "").node
    node.start()
    return node


def follow_orders(program: Program, node: Node) -> None:
    """Serve until the program ends or says so, or the node breaks."""
    while not node.broken and not program.is_gone:
        try:
            line = program.read_line()
        except EOFError:
            return
        if line is not None:
            order = order_decoder.decode(line)
            if isinstance(order, EndEngine):
                return
            assert isinstance(order, FlushCache)
            node.flush_cache()
            program.send_report(CacheFlushed())


def main() -> int:
    # The program decides when we end, also after Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    program = Program()
    order = read_start(program)
    if order is None:
        return 0
    configure_logging(logging.getLevelNamesMapping()[order.log_level.upper()], "engine")
    is_serving = threading.Event()
    threading.Thread(
        target=program.end_with, args=(is_serving,), name="program-watch", daemon=True
    ).start()
    config: NodeConfig = pickle.loads(order.config)
    try:
        node = start_node(config, order.cpu_threads)
    except PDError as error:
        program.send_report(EngineRefused(type(error).__name__, error.message))
        return error.exit_status
    is_serving.set()
    program.send_report(EngineStarted(node.server_info()))
    follow_orders(program, node)
    status = 1 if node.broken else 0
    if node.broken:
        logger.critical("the node cannot compute any more, so the engine ends")
    exit_within(_END_SECONDS, 1)
    node.stop()
    node.engine.close()
    # The program removes it, too, unless it was killed.
    shutil.rmtree(Path(config.message_endpoint.removeprefix("ipc://")).parent, ignore_errors=True)
    return status


if __name__ == "__main__":
    exit_now(main())
