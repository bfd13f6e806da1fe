"""Messages between the operator and the control service: bounded JSON, never pickled objects.

Each end distrusts the other. Decoding fails if a name, a text or a number is out of bounds.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_MESSAGE_BYTES, MAX_PART_BYTES, MAX_PROCESSES = 4 << 20, 256 << 10, 512
# ``\Z``, because ``$`` lets a line break pass.
Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9_-]{0,79}\Z")]
Url = Annotated[str, Meta(max_length=300)]
Text = Annotated[str, Meta(max_length=2000)]
Role = Literal["prefill", "decode", "unified", "proxy", "load"]
Source = Literal["log", "output", "/metrics", "/server_info"]
NODE_ROLES = ("prefill", "decode", "unified")


class OrderPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A part of a message."""


class Selector(OrderPart, frozen=True):
    """Ray nodes: by address, host name or Ray node name, and by labels; all if both are empty."""

    node: str = ""
    labels: dict[str, str] = {}


class Process(OrderPart, frozen=True):
    """A process to keep running.

    Attributes:
        arguments: of ``pd-launch ROLE`` (of ``python -m`` for load); the host adds its own.
        gpus: GPUs to reserve; a fraction shares one.
        listen: address to listen on; empty for the Ray node's.
        port, bootstrap_port: 0 picks a free one.
        environment: added to the host's. It may hold secrets.
        directory: working directory; empty for the raylet's.
        grace: seconds for draining.
    """

    name: Name
    layout: str
    role: Role
    arguments: list[str]
    host: Selector = Selector()
    gpus: Annotated[float, Meta(ge=0, le=64)] = 0
    listen: str = ""
    port: int = 0
    bootstrap_port: int = 0
    environment: dict[str, str] = {}
    directory: str = ""
    grace: float = 35.0


class ProcessState(msgspec.Struct):
    """The state of a process.

    Attributes:
        state: ``waiting`` for the next start after a failure; ``lost`` with its host.
        detail: the reason, for people; for a ready proxy, why it does not serve.
        address: current or last host.
        uses: URLs of the nodes in use by a proxy.
    """

    name: Name
    layout: Annotated[str, Meta(max_length=80)]
    role: Role
    state: Literal[
        "placing", "starting", "ready", "waiting", "failed", "draining", "lost", "ended"
    ] = "placing"
    detail: Text = ""
    address: Annotated[str, Meta(max_length=100)] = ""
    url: Url = ""
    pid: int = 0
    restarts: int = 0
    uses: Annotated[list[Url], Meta(max_length=MAX_PROCESSES)] = []


class Apply(OrderPart, tag="apply", frozen=True):
    """Keep these processes running, too. Nodes and proxies get the cluster key, if not empty."""

    processes: list[Process]
    cluster_key: str = ""


class Remove(OrderPart, tag="remove", frozen=True):
    """Drain these processes, kill them after so many seconds, and forget them."""

    names: list[str]
    kill_after: float


class ReadStates(OrderPart, tag="read_states", frozen=True):
    """Ask for all states. Every reply has them."""


class DeclareLost(OrderPart, tag="declare_lost", frozen=True):
    """Declare that the host with this address is gone, with everything that ran there."""

    address: str


class Read(OrderPart, tag="read", frozen=True):
    """Ask for data of a process.

    Attributes:
        source: its log, a page that it serves, or the new output of a load process.
        offset: of a log; below zero from its end.
    """

    name: str
    source: Source
    offset: int = 0


class Send(OrderPart, tag="send", frozen=True):
    """Write to the standard input of a load process; no data closes it."""

    name: str
    data: bytes


class EndService(OrderPart, tag="end_service", frozen=True):
    """End the control service, if nothing runs any more."""


Request = Apply | Remove | ReadStates | DeclareLost | Read | Send | EndService


class Reply(msgspec.Struct, omit_defaults=True):
    """An answer: the error of a refused request, all states, or data and whether that was all."""

    error: Text = ""
    processes: Annotated[list[ProcessState], Meta(max_length=MAX_PROCESSES)] = []
    data: Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)] = b""
    is_over: bool = False
