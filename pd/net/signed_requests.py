"""HTTP requests and answers, signed with a key that client and server share.

A request's ``Authorization`` carries a timestamp, a nonce and an HMAC-SHA256. The HMAC covers both,
the whole request and the instance it is addressed to. The server accepts each nonce once and only
within ``WINDOW_SECONDS``. A recorded request is therefore useless later or at another process,
whatever happens to the server's clock. The answer's signature covers the same nonce, so each side
proves to the other that it has the key. We never send the key itself.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEME = "PD-HMAC"
SIGNATURE_HEADER = "PD-Signature"
EXPECTED_HEADER = "PD-Expected-Instance"
# We do not sign a request that changes nothing. It may carry a nonce to ask for a signed answer.
NONCE_HEADER = "PD-Nonce"
MAX_NONCE_CHARACTERS = 64
# Seconds by which hosts' clocks may differ.
WINDOW_SECONDS = 60.0
_MAX_NONCES = 65536


def _compute_mac(key: bytes, *parts: str | bytes) -> str:
    # We hash each part, because then different lists of parts never sign the same bytes.
    digests = [hashlib.sha256(p.encode() if isinstance(p, str) else p).digest() for p in parts]
    return hmac.new(key, b"".join(digests), hashlib.sha256).hexdigest()


def read_target(scope: Mapping[str, Any]) -> str:
    """Return path and query of an ASGI request as its client sent and signed them.

    NOTE: We do not use ``request.url``, because older versions of Starlette build it from the
    ``Host`` header. It could then name another path than the routed one.
    """
    path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def sign_request(key: bytes, method: str, path: str, expected: str, body: bytes) -> tuple[str, str]:
    """Return the ``Authorization`` header and its nonce.

    Args:
        path: path and query exactly as sent (:func:`read_target`).
        expected: instance that the request is for.
    """
    stamp, nonce = repr(time.time()), secrets.token_hex(16)
    mac = _compute_mac(key, "request", stamp, nonce, method, path, expected, body)
    return f"{SCHEME} {stamp} {nonce} {mac}", nonce


def sign_headers(
    key: bytes, method: str, path: str, expected: str, body: bytes = b""
) -> tuple[dict[str, str], str]:
    """Return the headers of a signed request to the instance ``expected``, and its nonce."""
    authorization, nonce = sign_request(key, method, path, expected, body)
    return {"Authorization": authorization, EXPECTED_HEADER: expected}, nonce


def sign_reply(key: bytes, nonce: str, status: int, body: bytes) -> str:
    """Sign the answer to the request with this nonce."""
    return _compute_mac(key, "reply", nonce, str(status), body)


def check_reply(key: bytes, nonce: str, status: int, body: bytes, signature: str) -> bool:
    """Return whether a holder of the key answered."""
    genuine = sign_reply(key, nonce, status, body)
    # NOTE: We compare bytes, because `compare_digest` takes only ASCII strings and a header may
    # hold anything.
    return hmac.compare_digest(genuine.encode(), signature.encode(errors="replace"))


class RequestVerifier:
    """Checks ``Authorization`` headers, and accepts each nonce once.

    We do not forget a nonce because of its age: if somebody set the clock back, its request would
        be
    new again. Signed requests are rare, so there is room for days of them. When the room is used
    up, we forget the oldest nonce and refuse all requests as old as its request.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._lock = threading.Lock()
        # Timestamps of requests by nonce, in order of arrival.
        self._seen: dict[str, float] = {}
        # We may have forgotten requests with this timestamp or an older one.
        self._forgotten = -math.inf
        # Wall-clock time at which the monotonic clock showed 0.
        self._offset = time.time() - time.monotonic()

    def verify_request(
        self, authorization: str, method: str, path: str, expected: str, body: bytes
    ) -> tuple[str, str]:
        """Return ``(nonce, "")`` for a genuine request, otherwise ``("", reason)``."""
        scheme, *fields = authorization.split(" ")
        if scheme != SCHEME or len(fields) != 3:
            return "", f"this node has a cluster key and needs a {SCHEME} Authorization"
        stamp, nonce, mac = fields
        genuine = _compute_mac(self.key, "request", stamp, nonce, method, path, expected, body)
        if not hmac.compare_digest(genuine.encode(), mac.encode(errors="replace")):
            return "", "the request was not signed with this node's cluster key"
        sent = float(stamp)
        age = self._measure_age(sent)
        if not abs(age) <= WINDOW_SECONDS:
            return "", (
                f"the request was signed {age:.0f} s ago (limit {WINDOW_SECONDS:.0f} s); "
                "synchronize the hosts' clocks"
            )
        if not self._is_first_use(nonce, sent):
            return "", "the request was seen before"
        return nonce, ""

    def _measure_age(self, sent: float) -> float:
        """Return the seconds since ``sent``.

        We measure with this host's clock, and without the steps it made since the start. We return
        the smaller age, because either time may be the wrong one.
        """
        return min(time.time() - sent, self._offset + time.monotonic() - sent, key=abs)

    def _is_first_use(self, nonce: str, sent: float) -> bool:
        with self._lock:
            if nonce in self._seen or sent <= self._forgotten:
                return False
            if len(self._seen) >= _MAX_NONCES:
                oldest = next(iter(self._seen))
                self._forgotten = max(self._forgotten, self._seen.pop(oldest))
            self._seen[nonce] = sent
            return True
