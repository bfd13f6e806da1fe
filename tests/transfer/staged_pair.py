"""A prefill and a decode node's staged managers in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from held_mover import HeldMover
from transfer_helpers import (
    hand_off,
    introduce,
    make_pool,
    reservation,
)

from pd.transfer.staged.manager import StagedManager

if TYPE_CHECKING:
    from pd.util.starvation import Patience

BUFFERS, TOKENS = 4, 64
CELL = 2 * 2 * 4 * 4


class Pair:
    """P and D in this process, each with a library of its own."""

    def __init__(self, buffer_bytes: int = 16 * CELL, patience: Patience | None = None) -> None:
        self.source = make_pool(256, 4)
        self.target = make_pool(256, 16, fill=-1.0)
        self.out, self.into = HeldMover(), HeldMover()
        kwargs: dict[str, Any] = {
            "buffers": BUFFERS,
            "buffer_bytes": buffer_bytes,
            "patience": patience,
        }
        self.p = StagedManager(self.source, "P", "127.0.0.1", mover=self.out, **kwargs)
        self.d = StagedManager(self.target, "D", "127.0.0.1", mover=self.into, **kwargs)
        self.epoch = 0
        self.pages = np.arange(TOKENS // 4, dtype=np.int32)[::-1].copy()
        self.rooms = 0

    def introduce(self) -> None:
        introduce(self.p, "P", self.d, "D", self.source)

    def room(self):
        """A sender and a receiver of a room of its own pages."""
        self.epoch += 1
        into = np.arange(4, dtype=np.int32) + 4 * (self.epoch % 4)
        receiver = self.d.receiver("P", bytes(16), self.epoch, into, (0,), TOKENS)
        asked = reservation(receiver, bytes(16), self.epoch, 0)
        return self.p.sender("D", asked, self.pages, TOKENS), receiver, into

    def transfer(self) -> None:
        sender, receiver, into = self.room()
        sender.send(0, TOKENS, 0, 3)
        hand_off(sender, receiver)
        arrived = self.target.tokens(into, 0, TOKENS)
        assert torch.equal(arrived, self.source.tokens(self.pages, 0, TOKENS))
