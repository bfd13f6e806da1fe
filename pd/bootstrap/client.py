"""Client of the handshake: introduces a decode node to a prefill node."""

from __future__ import annotations

import errno
import time
from http import HTTPStatus
from typing import TYPE_CHECKING

import httpx
import msgspec

from pd.bootstrap.server import HANDSHAKE_PATH, MAX_BODY_BYTES
from pd.core.errors import HandshakeError, PDError, UnavailableError
from pd.core.messages import ErrorInfo
from pd.core.node_info import check_compatible, decode_node_info
from pd.core.release import RELEASE, REMEDY, describe_release
from pd.net.cluster_key import derive_bootstrap_key
from pd.net.signed_requests import (
    EXPECTED_HEADER,
    SIGNATURE_HEADER,
    check_reply,
    sign_headers,
)
from pd.util.starvation import CEILING_SECONDS, Patience

if TYPE_CHECKING:
    from pd.core.node_info import NodeInfo

# Least time of another attempt to connect, and to read.
_LEAST_SECONDS = 0.5
# Pause before we try an unreachable host again.
_PAUSE_SECONDS = 0.2
# NOTE: We make the decoder at import, while one thread runs, because msgspec 0.22 crashes if two
# threads inspect a type at once. They do so in their first ``decode(..., type=T)``.
_error_decoder = msgspec.json.Decoder(ErrorInfo)


def handshake(
    bootstrap_url: str,
    own: NodeInfo,
    *,
    expected_instance: str,
    cluster_key: bytes | None = None,
    timeout: float = 2.0,
    patience: Patience | None = None,
) -> NodeInfo:
    """Shake hands with the prefill node at ``bootstrap_url``. Blocks for at most ``timeout`` s.

    ``patience`` extends this time: while one of the nodes lacks a CPU, we try again after a
    timeout. The new attempt has as much time as the nodes have lacked a CPU so far. We also retry
    an unreachable host within ``timeout``, because the kernel's neighbour search may have begun
    before a cut link came back.

    Raises:
        HandshakeError: the nodes cannot work together (the message names both values), an
            unexpected instance answers, or one of the two lacks the cluster key.
        UnavailableError: no process answers, or the node is starting or draining; try again.
    """
    since = time.monotonic()
    attempt = timeout
    while True:
        try:
            return _ask_once(bootstrap_url, own, expected_instance, cluster_key, attempt)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            # UnicodeError: the host is not a valid name.
            rest = since + timeout - _PAUSE_SECONDS - time.monotonic()
            if _is_unreachable(error) and rest > _LEAST_SECONDS:
                time.sleep(_PAUSE_SECONDS)
                attempt = rest
                continue
            late = isinstance(error, httpx.TimeoutException)
            # NOTE: Each step has half of the time, so the first attempt may end after this half.
            limit = timeout / 2
            if not late or patience is None or patience.is_over(since, limit, expected_instance):
                raise UnavailableError(
                    f"no handshake with prefill node {expected_instance} at {bootstrap_url}: "
                    f"{str(error) or type(error).__name__}"
                ) from error
            left = since + CEILING_SECONDS - time.monotonic()
            delayed = patience.compute_extension(since, expected_instance)
            # NOTE: After a short delay, requests of a dead node must not wait for long.
            attempt = 2 * min(max(delayed, _LEAST_SECONDS), max(left, _LEAST_SECONDS))


def _is_unreachable(error: BaseException | None) -> bool:
    """Return whether a connection failed because the host's link-layer address was not found."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EHOSTUNREACH:
            return True
        error = error.__cause__ or error.__context__
    return False


def _ask_once(
    bootstrap_url: str,
    own: NodeInfo,
    expected_instance: str,
    cluster_key: bytes | None,
    timeout: float,
) -> NodeInfo:
    """Make one attempt, with its own signature. Raises httpx.HTTPError, too."""
    body = msgspec.json.encode(own)
    headers = {"Content-Type": "application/json", EXPECTED_HEADER: expected_instance}
    key = derive_bootstrap_key(cluster_key)
    nonce = ""
    if key is not None:
        authorization, nonce = sign_headers(key, "POST", HANDSHAKE_PATH, expected_instance, body)
        headers |= authorization
    status, signature, content = _post_body(bootstrap_url, body, headers, timeout)
    # A node that cannot verify our request (401) cannot sign its answer either.
    signed = key is None or status == 401 or check_reply(key, nonce, status, content, signature)
    if not signed:
        raise HandshakeError(f"{bootstrap_url} did not prove that it has the cluster key")
    if status != 200:
        raise _make_error(status, content, bootstrap_url)
    try:
        peer = decode_node_info(content, own)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HandshakeError(f"{bootstrap_url} did not answer with a NodeInfo: {error}") from error
    if peer.instance_id != expected_instance:
        raise HandshakeError(
            f"instance differs: {expected_instance} was expected, but {peer.instance_id} answers "
            "(the prefill node restarted)"
        )
    check_compatible(peer, own)
    return peer


def _post_body(
    bootstrap_url: str, body: bytes, headers: dict[str, str], timeout: float
) -> tuple[int, str, bytes]:
    """Return status, signature and content of the answer. Raises httpx.HTTPError."""
    url = bootstrap_url.rstrip("/") + HANDSHAKE_PATH
    deadline = time.monotonic() + timeout
    content = b""
    # httpx limits each operation, so we give connecting and reading half of the time each.
    limits = httpx.Timeout(timeout / 2)
    # No trust_env, because a proxy from the environment must not see node traffic.
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


def _make_error(status: int, content: bytes, url: str) -> PDError:
    try:
        message = _error_decoder.decode(content).message
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = f"status {status}"
    if status >= 500:
        return UnavailableError(f"{url} cannot shake hands now: {message}")
    if status == HTTPStatus.BAD_REQUEST:
        # A node of another release may only complain about an unknown field.
        ours = describe_release(RELEASE)
        message += f" (if it runs another release than this node, {ours}, {REMEDY})"
    return HandshakeError(f"{url} refused the handshake: {message}")
