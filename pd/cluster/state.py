"""Record, on the machine that started it, of a deployment that is up, for ``status`` and ``down``.

Processes are recorded on the hosts, where they run. This record only tells how to reach the hosts;
it has no secrets.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pd.cluster.host_processes import Identity, ProcessHandle
from pd.cluster.reach import AnyReach
from pd.cluster.run_directory import state_directory
from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.cluster.spec import HostSettings

_NAME_CHARACTERS = 32
# The directory of a run here in which logs are collected, beside those of its hosts here.
LOGS = "logs"


class HostState(msgspec.Struct, frozen=True):
    """The way to the agent of a host.

    Attributes:
        directory: where its processes run; empty for the agent's own.
    """

    reach: AnyReach
    python: str
    address: str
    directory: str = ""

    @classmethod
    def of(cls, host: HostSettings) -> HostState:
        """The state of a host that the file names."""
        return cls(host.reach, host.interpreter, host.public_address, host.directory)


class ClusterState(msgspec.Struct, frozen=True):
    """A deployment that was started.

    Attributes:
        deployment: what runs of one file have in common, see :func:`deployment_id`.
        run: distinguishes this run from others.
        token: what the tokens of all hosts begin with, see :meth:`token_on`.
        controller: the process that started it and stays; None if it was detached.
        log_directory: where its user wants the logs; None for the usual place.
    """

    deployment: str
    run: str
    hosts: dict[str, HostState]
    controller: Identity | None
    log_directory: str | None = None
    token: str = msgspec.field(default_factory=lambda: secrets.token_hex(16))

    def run_on(self, host: str) -> str:
        """Name of the run's directory on one host. Hosts may share a file system."""
        return f"{self.deployment}/{self.run}/{host}"

    def token_on(self, host: str) -> str:
        """The token that all processes of the run on one host have in their environment.

        Hosts of the file may be one machine, where one of them must not end what another one runs.
        """
        return f"{self.token}-{host}"

    @property
    def logs(self) -> Path:
        """Directory on this machine in which logs and metrics of all hosts are collected."""
        if self.log_directory is not None:
            return Path(self.log_directory)
        return state_directory() / self.deployment / self.run / LOGS

    def controller_handle(self) -> ProcessHandle | None:
        """The process that started the run, if it is still there."""
        return None if self.controller is None else ProcessHandle.of(self.controller)


_STATE = msgspec.json.Decoder(ClusterState)


def deployment_id(path: Path) -> str:
    """The file's name with a digest of its path, because other files may have the same name.

    It does not depend on what the file says, which may have changed since the deployment was
    started.
    """
    digest = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    name = re.sub(r"[^A-Za-z0-9_-]", "_", path.stem)[:_NAME_CHARACTERS]
    return f"{name}-{digest[:8]}"


def _file(deployment: str) -> Path:
    return state_directory() / deployment / "state.json"


def load_state(deployment: str) -> ClusterState | None:
    """The run that is up. Raises SetupError for a file that is damaged."""
    path = _file(deployment)
    try:
        return _STATE.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise SetupError(
            f"{path} cannot be used ({error}); if nothing of the deployment runs, remove it"
        ) from error


def create_state(state: ClusterState) -> None:
    """Record a run. Raises SetupError if another one of the same file is up, or if the record
    cannot be written."""
    path = _file(state.deployment)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_new(path, state)
    except FileExistsError:
        raise SetupError(f"{state.deployment} is being started or is up already") from None
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror}") from None


def replace_state(state: ClusterState) -> None:
    """Record a change of the run. Raises SetupError if it cannot be written."""
    path = _file(state.deployment)
    part = path.with_suffix(".part")
    try:
        part.unlink(missing_ok=True)
        _write_new(part, state)
        part.replace(path)
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror}") from None


def _write_new(path: Path, state: ClusterState) -> None:
    """Write a file that is not there yet. Nothing of it stays where it cannot be written."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        try:
            file.write(msgspec.json.encode(state))
            file.flush()
        except OSError:
            path.unlink()
            raise


@contextlib.contextmanager
def changing(state: ClusterState) -> Iterator[None]:
    """Keep others from changing the number of nodes meanwhile. Raises SetupError if one does."""
    path = _file(state.deployment).with_suffix(".lock")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SetupError(
                f"another command changes the number of nodes of {state.deployment} right now"
            ) from None
        yield


def forget_state(state: ClusterState) -> None:
    """Delete the record of a run. Another run that took its place meanwhile is left alone."""
    current = load_state(state.deployment)
    if current is not None and current.run == state.run:
        _file(state.deployment).unlink(missing_ok=True)
