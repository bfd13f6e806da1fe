"""Description of the backend ``fake``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.transfer.backend import TransferBackend

if TYPE_CHECKING:
    from pd.transfer.backend import TransferSetup
    from pd.transfer.base import TransferManager
    from pd.transfer.fake.manager import FakeManager


class FakeBackend(TransferBackend):
    """One-sided writes with faults from a script."""

    one_device = True

    def manager_class(self) -> type[FakeManager]:
        from pd.transfer.fake.manager import FakeManager

        return FakeManager

    def make(self, setup: TransferSetup) -> TransferManager:
        if setup.fake_script is None:
            return self.make_with(setup)
        from pd.transfer.fake.script import load_script

        return self.make_with(setup, script=load_script(setup.fake_script))
