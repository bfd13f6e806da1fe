"""The operator's side of a deployment: starts, shows, changes and stops it through its control
service, and records here how to reach the service. It never joins Ray."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import re
import secrets
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pd.cluster import orders
from pd.cluster.client import ControlAddress, ControlClient
from pd.cluster.jobs import JobsServer, read_token
from pd.cluster.local_ray import LocalRay, start_local_ray, stop_local_ray
from pd.cluster.orders import NODE_ROLES, Source
from pd.cluster.plans import STOP_ORDER
from pd.cluster.supervisor import LEASE_SECONDS, make_state_directory
from pd.core.errors import SetupError
from pd.net.cluster_key import derive_control_keypairs, load_cluster_key
from pd.util.children import module_command
from pd.util.printable import escape_text
from pd.util.secret_files import write_secret_file

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pd.cluster.orders import Process, ProcessState
    from pd.cluster.spec import RaySettings

Report = Callable[[str], None]
WAIT_SECONDS, GRACE_SECONDS = 600.0, 35.0
_POLL_SECONDS, _RAY_SECONDS = 0.5, 120.0
_MAX_LOG_BYTES, _SHOWN_LOG_BYTES = 64 << 20, 2000
_PAGES: dict[str, Source] = {"metrics": "/metrics", "json": "/server_info"}
# In the output of :mod:`pd.cluster.control`.
_PORT_LINE = re.compile(r"^control service on port ([1-9]\d{1,4})$", re.M)


class DeploymentRecord(msgspec.Struct):
    """How this machine reaches a deployment, with the operator's secret key."""

    control: ControlAddress
    keys: tuple[bytes, bytes]
    ray: LocalRay | None = None


_RECORDS = msgspec.json.Decoder(DeploymentRecord)


class Deployment:
    """A deployment that is up, made by :func:`open_deployment` or :func:`find_deployment`.

    All methods raise SetupError. ``logs`` is the directory for logs and metrics when it stops.
    """

    def __init__(self, name: str, record: DeploymentRecord) -> None:
        self.name, self._record = name, record
        self.client = ControlClient(record.control, record.keys)
        self.logs = make_state_directory() / f"{name}.logs"

    def read_states(self) -> list[ProcessState]:
        """Ask for the states of all processes."""
        return self.client.send_request(orders.ReadStates()).processes

    def read_urls(self) -> dict[str, str]:
        """Ask for the clients' URLs, by layout."""
        return {s.layout: s.url for s in self.read_states() if s.role == "proxy"}

    def check_processes(self) -> None:
        """Raise SetupError with the names of processes and hosts if some do not serve."""
        unready = find_unready([s for s in self.read_states() if s.role != "load"])
        if unready:
            raise SetupError("; ".join(unready.values()))

    def start_processes(
        self, processes: Sequence[Process], key: str, wait: float, report: Report
    ) -> None:
        """Start processes, and wait until all serve and proxies use them."""
        self.client.send_request(orders.Apply(list(processes), key))
        names = [process.name for process in processes]
        began, reported = time.monotonic(), ""
        while unready := find_unready(states := self.read_states(), names):
            seconds, text = time.monotonic() - began, "; ".join(unready.values())
            failed = [s.name for s in states if s.state == "failed" and s.name in names]
            for name in failed:
                log = self._read_source(name, "log", -_SHOWN_LOG_BYTES).decode(errors="replace")
                report(escape_text(log, keep="\n"))
            if failed or seconds > wait:
                raise SetupError(f"not ready after {seconds:.0f} s: {text}")
            if text != reported:
                reported = text
                report(f"{seconds:3.0f} s, waiting for {text}")
            time.sleep(_POLL_SECONDS)

    def remove_processes(self, names: Sequence[str], grace: float) -> None:
        """Drain processes and wait until they have ended."""
        self.client.send_request(orders.Remove(list(names), grace))
        deadline = time.monotonic() + grace + _RAY_SECONDS
        while left := [state for state in self.read_states() if state.name in names]:
            if time.monotonic() > deadline or all(state.state == "lost" for state in left):
                raise SetupError(
                    f"{', '.join(map(describe_process, left))}: not ended; if a host is gone for "
                    "good, give --lost ADDRESS"
                )
            time.sleep(_POLL_SECONDS)

    def stop_all(self, grace: float, report: Report, lost: Sequence[str] = ()) -> None:
        """Collect logs, stop everything in order, and forget the deployment.

        ``lost``: addresses of hosts declared gone by the operator.
        """
        try:
            states = self.read_states()
        except SetupError as error:
            # The head is gone, so nobody can stop the processes before their lease ends.
            pause = 0.0 if lost else LEASE_SECONDS + grace
            report(f"{error.message}; its processes end by themselves: waiting {pause:.0f} s")
            self._remove_record()
            time.sleep(pause)
            return
        for address in lost:
            self.client.send_request(orders.DeclareLost(address))
        self._collect_logs(states, report)
        for roles in STOP_ORDER:
            group = [state.name for state in states if state.role in roles]
            if group:
                self.remove_processes(group, grace)
        self.client.send_request(orders.EndService())
        self._remove_record()

    def _remove_record(self) -> None:
        self.client.close()
        if self._record.ray is not None:
            stop_local_ray(self._record.ray)
        (make_state_directory() / f"{self.name}.json").unlink(missing_ok=True)

    def _collect_logs(self, states: Sequence[ProcessState], report: Report) -> None:
        """Write logs, metrics and descriptions to files. Decoding has checked the names."""
        self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        for state in states:
            with contextlib.suppress(SetupError, OSError):
                log = b""
                while len(log) < _MAX_LOG_BYTES:
                    part = self._read_source(state.name, "log", len(log))
                    if not part:
                        break
                    log += part
                write_secret_file(self.logs / f"{state.name}.log", log)
                for suffix, page in _PAGES.items() if state.url else ():
                    data = self._read_source(state.name, page)
                    write_secret_file(self.logs / f"{state.name}.{suffix}", data)
        report(f"logs and metrics are in {self.logs}")

    def _read_source(self, name: str, source: Source, offset: int = 0) -> bytes:
        return self.client.send_request(orders.Read(name, source, offset)).data


