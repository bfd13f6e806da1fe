"""A transfer backend outside pd: KV travels as files in a directory of the decode node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pd.transfer.backend import TransferBackend

if TYPE_CHECKING:
    from pd_mailbox.manager import MailboxManager


class MailboxBackend(TransferBackend):
    """Processes of one host and user, with pools in host memory."""

    one_device = True

    def manager_class(self) -> type[MailboxManager]:
        from pd_mailbox.manager import MailboxManager

        return MailboxManager

    def obstacle(self, device: str) -> str | None:
        if device.startswith("cuda"):
            return "it reads and writes host memory only; use --device cpu, or tcp"
        if not Path("/dev/shm").is_dir():
            return "this machine has no /dev/shm; use tcp"
        return None
