"""``python -m pd.engine.tensor_parallel.worker FD FD``: a rank that computes the steps sent by rank
0.

The descriptors are the connection to rank 0 and a file for the KV pool of a CPU. The process ends
as soon as rank 0 ends. It ignores the signals that a terminal or a service manager sends to all
processes, because rank 0 drains first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from pd.core.config import NodeConfig
from pd.core.errors import PDError
from pd.engine.engine import Engine, find_rank_device
from pd.engine.tensor_parallel.group import ProcessGroup
from pd.engine.tensor_parallel.messages import (
    Built,
    ForgetPages,
    ForwardStep,
    Joining,
    MoveTokens,
    PageCapacity,
    RankChannel,
    RankFailed,
    RestorePages,
    SavePages,
    StartWorker,
)
from pd.kernels.cuda_ipc import CudaIpc
from pd.util.children import ignore_ending_signals
from pd.util.garbage import freeze_objects
from pd.util.logs import configure_logging
from pd.util.output import wait_for_output, write_without_waiting

if TYPE_CHECKING:
    from typing import Any

logger = logging.getLogger(__name__)


def main() -> NoReturn:
    """Serve until rank 0 ends or something fails."""
    faulthandler.enable()
    write_without_waiting("stdout", "stderr")
    ignore_ending_signals()
    channel = RankChannel(socket.socket(fileno=int(sys.argv[1])))
    threading.Thread(
        target=_exit_on_close, args=(channel.socket,), name="tp-exit", daemon=True
    ).start()
    reason = ""
    try:
        _serve_steps(channel)
    except EOFError:
        pass
    except PDError as error:
        reason = error.message
    except Exception as error:  # rank 0 gets the reason of any failure
        logger.exception("a tensor-parallel worker failed")
        reason = repr(error)
    if reason:
        with contextlib.suppress(OSError):
            channel.send_message(RankFailed(reason))
    # NOTE: not ``sys.exit``, because CUDA would then wait for kernels that wait for other ranks.
    wait_for_output()
    os._exit(1 if reason else 0)


def _exit_on_close(connection: socket.socket) -> None:
    """End the process when the other end of the connection closes."""
    poll = select.poll()
    poll.register(connection, 0)  # the end of the connection is reported without being asked for
    poll.poll()
    wait_for_output()
    os._exit(0)


def _serve_steps(channel: RankChannel) -> None:
    start = channel.receive_message()
    assert isinstance(start, StartWorker)
    # Rank 0 logs the same messages, so we keep only warnings.
    configure_logging(max(start.log_level, logging.WARNING), f"rank {start.rank}")
    torch.set_num_threads(start.threads)
    config = _restore_config(start.settings)
    device = find_rank_device(config, start.rank)
    channel.send_message(Joining())
    group = ProcessGroup(start.rank, start.size, start.rendezvous, device)
    shared_memory = int(sys.argv[2]) if device.type == "cpu" else None
    engine = Engine.build_rank(
        config,
        group,
        lambda pages: _agree_on_pages(channel, pages),
        shared_memory,
        extra_planes=start.extra_planes,
    )
    handle, offset = b"", 0
    if device.type == "cuda" and config.hands_off:
        handle, offset = CudaIpc(device.index).export_memory(engine.pool.memory.data_ptr())
    channel.send_message(Built(handle, offset))
    saved: dict[int, list[torch.Tensor]] = {}
    freeze_objects()
    while True:
        message = channel.receive_message()
        if isinstance(message, ForwardStep):
            _compute_step(engine, group, device, message)
        elif isinstance(message, MoveTokens):
            shape = 2, message.tables, message.count
            slots = torch.empty(shape, dtype=torch.int64, device=device)
            group.broadcast(slots)
            engine.runner.move_tokens(slots[0], slots[1])
        elif isinstance(message, SavePages):
            saved[message.key] = engine.pool.gather_pages(message.pages.unpack_tables())
        elif isinstance(message, RestorePages):
            engine.pool.scatter_pages(message.pages.unpack_tables(), saved[message.key])
        else:
            assert isinstance(message, ForgetPages)
            del saved[message.key]


def _restore_config(settings: dict[str, object]) -> NodeConfig:
    """Rebuild the configuration that rank 0 sent. Paths and tuples arrive as strings and lists."""
    restored: dict[str, Any] = dict(settings)  # fields of many types
    for name in ("model", "speculative_draft_model"):
        restored[name] = None if restored[name] is None else Path(restored[name])
    sizes = restored["cuda_graph_batch_sizes"]
    restored["cuda_graph_batch_sizes"] = None if sizes is None else tuple(sizes)
    return NodeConfig(**restored)


def _agree_on_pages(channel: RankChannel, num_pages: int) -> int:
    channel.send_message(PageCapacity(num_pages))
    agreed = channel.receive_message()
    assert isinstance(agreed, PageCapacity)
    return agreed.num_pages


@torch.inference_mode()
def _compute_step(
    engine: Engine, group: ProcessGroup, device: torch.device, step: ForwardStep
) -> None:
    previous = None
    if step.num_previous:
        previous = torch.empty(step.num_previous, dtype=torch.int64, device=device)
        group.broadcast(previous)
    engine.runner.forward(step.unpack_items(), None, previous)


if __name__ == "__main__":
    main()
