"""Client of the handshake: introduces a decode node to a prefill node."""

from __future__ import annotations

import errno
import time

import httpx
import msgspec

from pd.bootstrap.server import HANDSHAKE_PATH, MAX_BODY_BYTES
from pd.core.cluster_key import bootstrap_key
from pd.core.errors import HandshakeError, PDError, UnavailableError
from pd.core.messages import ErrorInfo
from pd.core.node_info import NodeInfo, check_compatible
from pd.core.signed_requests import (
    EXPECTED_HEADER,
    SIGNATURE_HEADER,
    check_reply,
    signed_headers,
)
from pd.core.starvation import CEILING_SECONDS, Patience

# Another attempt has at least so long to connect, and to read.
_LEAST_SECONDS = 0.5
# Pause before a host that cannot be reached is tried again.
_PAUSE_SECONDS = 0.2
# NOTE: decoders are made while one thread runs. msgspec crashes when two threads learn the same
# type at once, as they do in ``decode(..., type=T)`` the first time (seen with 0.22).
_error_decoder = msgspec.json.Decoder(ErrorInfo)
_node_decoder = msgspec.json.Decoder(NodeInfo)


def handshake(
    bootstrap_url: str,
    own: NodeInfo,
    *,
    expected_instance: str,
    cluster_key: bytes | None = None,
    timeout: float = 2.0,
    patience: Patience | None = None,
) -> NodeInfo:
    """Shake hands with the prefill node at ``bootstrap_url``; blocks for ``timeout`` s at most.

    ``patience`` extends that: while one of the two nodes lacks a CPU, an attempt that timed out is
    followed by another, which has as long as they lacked one so far. A host that cannot be reached
    is tried again within ``timeout``: the kernel says so when its search for the neighbour ends,
    also of a search that began while a link was cut that has come back since.

    Raises:
        HandshakeError: the nodes cannot work together (the message names both values), another
            instance answers than expected, or one of the two lacks the cluster key.
        UnavailableError: no process answers, or the node is starting or draining; worth a new try.
    """
    since = time.monotonic()
    attempt = timeout
    while True:
        try:
            return _attempt(bootstrap_url, own, expected_instance, cluster_key, attempt)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            # UnicodeError: a host that cannot be a name.
            rest = since + timeout - _PAUSE_SECONDS - time.monotonic()
            if _is_unreachable(error) and rest > _LEAST_SECONDS:
                time.sleep(_PAUSE_SECONDS)
                attempt = rest
                continue
            late = isinstance(error, httpx.TimeoutException)
            # NOTE: half of it is the limit of one step, after which the first attempt may end.
            limit = timeout / 2
            if not late or patience is None or patience.is_over(since, limit, expected_instance):
                raise UnavailableError(
                    f"no handshake with prefill node {expected_instance} at {bootstrap_url}: "
                    f"{str(error) or type(error).__name__}"
                ) from error
            left = since + CEILING_SECONDS - time.monotonic()
            delayed = patience.delayed(since, expected_instance)
            # NOTE: little delay must not make a dead node's requests wait for long.
            attempt = 2 * min(max(delayed, _LEAST_SECONDS), max(left, _LEAST_SECONDS))


def _is_unreachable(error: BaseException | None) -> bool:
    """Whether a connection failed because the host's link-layer address was not found."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EHOSTUNREACH:
            return True
        error = error.__cause__ or error.__context__
    return False


def _attempt(
    bootstrap_url: str,
    own: NodeInfo,
    expected_instance: str,
    cluster_key: bytes | None,
    timeout: float,
) -> NodeInfo:
    """Ask once, with a signature of its own. Raises httpx.HTTPError besides."""
    body = msgspec.json.encode(own)
    headers = {"Content-Type": "application/json", EXPECTED_HEADER: expected_instance}
    key = bootstrap_key(cluster_key)
    nonce = ""
    if key is not None:
        authorization, nonce = signed_headers(key, "POST", HANDSHAKE_PATH, expected_instance, body)
        headers |= authorization
    status, signature, content = _post(bootstrap_url, body, headers, timeout)
    # A node that could not verify the request cannot sign its answer to it.
    signed = key is None or status == 401 or check_reply(key, nonce, status, content, signature)
    if not signed:
        raise HandshakeError(f"{bootstrap_url} did not prove that it has the cluster key")
    if status != 200:
        raise _error_of(status, content, bootstrap_url)
    return _checked(content, own, expected_instance, bootstrap_url)


def _post(
    bootstrap_url: str, body: bytes, headers: dict[str, str], timeout: float
) -> tuple[int, str, bytes]:
    """Status, signature and content of the answer; raises httpx.HTTPError."""
    url = bootstrap_url.rstrip("/") + HANDSHAKE_PATH
    deadline = time.monotonic() + timeout
    content = b""
    # httpx bounds each operation; connecting and reading get half of the time each.
    limits = httpx.Timeout(timeout / 2)
    # Without trust_env: a proxy from the environment must not see node traffic.
    with (
        httpx.Client(timeout=limits, trust_env=False) as client,
        client.stream("POST", url, content=body, headers=headers) as response,
    ):
        for part in response.iter_raw():
            content += part
            if len(content) > MAX_BODY_BYTES:
                raise httpx.ReadError(f"the answer exceeds {MAX_BODY_BYTES} bytes")
            if time.monotonic() > deadline:
                raise httpx.ReadTimeout(f"the answer was not complete after {timeout:g} s")
        return response.status_code, response.headers.get(SIGNATURE_HEADER, ""), content


def _error_of(status: int, content: bytes, url: str) -> PDError:
    try:
        message = _error_decoder.decode(content).message
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = f"status {status}"
    if status >= 500:
        return UnavailableError(f"{url} cannot shake hands now: {message}")
    return HandshakeError(f"{url} refused the handshake: {message}")


def _checked(content: bytes, own: NodeInfo, expected_instance: str, url: str) -> NodeInfo:
    try:
        peer = _node_decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HandshakeError(f"{url} did not answer with a NodeInfo: {error}") from error
    if peer.instance_id != expected_instance:
        raise HandshakeError(
            f"instance differs: {expected_instance} was expected, but {peer.instance_id} answers "
            "(the prefill node restarted)"
        )
    check_compatible(peer, own)
    return peer
