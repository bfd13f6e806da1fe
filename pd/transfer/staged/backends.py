"""Descriptions of the backends ``nixl`` and ``mooncake``, which move KV through staging buffers."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from pd.core.errors import SetupError
from pd.transfer.backend import TransferBackend

if TYPE_CHECKING:
    from pd.transfer.backend import TransferSetup
    from pd.transfer.base import TransferManager
    from pd.transfer.staged.mooncake.mover import MooncakeManager
    from pd.transfer.staged.nixl import NixlManager


class NixlBackend(TransferBackend):
    """Writes of NIXL, over UCX."""

    def manager_class(self) -> type[NixlManager]:
        from pd.transfer.staged.nixl import NixlManager

        return NixlManager

    def make(self, setup: TransferSetup) -> TransferManager:
        return self.make_with(setup, local_only=not setup.may_open_ports)

    def obstacle(self, device: str) -> str | None:
        return _find_missing("nixl")


class MooncakeBackend(TransferBackend):
    """Writes of Mooncake's transfer engine."""

    def manager_class(self) -> type[MooncakeManager]:
        from pd.transfer.staged.mooncake.mover import MooncakeManager

        return MooncakeManager

    def obstacle(self, device: str) -> str | None:
        if (missing := _find_missing("mooncake")) is not None:
            return missing
        from pd.transfer.staged.mooncake.library import load_library

        try:
            load_library()
        except SetupError as error:
            return error.message
        return None


def _find_missing(library: str) -> str | None:
    if importlib.util.find_spec(library) is None:
        return f"the library is missing: pip install 'pd-serve[{library}]', or use tcp"
    return None
