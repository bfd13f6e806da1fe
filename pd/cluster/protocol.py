"""Messages between a deployment and the agent of a host: one line of JSON each.

Secrets (the cluster key, environments) travel in these messages only, never in a command line.
"""

from __future__ import annotations

import msgspec

# Changed with every change of a message that an older agent or deployment would not understand.
PROTOCOL = 3
# The longest line either end accepts; a longer one ends the connection.
MAX_LINE_BYTES = 16 << 20
# Bytes of a file in one answer, and of an HTTP answer.
MAX_CHUNK_BYTES = 1 << 20
MAX_BODY_BYTES = 8 << 20
# A deployment pings each agent this often. An agent that hears nothing for the lease stops its
# processes, and a host that answers nothing for as long is lost: ssh alone would not tell either
# end that the network between them is gone.
PING_SECONDS = 2.0
AGENT_LEASE = 30.0


class AgentRequest(msgspec.Struct, kw_only=True, tag_field="op", tag=str.lower):
    """A request to an agent; its :class:`Reply` has the same number."""

    number: int = 0


class OpenRun(AgentRequest, tag="open"):
    """Take the run directory ``run`` (relative to the agent's state directory).

    Attributes:
        attach: look after processes of an earlier agent, and leave them running when the
            connection ends. Otherwise nobody may have opened the run before.
        directory: working directory of processes; empty for the agent's own.
        token: value of :data:`TOKEN_VARIABLE` in the environment of every process of this run
            on this host.
    """

    run: str
    token: str
    attach: bool = False
    directory: str = ""


class StartProcess(AgentRequest, tag="start"):
    """Start a process.

    Attributes:
        devices: that a node has for itself; none if it picks its own.
        stop_order: processes with a higher number stop first.
        announces: the process prints a ready line.
        may_end: see :class:`ProcessState`.
    """

    name: str
    command: list[str]
    environment: dict[str, str]
    layout: str = ""
    role: str = ""
    devices: list[str] = []
    stop_order: int = 0
    announces: bool = False
    may_end: bool = False


class Signal(AgentRequest):
    """Send a signal to a process of this run. Nothing happens if it has ended."""

    name: str
    signal: int


class LetEnd(AgentRequest):
    """Note whether a process may end without a failure of the deployment."""

    name: str
    may_end: bool


class Write(AgentRequest):
    """Write a file of the run directory, which only this user may read."""

    name: str
    content: bytes


class Read(AgentRequest):
    """Read a part of a file of the run directory; a negative offset counts from its end."""

    name: str
    offset: int = 0


class FetchUrl(AgentRequest, tag="fetch"):
    """HTTP request from the host itself.

    Attributes:
        method: by default GET, or POST with a ``body``, which is JSON.
        verify: an https server needs a certificate that the host trusts.
        authorities: file of the host with what it trusts; empty for its own authorities.
    """

    url: str
    timeout: float = 5.0
    headers: dict[str, str] = {}
    body: bytes | None = None
    method: str | None = None
    verify: bool = True
    authorities: str = ""


class Ping(AgentRequest):
    """Prove that both ends are there."""


class Keep(AgentRequest):
    """From now on processes stay when the connection ends."""


class Close(AgentRequest):
    """End what is left of the run on this host.

    Attributes:
        remove: delete the run directory, whose files have been collected.
    """

    remove: bool = False


AnyRequest = (
    OpenRun | StartProcess | Signal | LetEnd | Write | Read | FetchUrl | Ping | Keep | Close
)


class ReadyLine(msgspec.Struct):
    """The line with which a process of pd announces that it serves."""

    event: str
    role: str
    url: str
    instance_id: str


class ProcessState(msgspec.Struct):
    """A process of a run as its host sees it.

    Attributes:
        may_end: its end is no failure of the deployment, because it is new or was sent away.
        ended: it has ended; ``status`` is None if the agent is not its parent.
        log: the last lines that it wrote to standard error, once it has ended.
    """

    name: str
    pid: int
    layout: str = ""
    role: str = ""
    devices: list[str] = []
    stop_order: int = 0
    ready: ReadyLine | None = None
    may_end: bool = False
    ended: bool = False
    status: int | None = None
    log: list[str] = []


class Opened(msgspec.Struct):
    """The answer to :class:`OpenRun`; ``processes`` are those of an earlier agent.

    Attributes:
        has_key: the run has a cluster key there.
    """

    version: str
    run_directory: str
    processes: list[ProcessState]
    has_key: bool = False


class Part(msgspec.Struct):
    """A part of a file, and the file's size."""

    content: bytes
    size: int


class Fetched(msgspec.Struct):
    """An HTTP answer."""

    status: int
    body: bytes


class AgentMessage(msgspec.Struct, kw_only=True, tag_field="message", tag=str.lower):
    """A message from an agent."""


class Hello(AgentMessage):
    """The first message of an agent."""

    protocol: int


class Reply(AgentMessage):
    """The answer to a request: an error for people, or a value that depends on the request."""

    number: int
    error: str = ""
    value: msgspec.Raw = msgspec.Raw(b"null")


class Changed(AgentMessage):
    """A process announced itself or ended, or another agent has started it."""

    process: ProcessState


AnyMessage = Hello | Reply | Changed

_encoder = msgspec.json.Encoder()
decode_request = msgspec.json.Decoder(AnyRequest).decode
decode_message = msgspec.json.Decoder(AnyMessage).decode


def encode(value: msgspec.Struct) -> bytes:
    """The message as a line."""
    return _encoder.encode(value) + b"\n"


def encode_value(value: msgspec.Struct) -> msgspec.Raw:
    """The value of a :class:`Reply`."""
    return msgspec.Raw(_encoder.encode(value))
