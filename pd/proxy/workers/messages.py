"""Messages between the parent and the children of a proxy of several processes."""

from __future__ import annotations

import msgspec

from pd.proxy.config import ProxyConfig
from pd.proxy.workers.actions import Action, Outcome

# ---- parent to child


class StartChild(msgspec.Struct, tag=True):
    """The first message. ``config`` contains the current nodes.

    Attributes:
        address: IP address and number of the common port.
        log_level: log level of the parent.
        began: when the parent started, on the monotonic clock.
    """

    config: ProxyConfig
    address: tuple[str, int]
    log_level: int
    began: float


class Perform(msgspec.Struct, tag=True):
    """Perform the action and reply with an :class:`pd.proxy.workers.actions.Outcome`."""

    action: Action


class RequestStop(msgspec.Struct, tag=True):
    """Drain and end; the second time end at once."""


ToChild = StartChild | Perform | RequestStop


# ---- child to parent


class Started(msgspec.Struct, tag=True):
    """The child serves, with the nodes it has met so far."""

    instance_id: str


class StartFailed(msgspec.Struct, tag=True):
    """The child cannot start, for a reason a person can fix."""

    message: str
    exit_status: int


class PerformEverywhere(msgspec.Struct, tag=True):
    """Let all children perform the action. The reply is a list of
    :class:`pd.proxy.workers.actions.Outcome`, ours first."""

    action: Action


class ClaimRids(msgspec.Struct, tag=True):
    """Claim the rids of an owner's next request. The reply is the first rid held by another child,
    or None if the child now has all of them."""

    owner: str
    rids: list[str]


class ReleaseRids(msgspec.Struct, tag=True):
    """Release rids no longer needed by the child."""

    owner: str
    rids: list[str]


ToParent = Started | StartFailed | PerformEverywhere | ClaimRids | ReleaseRids

# We build the decoders here, while there is only one thread.
TO_CHILD: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
TO_PARENT: msgspec.msgpack.Decoder[ToParent] = msgspec.msgpack.Decoder(ToParent)
OUTCOME = msgspec.msgpack.Decoder(Outcome)
OUTCOMES = msgspec.msgpack.Decoder(list[Outcome])
# The rid in use, if any.
TAKEN: msgspec.msgpack.Decoder[str | None] = msgspec.msgpack.Decoder(str | None)
