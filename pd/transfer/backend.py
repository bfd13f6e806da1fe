"""Description of a transfer backend. Commands read it before they import torch or a library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd.util.starvation import Patience

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pd.transfer.base import TransferManager
    from pd.transfer.kv_buffer import KVBuffer


@dataclass(frozen=True, kw_only=True)
class TransferSetup:
    """Everything that a node gives to its transfer manager.

    Attributes:
        pool: KV cache of the node.
        host: address to listen on. Anything but loopback needs a cluster key.
        advertise_host: address published to peers; ``host`` if empty.
        cluster_key: secret of the deployment. Peers authenticate each other with it.
        patience: extends limits on progress by the time in which a process was starved. All
            managers of a node share it.
        may_open_ports: False if the manager must not open a port that accepts peers without the
            cluster key, which is so under ``auto`` without ``--trust-network``.
        fake_script: value of ``--fake-script``, for the backend ``fake`` only.
    """

    pool: KVBuffer
    instance_id: str
    host: str = "127.0.0.1"
    advertise_host: str = ""
    cluster_key: bytes | None = field(default=None, repr=False)
    patience: Patience = field(default_factory=Patience)
    may_open_ports: bool = True
    fake_script: Path | None = None


class TransferBackend(ABC):
    """One value of ``--transfer-backend``.

    We make an instance without arguments when a command starts. So its module must import neither
    torch nor a transfer library; :meth:`manager_class` does.

    Attributes:
        one_device: managers reach into the pool of one device themselves, so we refuse the backend
            with ``--tp-size`` above 1. Other backends copy between the pool and their own buffers
            with :mod:`pd.transfer.copier`, which handles tensor-parallel ranks.
    """

    one_device: bool = False

    def obstacle(self, device: str) -> str | None:
        """Return why the backend cannot work on this machine and how to fix it; None if it can.

        We call this before loading a model, and under ``auto`` to decide whether to offer the
        backend.

        Args:
            device: value of ``--device``, or the type of the pool's device.
        """
        return None

    @abstractmethod
    def manager_class(self) -> Callable[..., TransferManager]:
        """Import the class of the managers and return it."""

    def make(self, setup: TransferSetup) -> TransferManager:
        """Make a manager. It listens when this returns.

        Calls :meth:`manager_class` with pool, instance id and host, and passes ``advertise_host``,
        ``cluster_key`` and ``patience`` by name. Override it to give other arguments.

        Raises:
            ImportError, SetupError: a library is missing or does not start.
            UsageError: an option cannot be used, such as a public host without a cluster key.
            OSError: the address cannot be listened on.
        """
        return self.make_with(setup)

    def make_with(self, setup: TransferSetup, **more: object) -> TransferManager:
        """Do the same as :meth:`make` with more arguments by name."""
        return self.manager_class()(
            setup.pool,
            setup.instance_id,
            setup.host,
            advertise_host=setup.advertise_host,
            cluster_key=setup.cluster_key,
            patience=setup.patience,
            **more,
        )
