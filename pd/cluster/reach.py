"""Ways to a host. Each makes the command line here that runs a command there."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

# ssh gives a connection up after this many seconds without a sign of the other end, three times.
_SSH_ALIVE_SECONDS = 3
_SSH_CONNECT_SECONDS = 10


class Reach(Protocol):
    """A way to a host. Standard input and output of the command lead through it."""

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that runs these arguments on the host, without a shell in between that
        could take a character of theirs for its own."""

    def __str__(self) -> str:
        """The way, in messages."""


class Local(msgspec.Struct, frozen=True, tag="local"):
    """Runs the agent on the machine of the caller."""

    def command(self, arguments: Sequence[str]) -> list[str]:
        return list(arguments)

    def __str__(self) -> str:
        return "this machine"


class NetworkNamespace(msgspec.Struct, frozen=True, tag="netns"):
    """A network namespace of this machine, which only root may enter."""

    name: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.name, *arguments]

    def __str__(self) -> str:
        return f"network namespace {self.name}"


class Ssh(msgspec.Struct, frozen=True, tag="ssh"):
    """Another machine, by the system's ``ssh``, which never asks a question.

    The host's key must be known (in ``known_hosts``, or where ssh looks by itself), and the user
    must be let in without a password.
    """

    destination: str
    port: int | None = None
    identity: str | None = None
    known_hosts: str | None = None

    def command(self, arguments: Sequence[str]) -> list[str]:
        options = {
            "BatchMode": "yes",
            "StrictHostKeyChecking": "yes",
            "ConnectTimeout": str(_SSH_CONNECT_SECONDS),
            "ServerAliveInterval": str(_SSH_ALIVE_SECONDS),
            "ServerAliveCountMax": "3",
            # A connection that others share would outlive this one.
            "ControlMaster": "no",
        }
        if self.identity is not None:
            options["IdentitiesOnly"] = "yes"
        if self.known_hosts is not None:
            options["UserKnownHostsFile"] = self.known_hosts
        command = ["ssh", "-T", "-a", "-x"]
        for name, value in options.items():
            command += ["-o", f"{name}={_quoted(value)}"]
        if self.port is not None:
            command += ["-p", str(self.port)]
        if self.identity is not None:
            command += ["-i", self.identity]
        # The user's shell on the other machine parses what ssh sends.
        return [*command, "--", self.destination, shlex.join(["exec", *arguments])]

    def __str__(self) -> str:
        return f"ssh {self.destination}" + ("" if self.port is None else f" -p {self.port}")


AnyReach = Local | NetworkNamespace | Ssh


def _quoted(value: str) -> str:
    """An option's value as ssh's configuration files have it."""
    return f'"{value}"' if " " in value else value
