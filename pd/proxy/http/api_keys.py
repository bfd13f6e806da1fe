"""API keys in the proxy's configuration."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

KeyRole = Literal["inference", "admin"]


@dataclass(frozen=True)
class ApiKey:
    """A secret that clients send as ``Authorization: Bearer``.

    Attributes:
        role: ``inference`` may generate; ``admin`` may also administrate nodes, caches and all
            requests.
        name: the key's name in logs.
    """

    key: str = field(repr=False)
    role: KeyRole
    name: str = ""

    @property
    def digest(self) -> bytes:
        """Hash for comparisons. It identifies the key without revealing it."""
        return hashlib.sha256(self.key.encode()).digest()
