"""Makes the manager for ``--transfer-backend``."""

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
    from pd.transfer.base import TransferManager
    from pd.transfer.kv_buffer import KVBuffer

logger = logging.getLogger(__name__)

# Backends that ``auto`` offers, in order of preference. Each pair uses the first that works for it.
AUTO = ("nvlink", "nixl", "tcp")

# Names of packages' backends appear on command lines, in logs and in metrics.
_NAME = re.compile(r"[A-Za-z0-9_.-]+")

_BUILT_IN: dict[str, TransferBackend] = {
    "tcp": TcpBackend(),
    "nixl": NixlBackend(),
    "mooncake": MooncakeBackend(),
    "nvlink": NvlinkBackend(),
    "fake": FakeBackend(),
}


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends, with those of other packages last."""
    return (*_BUILT_IN, *(name for name in sorted(find_outside()) if not _find_name_fault(name)))


def _find_name_fault(name: str) -> str:
    """Return why no package can offer a backend of this name; empty if one can."""
    if name == "auto" or name in _BUILT_IN:
        return "the name is pd's own"
    if not _NAME.fullmatch(name):
        return "a name has letters, digits, '_', '.' and '-' only"
    return ""


def _warn_of_ignored_names() -> None:
    for name, offers in find_outside().items():
        why = _find_name_fault(name)
        if why:
            packages = ", ".join(offer.package for offer in offers)
            logger.warning("the transfer backend %r of %s is ignored: %s", name, packages, why)


def find_backend(name: str) -> TransferBackend:
    """Return the backend of a name other than ``auto``. Packages cannot replace built-in ones.

    Raises:
        UsageError: there is none, or several packages offer it.
        SetupError: its package is broken.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    offers = [] if _find_name_fault(name) else find_outside().get(name, [])
    if not offers:
        names = ", ".join(("auto", *backend_names()))
        raise UsageError(f"unknown transfer backend {name!r}; choose one of {names}")
    if len(offers) > 1:
        packages = ", ".join(offer.package for offer in offers)
        raise UsageError(f"transfer backend {name} is offered by {packages}; keep one of them")
    return offers[0].load_backend()


def check_backend(
    name: str, fake_script: Path | None = None, device: str = "auto", tp_size: int = 1
) -> None:
    """Refuse a backend that cannot work with any pool here, before we load a model.

    Args:
        device: value of ``--device``.
        tp_size: value of ``--tp-size``.

    Raises:
        UsageError: the backend is unknown or does not support ``tp_size``, or the script is bad or
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
    """Make the manager of one node. It listens when this returns.

    Args:
        name: name of a backend. With ``auto`` we offer each of ``AUTO`` that works here.
        trust_network: lets ``auto`` offer backends whose library opens ports without authentication
            (``--trust-network``).
        host, advertise_host, cluster_key, fake_script: see
            :class:`~pd.transfer.backend.TransferSetup`.

    Raises:
        UsageError: the backend is unknown, the script is bad, or a cluster key is missing.
        SetupError: the backend cannot work here, or the address cannot be used.
    """
    check_backend(name, fake_script, pool.memory.device.type, pool.layout.tp_size)
    _warn_of_ignored_names()
    if trust_network:
        logger.warning(
            "--trust-network: transfer libraries may open unauthenticated ports; let only this "
            "deployment's hosts reach this one"
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
    return _make_auto(setup) if name == "auto" else _make_manager(name, setup)


def _make_auto(setup: TransferSetup) -> TransferManager:
    """Make the backends of ``AUTO`` that work here, in one manager if they are several."""
    managers: list[TransferManager] = []
    for name in AUTO:
        reason = _auto_obstacle(name, setup)
        try:
            if reason is None:
                managers.append(_make_manager(name, setup))
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
    """Return why ``auto`` cannot offer a backend, as far as we know before loading it."""
    backend = _BUILT_IN[name]
    if setup.pool.layout.tp_size > 1 and backend.one_device:
        return "it moves the KV of one device, and --tp-size divides it among several"
    return backend.obstacle(setup.pool.memory.device.type)


def _make_manager(name: str, setup: TransferSetup) -> TransferManager:
    try:
        return find_backend(name).make(setup)
    except ImportError as error:
        raise SetupError(f"transfer backend {name} cannot be loaded: {error}") from error
    except OSError as error:
        raise SetupError(
            f"cannot listen for KV data on {setup.host}: {error.strerror or error}"
        ) from error


def manager_class(name: str) -> Callable[..., TransferManager]:
    """Return the class of a backend's managers. Raises ImportError if it cannot be loaded."""
    return find_backend(name).manager_class()
