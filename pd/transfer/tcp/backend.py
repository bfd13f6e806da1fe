"""Description of the backend ``tcp``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.transfer.backend import TransferBackend

if TYPE_CHECKING:
    from pd.transfer.tcp.manager import TcpManager


class TcpBackend(TransferBackend):
    """KV over plain sockets, which work everywhere."""

    def manager_class(self) -> type[TcpManager]:
        from pd.transfer.tcp.manager import TcpManager

        return TcpManager
