"""Makes the manager that ``--transfer-backend`` names."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from pd.core.errors import SetupError, UsageError
from pd.transfer.backend import TransferSetup
from pd.transfer.fake.backend import FakeBackend
from pd.transfer.nvlink.backend import NvlinkBackend
from pd.transfer.outside import find_outside
from pd.transfer.staged.backends import MooncakeBackend, NixlBackend
from pd.transfer.tcp.backend import TcpBackend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pd.transfer.backend import TransferBackend
    from pd.transfer.base import KVBuffer, TransferManager

logger = logging.getLogger(__name__)

# What ``auto`` offers, in order of preference; each pair uses the first that works for it.
AUTO = ("nvlink", "nixl", "tcp")

# Names of packages' backends, which stand on command lines, in logs and in metrics.
_NAME = re.compile(r"[A-Za-z0-9_.-]+")

_BUILT_IN: dict[str, TransferBackend] = {
    "tcp": TcpBackend(),
    "nixl": NixlBackend(),
    "mooncake": MooncakeBackend(),
    "nvlink": NvlinkBackend(),
    "fake": FakeBackend(),
}


def backend_names() -> tuple[str, ...]:
    """Names of all backends, those of other packages last."""
    return (*_BUILT_IN, *(name for name in sorted(find_outside()) if not _why_ignored(name)))


def _why_ignored(name: str) -> str:
    """Reason why no package can offer a backend of this name; empty if one can."""
    if name == "auto" or name in _BUILT_IN:
        return "the name is pd's own"
    if not _NAME.fullmatch(name):
        return "a name has letters, digits, '_', '.' and '-' only"
    return ""


def _warn_of_ignored_names() -> None:
    for name, offers in find_outside().items():
        why = _why_ignored(name)
        if why:
            packages = ", ".join(offer.package for offer in offers)
            logger.warning("the transfer backend %r of %s is ignored: %s", name, packages, why)


def find_backend(name: str) -> TransferBackend:
    """The backend of a name other than ``auto``; built-in ones cannot be replaced.

    Raises:
        UsageError: there is none, or several packages offer it.
        SetupError: the package that offers it is broken.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    offers = [] if _why_ignored(name) else find_outside().get(name, [])
    if not offers:
        names = ", ".join(("auto", *backend_names()))
        raise UsageError(f"unknown transfer backend {name!r}; choose one of {names}")
    if len(offers) > 1:
        packages = ", ".join(offer.package for offer in offers)
        raise UsageError(f"transfer backend {name} is offered by {packages}; keep one of them")
    return offers[0].load()


def check_backend(
    name: str, fake_script: Path | None = None, device: str = "auto", tp_size: int = 1
) -> None:
    """Refuse a backend that cannot work with any pool here, before a model is loaded.

    Args:
        device: value of ``--device``.
        tp_size: value of ``--tp-size``.

    Raises:
        UsageError: the backend is unknown or does not go with ``tp_size``, or the script is bad or
            for another backend.
        SetupError: the backend cannot work on this machine, or its package is broken.
    """
    if name != "auto":
        backend = find_backend(name)
        if tp_size > 1 and backend.one_device:
            raise UsageError(
                f"--transfer-backend {name} moves the KV of one device; with --tp-size {tp_size} "
                "use nixl, mooncake or tcp"
            )
        obstacle = backend.obstacle(device)
        if obstacle is not None:
            raise SetupError(f"--transfer-backend {name}: {obstacle}")
    if fake_script is None:
        return
    if name != "fake":
        raise UsageError(f"--fake-script needs --transfer-backend fake, not {name}")
    from pd.transfer.fake.script import load_script

    load_script(fake_script)


def make_transfer_manager(
    name: str,
    pool: KVBuffer,
    instance_id: str,
    host: str = "127.0.0.1",
    *,
    advertise_host: str = "",
    cluster_key: bytes | None = None,
    trust_network: bool = False,
    fake_script: Path | None = None,
) -> TransferManager:
    """The manager of one node; it listens when this returns.

    Args:
        name: a backend's name; ``auto`` offers what works here of ``AUTO``.
        trust_network: ``auto`` may offer backends whose library opens ports to all that reach
            them (``--trust-network``).
        host, advertise_host, cluster_key, fake_script: see
            :class:`~pd.transfer.backend.TransferSetup`.

    Raises:
        UsageError: unknown backend, bad script, or no cluster key where one is needed.
        SetupError: the backend cannot work here or the address cannot be used.
    """
    check_backend(name, fake_script, pool.memory.device.type, len(pool.planes[0].parts))
    _warn_of_ignored_names()
    if trust_network:
        logger.warning(
            "--trust-network: transfer libraries may open ports that ask nobody for the cluster "
            "key; none but this deployment's hosts must reach this one"
        )
    setup = TransferSetup(
        pool=pool,
        instance_id=instance_id,
        host=host,
        advertise_host=advertise_host,
        cluster_key=cluster_key,
        may_open_ports=name != "auto" or trust_network,
        fake_script=fake_script,
    )
    return _make_auto(setup) if name == "auto" else _make(name, setup)


def _make_auto(setup: TransferSetup) -> TransferManager:
    """The backends of ``AUTO`` that work here, behind one manager if they are several."""
    managers: list[TransferManager] = []
    for name in AUTO:
        reason = _auto_obstacle(name, setup)
        try:
            if reason is None:
                managers.append(_make(name, setup))
        except SetupError as error:
            if name == AUTO[-1]:
                for manager in managers:
                    manager.close()
                raise
            reason = error.message
        if reason is not None:
            logger.info("transfer backend %s is left out: %s", name, reason)
    if len(managers) == 1:
        return managers[0]
    from pd.transfer.chooser import ChoosingManager

    return ChoosingManager(managers)


def _auto_obstacle(name: str, setup: TransferSetup) -> str | None:
    """Return why ``auto`` cannot offer a backend, as far as is known before it is loaded."""
    backend = _BUILT_IN[name]
    if len(setup.pool.planes[0].parts) > 1 and backend.one_device:
        return "it moves the KV of one device, and --tp-size divides it among several"
    return backend.obstacle(setup.pool.memory.device.type)


def _make(name: str, setup: TransferSetup) -> TransferManager:
    try:
        return find_backend(name).make(setup)
    except ImportError as error:
        raise SetupError(f"transfer backend {name} cannot be loaded: {error}") from error
    except OSError as error:
        raise SetupError(
            f"cannot listen for KV data on {setup.host}: {error.strerror or error}"
        ) from error


def manager_class(name: str) -> Callable[..., TransferManager]:
    """The class of a backend's managers. Raises ImportError if it cannot be loaded."""
    return find_backend(name).manager_class()
