"""Events that the node pool emits to its one listener, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pd.core.messages import AnyMessage
    from pd.proxy.nodes.node_handle import NodeHandle


class MessageReceived(NamedTuple):
    """A node sent a message other than a heartbeat."""

    node: NodeHandle
    message: AnyMessage


class MessagesRead(NamedTuple):
    """We emitted all messages that had arrived on a socket. The listener can now do their common
    work once."""


class NodeLost(NamedTuple):
    """Everything sent to an instance of a node is lost.

    Attributes:
        died: the process seems to have ended or to hang, and nobody asked it to end.
    """

    node: NodeHandle
    reason: str
    died: bool


class HeartbeatReceived(NamedTuple):
    """A node reported its state."""

    node: NodeHandle


class NodesChanged(NamedTuple):
    """A node became ready or unready."""


NodeEvent = MessageReceived | MessagesRead | NodeLost | HeartbeatReceived | NodesChanged
