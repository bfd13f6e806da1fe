"""API keys, as the proxy's configuration has them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

KeyRole = Literal["inference", "admin"]


@dataclass(frozen=True)
class ApiKey:
    """A secret that clients send as ``Authorization: Bearer``.

    Attributes:
        role: ``inference`` opens what generates; ``admin`` that and workers, caches, all requests.
        name: for logs.
    """

    key: str = field(repr=False)
    role: KeyRole
    name: str = ""

    @property
    def digest(self) -> bytes:
        """The hash that is compared, and tells keys apart without showing them."""
        return hashlib.sha256(self.key.encode()).digest()
