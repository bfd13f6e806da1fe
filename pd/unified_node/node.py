"""The unified node: prefill chunks and the decode batch in one forward pass over one pool.

This node is the baseline with which a pair of a prefill and a decode node is compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.node.node import Node
from pd.scheduling.combined import CombinedScheduler
from pd.scheduling.decode import DecodeScheduler
from pd.scheduling.prefill import PrefillScheduler
from pd.scheduling.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from pd.core.node_info import NodeInfo
    from pd.core.request import Request
    from pd.node.control import ControlThread
    from pd.scheduling.core import NodeCore


def unified_node(core: NodeCore, own: NodeInfo, control: ControlThread) -> Node:
    """A node with both schedulers and no hand-offs; queues: waiting → prefill → running (→
    retracted → running)."""
    memory = core.memory
    decode = DecodeScheduler(core)

    def headroom(request: Request) -> int:
        if decode.needs_memory:
            return memory.num_pages
        return decode.headroom(request.sequence, [r.sequence for r in prefill.running])

    prefill = PrefillScheduler(
        core.engine, memory, WaitingQueue.of(core.config, memory.radix), headroom=headroom
    )
    return Node(core, own, control, CombinedScheduler(core, prefill, decode))
