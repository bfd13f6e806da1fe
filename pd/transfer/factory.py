"""From ``--transfer-backend`` to a manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.config import TRANSFER_BACKENDS
from pd.core.errors import SetupError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from pd.transfer.base import KVBuffer, TransferManager

BACKENDS = TRANSFER_BACKENDS


def check_backend(name: str, fake_script: Path | None = None) -> None:
    """Refuse what cannot work whatever the pool is, before a model is loaded for nothing.

    Raises:
        UsageError: unknown backend, or a script that is bad or for another backend.
        SetupError: the backend's library is missing.
    """
    if name not in BACKENDS:
        raise UsageError(f"unknown transfer backend {name!r}; choose one of {', '.join(BACKENDS)}")
    if name not in ("auto", "tcp", "fake"):
        raise SetupError(f"transfer backend {name} is not available in this version; use tcp")
    if fake_script is None:
        return
    if name != "fake":
        raise UsageError(f"--fake-script needs --transfer-backend fake, not {name}")
    from pd.transfer.fake_script import load_script

    load_script(fake_script)


def make_transfer_manager(
    name: str,
    pool: KVBuffer,
    instance_id: str,
    host: str = "127.0.0.1",
    *,
    advertise_host: str = "",
    cluster_key: bytes | None = None,
    fake_script: Path | None = None,
) -> TransferManager:
    """The manager of one node; it listens when this returns.

    Args:
        name: one of ``BACKENDS``; ``auto`` is tcp.
        host: address to listen on; anything but loopback needs a cluster key.
        advertise_host: address published to peers; ``host`` if empty.
        fake_script: what the ``fake`` backend does wrong (``--fake-script``).

    Raises:
        UsageError: unknown backend, bad script, or no cluster key where one is needed.
        SetupError: the backend's library is missing or the address cannot be used.
    """
    check_backend(name, fake_script)
    try:
        if name in ("auto", "tcp"):
            from pd.transfer.tcp import TcpManager

            return TcpManager(
                pool, instance_id, host, advertise_host=advertise_host, cluster_key=cluster_key
            )
        from pd.transfer.fake import FakeManager
        from pd.transfer.fake_script import Script, load_script

        script = Script() if fake_script is None else load_script(fake_script)
        return FakeManager(
            pool,
            instance_id,
            host,
            script=script,
            advertise_host=advertise_host,
            cluster_key=cluster_key,
        )
    except OSError as error:
        raise SetupError(f"cannot listen for KV data on {host}: {error.strerror}") from error