def describe_process(state: ProcessState) -> str:
    """Name a process and its host."""
    return f"{state.name} on {escape_text(state.address) or 'no host yet'}"


def find_unready(
    states: Sequence[ProcessState], names: Collection[str] | None = None
) -> dict[str, str]:
    """Say why processes (of these names) do not serve, by name."""
    uses = {state.layout: state.uses for state in states if state.role == "proxy"}
    unready: dict[str, str] = {}
    for state in states:
        reason = f"{state.state} {state.detail}".strip()
        if state.state == "ready" and not state.detail:
            reason = ""
        if not reason and state.role in NODE_ROLES and state.url not in uses.get(state.layout, []):
            reason = "not used by its proxy"
        if reason and (names is None or state.name in names):
            unready[state.name] = f"{describe_process(state)}: {escape_text(reason)}"
    return unready


def make_deployment_id(file: Path) -> str:
    """Make the common name of all runs of a file."""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", file.stem).strip("-")[:32]
    return f"{stem or 'cluster'}-{hashlib.sha256(bytes(file.resolve())).hexdigest()[:8]}"


def find_deployment(name: str) -> Deployment | None:
    """Find a deployment that is up. Raises SetupError if its record makes no sense."""
    path = make_state_directory() / f"{name}.json"
    try:
        return Deployment(name, _RECORDS.decode(path.read_bytes()))
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise SetupError(f"{path}: {error}; remove it if nothing runs") from None


def open_deployment(name: str, ray: RaySettings, trust_network: bool, report: Report) -> Deployment:
    """Start a control service in a Ray cluster, or in a new one if there is no address.

    It listens where the operator says and proves a key of the operator, so we take nothing but a
    port from the cluster. Raises UsageError or SetupError.
    """
    local, python = None, ray.python
    if ray.address:
        token = read_token()
        server = JobsServer(ray.address, token)
        if not trust_network and not (token and server.is_fenced):
            problem = "its token would travel unencrypted: use a tunnel to this machine or https://"
            if not token:
                problem = "no token, so whoever reaches it runs code there: set RAY_AUTH_TOKEN_PATH"
            raise SetupError(f"Ray cluster {ray.address}: {problem}, or give --trust-network")
    else:
        if importlib.util.find_spec("ray") is None:
            raise SetupError("Ray is not installed here: pip install 'pd-serve[ray]'")
        report("starting Ray on this machine")
        local, python = start_local_ray(), sys.executable
        server = JobsServer(local.address, local.read_token())
    directory, run = make_state_directory(), secrets.token_hex(16)
    own_key = directory / f"{name}.key"
    try:
        # Only a control service on this machine can read our own key.
        if not ray.key_file:
            write_secret_file(own_key, secrets.token_hex(32).encode())
        key_file = Path(ray.key_file or own_key)
        arguments = (name, run, server.host, ray.control_port, key_file)
        command = [python, *module_command("pd.cluster.control", *arguments)[1:]]
        port = _PORT_LINE.search(server.run_command(shlex.join(command), _RAY_SECONDS))
        if port is None:
            raise SetupError(f"Ray cluster {server.url}: the control service has named no port")
        service, operator = derive_control_keypairs(load_cluster_key(key_file), run)
        address = ControlAddress(server.host, int(port[1]), service[0].decode())
        deployment = Deployment(name, record := DeploymentRecord(address, operator, local))
        deployment.read_states()  # the answer proves the key
        write_secret_file(directory / f"{name}.json", msgspec.json.encode(record))
    except BaseException:
        if local is not None:
            stop_local_ray(local)
        raise
    finally:
        own_key.unlink(missing_ok=True)
    return deployment
