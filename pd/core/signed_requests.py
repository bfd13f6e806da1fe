"""HTTP requests signed with a key that client and server share, and their signed answers.

A request's ``Authorization`` carries a timestamp, a nonce and an HMAC-SHA256 over both and all that
the request says, the instance that it is for included. The server accepts each nonce once and only
within ``WINDOW_SECONDS``, so a request that was recorded on the network is of no use later or at
another process. The answer is signed over the same nonce, so that each side knows that the other
has the key. The key itself never crosses the network.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEME = "PD-HMAC"
SIGNATURE_HEADER = "PD-Signature"
EXPECTED_HEADER = "PD-Expected-Instance"
# A request that changes nothing is not signed, but may ask with a nonce for a signed answer.
NONCE_HEADER = "PD-Nonce"
MAX_NONCE_CHARACTERS = 64
# Hosts' clocks may differ by this much.
WINDOW_SECONDS = 60.0
_MAX_NONCES = 65536


def _mac(key: bytes, *parts: str | bytes) -> str:
    # Hashed one by one, so that no two different lists of parts sign the same bytes.
    digests = [hashlib.sha256(p.encode() if isinstance(p, str) else p).digest() for p in parts]
    return hmac.new(key, b"".join(digests), hashlib.sha256).hexdigest()


def request_target(scope: Mapping[str, Any]) -> str:
    """Path and query of an ASGI request as they came, which its client signed.

    NOTE: not from ``request.url``, which older versions of Starlette put together from the ``Host``
    header, so that it could name another path than the one that is routed.
    """
    path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def sign_request(key: bytes, method: str, path: str, expected: str, body: bytes) -> tuple[str, str]:
    """The ``Authorization`` header and the nonce in it.

    Args:
        path: of the request, with its query, as they are sent (:func:`request_target`).
        expected: instance that it is for.
    """
    stamp, nonce = repr(time.time()), secrets.token_hex(16)
    mac = _mac(key, "request", stamp, nonce, method, path, expected, body)
    return f"{SCHEME} {stamp} {nonce} {mac}", nonce


def signed_headers(
    key: bytes, method: str, path: str, expected: str, body: bytes = b""
) -> tuple[dict[str, str], str]:
    """Headers of a signed request to the instance ``expected``, and its nonce."""
    authorization, nonce = sign_request(key, method, path, expected, body)
    return {"Authorization": authorization, EXPECTED_HEADER: expected}, nonce


def sign_reply(key: bytes, nonce: str, status: int, body: bytes) -> str:
    """The signature of an answer to the request with this nonce."""
    return _mac(key, "reply", nonce, str(status), body)


def check_reply(key: bytes, nonce: str, status: int, body: bytes, signature: str) -> bool:
    """Whether a holder of the key answered."""
    genuine = sign_reply(key, nonce, status, body)
    # NOTE: bytes, since a header may hold anything and only strings that are ASCII compare.
    return hmac.compare_digest(genuine.encode(), signature.encode(errors="replace"))


class RequestVerifier:
    """Checks ``Authorization`` headers and remembers nonces as long as they could be replayed."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}

    def verify(
        self, authorization: str, method: str, path: str, expected: str, body: bytes
    ) -> tuple[str, str]:
        """``(nonce, "")`` for a genuine request, otherwise ``("", reason)``."""
        scheme, *fields = authorization.split(" ")
        if scheme != SCHEME or len(fields) != 3:
            return "", f"this node has a cluster key and needs a {SCHEME} Authorization"
        stamp, nonce, mac = fields
        genuine = _mac(self.key, "request", stamp, nonce, method, path, expected, body)
        if not hmac.compare_digest(genuine.encode(), mac.encode(errors="replace")):
            return "", "the request was not signed with this node's cluster key"
        now = time.time()
        if not abs(now - float(stamp)) <= WINDOW_SECONDS:
            return "", f"the request was signed {now - float(stamp):.0f} s ago (clocks differ?)"
        if not self._first_use(nonce, now):
            return "", "the request was seen before"
        return nonce, ""

    def _first_use(self, nonce: str, now: float) -> bool:
        with self._lock:
            if nonce in self._seen:
                return False
            # In order of arrival; a nonce is dropped when its time stamp is too old anyway.
            for old in list(self._seen):
                if now - self._seen[old] <= 2 * WINDOW_SECONDS:
                    break
                del self._seen[old]
            if len(self._seen) >= _MAX_NONCES:
                return False
            self._seen[nonce] = now
            return True
