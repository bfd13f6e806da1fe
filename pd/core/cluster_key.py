"""The shared secret of a deployment (``--cluster-key-file``) and what is derived from it.

Every use gets its own sub-key, so that nothing learned about one (an admin token in a log, say)
helps against another. Keys are never logged.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from pd.core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

MIN_KEY_BYTES = 16


def load_cluster_key(path: Path) -> bytes:
    """Read a key file; white space around the key (an editor's last newline) does not count.

    Raises:
        UsageError: the file cannot be read or holds fewer than 16 bytes.
    """
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise UsageError(f"cannot read the cluster key {path}: {error.strerror}") from error
    if len(key) < MIN_KEY_BYTES:
        raise UsageError(
            f"the cluster key in {path} has {len(key)} bytes; at least {MIN_KEY_BYTES} are needed "
            f"(make one with: openssl rand -hex 32)"
        )
    return key


def derive(key: bytes, purpose: str) -> bytes:
    """32 bytes for one purpose: HMAC-SHA256 as a key derivation function (RFC 5869, expand)."""
    return hmac.new(key, b"pd/" + purpose.encode() + b"\x01", hashlib.sha256).digest()


def curve_keypair(key: bytes) -> tuple[bytes, bytes]:
    """``(public, secret)`` for ZMQ CURVE in Z85. All nodes of a cluster share this one pair, which
    is how each proves to the others that it knows the key."""
    import zmq
    from zmq.utils import z85

    secret: bytes = z85.encode(derive(key, "curve"))
    public: bytes = zmq.curve_public(secret)
    return public, secret


def admin_token(key: bytes) -> str:
    """Bearer token for the nodes' administrative HTTP endpoints."""
    return derive(key, "admin").hex()
