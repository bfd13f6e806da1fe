"""The YAML file of a deployment: hosts, layouts of nodes on them, and what they share."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pd.cluster.reach import AnyReach, Local, NetworkNamespace, Ssh
from pd.core.errors import UsageError

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$"
_FLAG = r"^[a-z][a-z0-9_-]*$"
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
# What an option or a shell could not be mistaken for.
_WORD = r"^[A-Za-z0-9_.:@%\[\]][A-Za-z0-9_.:@%\[\]-]*$"
_ADDRESS = r"^[A-Za-z0-9.:-]+$"
_DEVICE = r"^(auto|cpu|cuda(:\d+)?)$"
# What text has to be, by its pattern.
SHAPES = {
    _NAME: "a name of up to 32 letters, digits, - and _",
    _FLAG: "a flag in small letters without its dashes, such as page-size",
    _VARIABLE: "the name of a variable",
    _WORD: "one word such as user@10.0.0.2, of letters, digits and any of _.:@%[]-",
    _ADDRESS: "an address or a host's name",
    _DEVICE: "auto, cpu, cuda or cuda:N",
}

# Layouts and hosts give their names to processes and files.
Name = Annotated[str, Field(pattern=_NAME)]
Port = Annotated[int, Field(ge=0, le=65535, strict=True)]
Role = Literal["prefill", "decode", "unified"]
FlagValue = bool | int | float | str | list[int | float | str] | None
Flags = dict[Annotated[str, Field(pattern=_FLAG)], FlagValue]
Variable = Annotated[str, Field(pattern=_VARIABLE)]
Word = Annotated[str, Field(pattern=_WORD)]
Address = Annotated[str, Field(pattern=_ADDRESS)]
LOOPBACK = re.compile(r"127\..*|localhost|::1")


class _Settings(BaseModel):
    """A mapping of the file. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class HostSettings(_Settings):
    """A host, and how it is reached: exactly one of ``local``, ``netns`` and ``ssh``.

    Attributes:
        port, identity, known_hosts: for ssh; ssh's own configuration otherwise.
        address: by which the other hosts reach it.
        directory: where commands run, so that relative paths mean the same as there.
        python: interpreter of an environment in which pd is installed.
        model: where the model is on this host, if not where the deployment's ``model`` says.
        environment: added to that of every process.
    """

    local: Literal[True] | None = None
    netns: Word | None = None
    ssh: Word | None = None
    port: Port | None = None
    identity: Path | None = None
    known_hosts: Path | None = None
    address: Address | None = None
    directory: str = ""
    python: str | None = None
    model: str | None = None
    environment: dict[Variable, str] = {}

    @property
    def public_address(self) -> str:
        """The address that other hosts use; a loopback address if there is none."""
        if self.address is not None:
            return self.address
        return (self.ssh or "127.0.0.1").rpartition("@")[2].strip("[]")

    @property
    def reach(self) -> AnyReach:
        """The way to the host."""
        if self.netns is not None:
            return NetworkNamespace(self.netns)
        if self.ssh is None:
            return Local()
        identity, known = (str(p) if p else None for p in (self.identity, self.known_hosts))
        return Ssh(self.ssh, self.port, identity, known)

    @property
    def interpreter(self) -> str:
        """The Python interpreter there."""
        return self.python or ("python3" if self.ssh is not None else sys.executable)

    @property
    def on_loopback(self) -> bool:
        return LOOPBACK.fullmatch(self.public_address) is not None


class NodeSettings(_Settings):
    """Nodes of one role on one host.

    Attributes:
        devices: dealt out in turn to the ``count`` nodes; the node's choice if there are none.
        ports, bootstrap_ports: one for each node; free ones if there are none.
    """

    role: Role
    host: Name
    count: Annotated[int, Field(ge=1, le=256, strict=True)] = 1
    devices: list[Annotated[str, Field(pattern=_DEVICE)]] = []
    ports: list[Port] = []
    bootstrap_ports: list[Port] = []
    flags: Flags = {}


class ProxySettings(_Settings):
    """The proxy of a layout.

    Attributes:
        listen: address to listen on; others than this host's programs reach it only if this is
            not a loopback address.
        port: 0 picks a free one.
    """

    host: Name
    listen: Address = "127.0.0.1"
    port: Port = 0
    flags: Flags = {}


class LayoutSettings(_Settings):
    """Nodes behind one proxy."""

    nodes: Annotated[list[NodeSettings], Field(min_length=1)]
    proxy: ProxySettings


class ClusterSpec(_Settings):
    """A deployment.

    Attributes:
        flags: of every node; a node's own flags win.
        cluster_key_file: a file here, which is written to every host. Without one, a key is made
            for each run.
        pass_environment: variables of the command ``up`` that every process gets.
        share_devices: nodes may have the same GPU.
        load: hosts from which the harness sends requests.
    """

    model: str
    transfer_backend: str | None = None
    flags: Flags = {}
    cluster_key_file: Path | None = None
    pass_environment: list[Variable] = []
    share_devices: bool = False
    hosts: Annotated[dict[Name, HostSettings], Field(min_length=1)]
    layouts: Annotated[dict[Name, LayoutSettings], Field(min_length=1)]
    load: list[Name] = []

    def used_hosts(self, *, with_load: bool) -> list[str]:
        """Names of the hosts that run something, in the order of the file."""
        used = {node.host for layout in self.layouts.values() for node in layout.nodes}
        used |= {layout.proxy.host for layout in self.layouts.values()}
        used |= set(self.load) if with_load else set()
        return [name for name in self.hosts if name in used]

    def environment_of(self, host: str) -> dict[str, str]:
        """Variables of a host's processes beside those of its agent."""
        passed = {name: os.environ[name] for name in self.pass_environment if name in os.environ}
        return passed | self.hosts[host].environment

    def is_on_loopback(self) -> bool:
        """No node listens beyond this machine."""
        return all(self.hosts[name].on_loopback for name in self.used_hosts(with_load=False))


def spelled(flags: Flags) -> Flags:
    """Page_size and page-size are one flag."""
    return {name.replace("_", "-"): value for name, value in flags.items()}


def refuse(where: str, problem: str) -> UsageError:
    """The error for a value of the file."""
    return UsageError(f"{where}: {problem}")
