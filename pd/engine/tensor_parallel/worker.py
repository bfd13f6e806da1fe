"""``python -m pd.engine.tensor_parallel.worker FD FD``: a rank that computes the steps that rank 0
sends.

The descriptors belong to the connection to rank 0 and to a file for the KV pool of a CPU. The
process ends at once when rank 0 ends. It ignores the signals that a terminal or a service manager
sends to all processes, because rank 0 drains first.
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

from pd.core.children import ignore_ending_signals
from pd.core.config import NodeConfig
from pd.core.errors import PDError
from pd.core.garbage import freeze_objects
from pd.engine.engine import Engine, rank_device
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
    unpacked,
)
from pd.kernels.cuda_ipc import CudaIpc

if TYPE_CHECKING:
    from typing import Any

logger = logging.getLogger(__name__)


def main() -> NoReturn:
    """Serve until rank 0 is gone or something fails."""
    faulthandler.enable()
    ignore_ending_signals()
    channel = RankChannel(socket.socket(fileno=int(sys.argv[1])))
    threading.Thread(
        target=_exit_on_close, args=(channel.socket,), name="tp-exit", daemon=True
    ).start()
    reason = ""
    try:
        _serve(channel)
    except EOFError:
        pass
    except PDError as error:
        reason = error.message
    except Exception as error:  # rank 0 gets the reason of any failure
        logger.exception("a tensor-parallel worker failed")
        reason = repr(error)
    if reason:
        with contextlib.suppress(OSError):
            channel.send(RankFailed(reason))
    # NOTE: not ``sys.exit``, during which CUDA would wait for kernels that wait for other ranks.
    os._exit(1 if reason else 0)


def _exit_on_close(connection: socket.socket) -> None:
    """End the process when the other end of the connection is closed."""
    poll = select.poll()
    poll.register(connection, 0)  # the end of the connection is reported without being asked for
    poll.poll()
    os._exit(0)


def _serve(channel: RankChannel) -> None:
    start = channel.receive()
    assert isinstance(start, StartWorker)
    logging.basicConfig(
        stream=sys.stderr,
        level=max(start.log_level, logging.WARNING),  # rank 0 logs the same at lower levels
        format=f"%(asctime)s %(levelname)s rank {start.rank} %(name)s: %(message)s",
    )
    torch.set_num_threads(start.threads)
    config = _config(start.settings)
    device = rank_device(config, start.rank)
    channel.send(Joining())
    group = ProcessGroup(start.rank, start.size, start.rendezvous, device)
    shared_memory = int(sys.argv[2]) if device.type == "cpu" else None
    engine = Engine.build_rank(
        config,
        group,
        lambda pages: _agree(channel, pages),
        shared_memory,
        extra_planes=start.extra_planes,
    )
    handle, offset = b"", 0
    if device.type == "cuda" and config.hands_off:
        handle, offset = CudaIpc(device.index).export(engine.pool.memory.data_ptr())
    channel.send(Built(handle, offset))
    saved: dict[int, list[torch.Tensor]] = {}
    freeze_objects()
    while True:
        message = channel.receive()
        if isinstance(message, ForwardStep):
            _compute(engine, group, device, message)
        elif isinstance(message, MoveTokens):
            slots = torch.empty(2, message.count, dtype=torch.int64, device=device)
            group.broadcast(slots)
            engine.runner.move_tokens(slots[0], slots[1])
        elif isinstance(message, SavePages):
            saved[message.key] = engine.pool.gather_pages(unpacked(message.pages))
        elif isinstance(message, RestorePages):
            copies = [host[:, :, message.first :] for host in saved[message.key]]
            engine.pool.scatter_pages(unpacked(message.pages), copies)
        else:
            assert isinstance(message, ForgetPages)
            del saved[message.key]


def _config(settings: dict[str, object]) -> NodeConfig:
    """Make a configuration of what rank 0 sent: paths and tuples travel as strings and lists."""
    restored: dict[str, Any] = dict(settings)  # fields of many types
    for name in ("model", "speculative_draft_model"):
        restored[name] = None if restored[name] is None else Path(restored[name])
    sizes = restored["cuda_graph_batch_sizes"]
    restored["cuda_graph_batch_sizes"] = None if sizes is None else tuple(sizes)
    return NodeConfig(**restored)


def _agree(channel: RankChannel, num_pages: int) -> int:
    channel.send(PageCapacity(num_pages))
    agreed = channel.receive()
    assert isinstance(agreed, PageCapacity)
    return agreed.num_pages


@torch.inference_mode()
def _compute(engine: Engine, group: ProcessGroup, device: torch.device, step: ForwardStep) -> None:
    previous = None
    if step.num_previous:
        previous = torch.empty(step.num_previous, dtype=torch.int64, device=device)
        group.broadcast(previous)
    engine.runner.forward(step.items(), None, previous)


if __name__ == "__main__":
    main()
