"""The shared secret of a deployment (``--cluster-key-file``) and the keys derived from it.

We derive a sub-key for each use, so knowledge about one does not help against another. We never log
or send a key.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import logging
import math
import string
from typing import TYPE_CHECKING

from pd.core.errors import UsageError
from pd.util.secret_files import find_exposure

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

# ``(public, secret)`` in Z85.
KeyPair = tuple[bytes, bytes]
MIN_KEY_BYTES = 16
# A key needs this many bits, because any stranger can have a node sign something and then guess the
# key offline.
_ENOUGH_BITS = 96
_LEAST_VARIETY = 8
_REMEDY = "make one with: openssl rand -hex 32"


def load_cluster_key(path: Path) -> bytes:
    """Read a key file, without white space around the key (an editor's last newline).

    Logs a warning if the key may be guessed or other users can use the file.

    Raises:
        UsageError: the file cannot be read or holds fewer than 16 bytes.
    """
    content = f"the cluster key in {path}"
    try:
        key = path.read_bytes().strip()
        warnings = find_exposure(path, content)
    except OSError as error:
        raise UsageError(f"cannot read the cluster key {path}: {error.strerror}") from error
    if len(key) < MIN_KEY_BYTES:
        raise UsageError(f"{content}: {len(key)} bytes (at least {MIN_KEY_BYTES}); {_REMEDY}")
    if weakness := find_weakness(key):
        warnings.append(
            f"{content} can be guessed by anybody who reaches a node: {weakness}; {_REMEDY}"
        )
    for warning in warnings:
        logger.warning("%s", warning)
    return key


def find_weakness(key: bytes) -> str:
    """Return why a key is probably not random, or ``""``. The reason does not reveal the key.

    We do not notice words mixed with digits.
    """
    period = (key + key).find(key, 1)
    if period < len(key):
        return f"it repeats the same {period} bytes"
    steps = {(after - before) % 256 for before, after in itertools.pairwise(key)}
    if min(len(set(key)), len(steps)) < _LEAST_VARIETY:
        return "it has too few different characters"
    text = key.decode("latin-1")
    if set(text) <= set(string.hexdigits):
        bits = len(text) * 4.0
    elif text.isascii() and text.isprintable():
        bits = len(text) * math.log2(64)
        if " " in text or not any(character.isdigit() for character in text):
            return "it seems to be made of words"
    else:
        bits = len(key) * 8.0
    if bits < _ENOUGH_BITS:
        return f"it has at most {bits:.0f} bits, not {_ENOUGH_BITS}"
    return ""


def derive_key(key: bytes, purpose: str) -> bytes:
    """Derive 32 bytes for one purpose, with HMAC-SHA256 (RFC 5869, expand)."""
    return hmac.new(key, b"pd/" + purpose.encode() + b"\x01", hashlib.sha256).digest()


def derive_client_keypair(key: bytes) -> KeyPair:
    """Derive the pair for the connecting side of ZMQ CURVE.

    All proxies and nodes of a cluster share it, and prove with it that they know the key.
    """
    return _derive_keypair(key, "curve/client")


def derive_server_keypair(key: bytes, instance_id: str) -> KeyPair:
    """Derive the pair for the sockets on which this instance of a node listens.

    Every instance has its own pair. A connection diverted to another node of the cluster therefore
    fails, and cannot replace its owner's real connection to that node.
    """
    return _derive_keypair(key, f"curve/server/{instance_id}")


def derive_kv_publisher_keypair(key: bytes) -> KeyPair:
    """Derive the pair of the sockets where nodes publish KV events beyond loopback."""
    return _derive_keypair(key, "curve/kv-events/server")


def derive_kv_subscriber_keypair(key: bytes) -> KeyPair:
    """Derive the pair of subscribers to KV events.

    You can give it to programs outside the cluster, because it opens nothing else.
    """
    return _derive_keypair(key, "curve/kv-events/client")


def derive_control_keypairs(key: bytes, run: str) -> tuple[KeyPair, KeyPair]:
    """Derive the pairs of a deployment's control service and of its operator, for one run.

    Args:
        key: the operator's key, not the cluster's.
    """
    return _derive_keypair(key, f"control/{run}/service"), _derive_keypair(key, f"control/{run}")


def _derive_keypair(key: bytes, purpose: str) -> KeyPair:
    import zmq
    from zmq.utils import z85

    secret: bytes = z85.encode(derive_key(key, purpose))
    public: bytes = zmq.curve_public(secret)
    return public, secret


def derive_bootstrap_key(key: bytes | None) -> bytes | None:
    """Derive the key that signs handshakes (:mod:`pd.net.signed_requests`)."""
    return None if key is None else derive_key(key, "bootstrap")


def derive_admin_key(key: bytes | None) -> bytes | None:
    """Derive the key that signs requests to the nodes' administrative HTTP."""
    return None if key is None else derive_key(key, "admin")


def derive_server_info_key(key: bytes | None) -> bytes | None:
    """Derive the key that signs a node's ``/server_info``."""
    return None if key is None else derive_key(key, "server-info")
