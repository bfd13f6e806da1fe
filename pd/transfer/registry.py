"""Makes the manager that ``--transfer-backend`` names."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
from typing import TYPE_CHECKING, cast

from pd.core.config import TRANSFER_BACKENDS
from pd.core.errors import SetupError, UsageError
from pd.core.starvation import Patience
from pd.transfer.allocator import expandable_segments

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pd.transfer.base import KVBuffer, TransferManager

logger = logging.getLogger(__name__)

BACKENDS = TRANSFER_BACKENDS
# What ``auto`` offers, in order of preference; each pair uses the first that works for it.
AUTO = ("nvlink", "nixl", "tcp")
# Backends that reach into the pool themselves, not by way of staging buffers.
_WHOLE_POOLS = ("nvlink", "fake")

# Imported when needed: the libraries take long to load and may be missing.
_MANAGERS = {
    "tcp": "pd.transfer.tcp.manager:TcpManager",
    "fake": "pd.transfer.fake.manager:FakeManager",
    "nixl": "pd.transfer.staged.nixl:NixlManager",
    "mooncake": "pd.transfer.staged.mooncake.mover:MooncakeManager",
    "nvlink": "pd.transfer.nvlink.manager:NvlinkManager",
}


def check_backend(
    name: str, fake_script: Path | None = None, device: str = "auto", tp_size: int = 1
) -> None:
    """Refuse a backend that cannot work with any pool here, before a model is loaded.

    Args:
        device: ``--device``.
        tp_size: ``--tp-size``.

    Raises:
        UsageError: unknown backend, or one that does not go with ``tp_size``, or a script that is
            bad or for another backend.
        SetupError: the backend's library is missing.
    """
    if name not in BACKENDS:
        raise UsageError(f"unknown transfer backend {name!r}; choose one of {', '.join(BACKENDS)}")
    if tp_size > 1 and name in _WHOLE_POOLS:
        raise UsageError(
            f"--transfer-backend {name} moves the KV of one device; with --tp-size {tp_size} use "
            "nixl, mooncake or tcp"
        )
    obstacle = None if name == "auto" else _obstacle(name, device)
    if obstacle is not None:
        raise SetupError(f"--transfer-backend {name}: {obstacle}")
    if fake_script is None:
        return
    if name != "fake":
        raise UsageError(f"--fake-script needs --transfer-backend fake, not {name}")
    from pd.transfer.fake.script import load_script

    load_script(fake_script)


def _obstacle(name: str, device: str) -> str | None:
    """Why a backend cannot be used here and what to do, as far as can be told without torch."""
    if name == "nvlink" and (obstacle := _nvlink_obstacle(device)):
        return obstacle
    if name in ("nixl", "mooncake") and importlib.util.find_spec(name) is None:
        return f"the library is missing: pip install 'pd-serve[{name}]', or use tcp"
    if name == "mooncake":
        from pd.transfer.staged.mooncake.library import load_library

        try:
            load_library()
        except SetupError as error:
            return error.message
    if importlib.util.find_spec(_MANAGERS[name].partition(":")[0]) is None:
        return "not available in this version; use tcp"
    return None


def _nvlink_obstacle(device: str) -> str | None:
    if device == "cpu":
        return "the KV cache is on the CPU; use --device cuda, or tcp"
    if variable := expandable_segments():
        return f"memory of expandable segments cannot be mapped by peers; unset {variable}"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no NVIDIA driver (libcuda.so.1); use tcp"
    return None


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
        name: one of ``BACKENDS``; ``auto`` offers what works here of ``AUTO``.
        host: address to listen on; anything but loopback needs a cluster key.
        advertise_host: address published to peers; ``host`` if empty.
        trust_network: ``auto`` may offer backends whose library opens ports to whoever reaches
            them (``--trust-network``).
        fake_script: what the ``fake`` backend does wrong (``--fake-script``).

    Raises:
        UsageError: unknown backend, bad script, or no cluster key where one is needed.
        SetupError: the backend's library is missing or the address cannot be used.
    """
    check_backend(name, fake_script, pool.buffer.device.type, len(pool.parts))
    options: dict[str, object] = {
        "advertise_host": advertise_host,
        "cluster_key": cluster_key,
        "patience": Patience(),
    }
    if trust_network:
        logger.warning(
            "--trust-network: transfer libraries may open ports that ask nobody for the cluster "
            "key; none but this deployment's hosts must reach this one"
        )
    if name == "fake" and fake_script is not None:
        from pd.transfer.fake.script import load_script

        options["script"] = load_script(fake_script)
    if name == "auto":
        return _make_auto(pool, instance_id, host, options, may_listen=trust_network)
    return _make(name, pool, instance_id, host, options)


def _make_auto(
    pool: KVBuffer, instance_id: str, host: str, options: dict[str, object], *, may_listen: bool
) -> TransferManager:
    """The backends of ``AUTO`` that work here.

    Args:
        may_listen: backends whose library opens ports may do so.
    """
    managers: list[TransferManager] = []
    for backend in AUTO:
        more = {"local_only": True} if backend == "nixl" and not may_listen else {}
        reason = _auto_obstacle(backend, pool)
        try:
            if reason is None:
                managers.append(_make(backend, pool, instance_id, host, options | more))
        except SetupError as error:
            if backend == AUTO[-1]:
                for manager in managers:
                    manager.close()
                raise
            reason = error.message
        if reason is not None:
            logger.info("transfer backend %s is left out: %s", backend, reason)
    if len(managers) == 1:
        return managers[0]
    from pd.transfer.chooser import ChoosingManager

    return ChoosingManager(managers)


def _auto_obstacle(backend: str, pool: KVBuffer) -> str | None:
    """Why ``auto`` cannot offer a backend, as far as can be told before it is loaded."""
    if len(pool.parts) > 1 and backend in _WHOLE_POOLS:
        return "it moves the KV of one device, and --tp-size divides it among several"
    return _obstacle(backend, pool.buffer.device.type)


def manager_class(name: str) -> Callable[..., TransferManager]:
    """The class of a backend's manager. Raises ImportError if it cannot be loaded."""
    module, _, cls = _MANAGERS[name].partition(":")
    return cast("Callable[..., TransferManager]", getattr(importlib.import_module(module), cls))


def _make(
    name: str, pool: KVBuffer, instance_id: str, host: str, options: dict[str, object]
) -> TransferManager:
    try:
        manager = manager_class(name)(pool, instance_id, host, **options)
    except ImportError as error:
        raise SetupError(f"transfer backend {name} cannot be loaded: {error}") from error
    except OSError as error:
        raise SetupError(
            f"cannot listen for KV data on {host}: {error.strerror or error}"
        ) from error
    return manager
