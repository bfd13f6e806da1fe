"""Messages between the parent and the children of a proxy of several processes."""

from __future__ import annotations

import msgspec

from pd.proxy.actions import Action, Outcome
from pd.proxy.config import ProxyConfig

# ---- parent to child


class StartChild(msgspec.Struct, tag=True):
    """The first message. ``config`` has the nodes that are in use now.

    Attributes:
        address: IP address and number of the common port.
        log_level: of the parent's logger.
        began: when the parent started, on the monotonic clock.
    """

    config: ProxyConfig
    address: tuple[str, int]
    log_level: int
    began: float


class Perform(msgspec.Struct, tag=True):
    """The child performs the action and replies with an :class:`pd.proxy.actions.Outcome`."""

    action: Action


class RequestStop(msgspec.Struct, tag=True):
    """The child drains and ends; a second one ends it at once."""


ToChild = StartChild | Perform | RequestStop


# ---- child to parent


class Started(msgspec.Struct, tag=True):
    """The child serves, with the nodes that it has met so far."""

    instance_id: str


class StartFailed(msgspec.Struct, tag=True):
    """The child cannot start, for a reason that a person can mend."""

    message: str
    exit_status: int


class PerformEverywhere(msgspec.Struct, tag=True):
    """All children perform the action. The reply is a list of their
    :class:`pd.proxy.actions.Outcome`, the asking child's first."""

    action: Action


class ClaimRids(msgspec.Struct, tag=True):
    """Names of an owner's request that is about to begin. The reply is the first of them that
    another child has in use, or None if all are the child's now."""

    owner: str
    rids: list[str]


class ReleaseRids(msgspec.Struct, tag=True):
    """Names that the child claimed and needs no more."""

    owner: str
    rids: list[str]


ToParent = Started | StartFailed | PerformEverywhere | ClaimRids | ReleaseRids

# Types are learned here, where one thread runs.
TO_CHILD: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
TO_PARENT: msgspec.msgpack.Decoder[ToParent] = msgspec.msgpack.Decoder(ToParent)
OUTCOME = msgspec.msgpack.Decoder(Outcome)
OUTCOMES = msgspec.msgpack.Decoder(list[Outcome])
# The name that is in use already, if any is.
TAKEN: msgspec.msgpack.Decoder[str | None] = msgspec.msgpack.Decoder(str | None)
