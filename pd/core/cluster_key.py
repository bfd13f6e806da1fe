"""The shared secret of a deployment (``--cluster-key-file``) and what is derived from it.

Every use gets its own sub-key, so that nothing learned about one helps against another. Keys are
never logged, and none of them is ever sent.
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


def curve_client_keypair(key: bytes) -> tuple[bytes, bytes]:
    """``(public, secret)`` in Z85 for the connecting side of ZMQ CURVE. Proxies and nodes of a
    cluster share this one pair, which is how each proves to a node that it knows the key."""
    return _curve_keypair(key, "curve/client")


def curve_server_keypair(key: bytes, instance_id: str) -> tuple[bytes, bytes]:
    """``(public, secret)`` in Z85 for the sockets on which this instance of a node listens.

    Every instance has its own pair, so a connection that is diverted to another node of the same
    cluster fails, and cannot take the place of its owner's real connection to that node.
    """
    return _curve_keypair(key, f"curve/server/{instance_id}")


def kv_events_server_keypair(key: bytes) -> tuple[bytes, bytes]:
    """``(public, secret)`` in Z85 of the sockets where nodes publish KV events beyond loopback."""
    return _curve_keypair(key, "curve/kv-events/server")


def kv_events_client_keypair(key: bytes) -> tuple[bytes, bytes]:
    """``(public, secret)`` in Z85 of subscribers to KV events. They need not be members of the
    cluster: with this pair nothing else can be reached."""
    return _curve_keypair(key, "curve/kv-events/client")


def _curve_keypair(key: bytes, purpose: str) -> tuple[bytes, bytes]:
    import zmq
    from zmq.utils import z85

    secret: bytes = z85.encode(derive(key, purpose))
    public: bytes = zmq.curve_public(secret)
    return public, secret


def bootstrap_key(key: bytes | None) -> bytes | None:
    """Signs handshakes (:mod:`pd.core.signed_requests`); None without a cluster key."""
    return None if key is None else derive(key, "bootstrap")


def admin_key(key: bytes | None) -> bytes | None:
    """Signs requests to the nodes' administrative HTTP; None without a cluster key."""
    return None if key is None else derive(key, "admin")


def server_info_key(key: bytes | None) -> bytes | None:
    """Key that signs a node's ``/server_info``; None without a cluster key."""
    return None if key is None else derive(key, "server-info")
