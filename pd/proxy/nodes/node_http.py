"""HTTP requests of the proxy to nodes."""

from __future__ import annotations

import asyncio
import logging
import secrets
from http import HTTPStatus
from typing import NamedTuple, Protocol

import httpx
import msgspec

from pd.core.release import describe_mismatch, format_release
from pd.net.cluster_key import derive_admin_key, derive_server_info_key
from pd.net.signed_requests import (
    NONCE_HEADER,
    SIGNATURE_HEADER,
    check_reply,
    sign_headers,
)
from pd.proxy.nodes.node_handle import ServerInfo

# httpx logs every request, and we poll each node every second.
logging.getLogger("httpx").setLevel(logging.WARNING)

POLL_TIMEOUT = 2.0
POST_TIMEOUT = 10.0
# An honest /server_info of a node with hundreds of peers is far smaller.
MAX_ANSWER_BYTES = 1 << 20

UNSIGNED = (
    "did not prove that it has the cluster key: give proxy and node the same --cluster-key-file"
)

_info_decoder = msgspec.json.Decoder(ServerInfo)


class NodeHttpError(Exception):
    """There was no useful answer. The message says why."""


class NotListeningError(NodeHttpError):
    """The port refuses connections."""


class OtherReleaseError(NodeHttpError):
    """The node runs another release of pd. The message names both."""


class _StatedVersion(msgspec.Struct):
    """Fields of ``/server_info`` that every release has."""

    version: str = ""
    protocol: int = 1


_stated_decoder = msgspec.json.Decoder(_StatedVersion)
# Scripted nodes, for example of ``pd-bench proxy``, have no release.
_NO_RELEASE = ("", "0")


class _Answer(NamedTuple):
    status: int
    signature: str
    content: bytes


class NodeAccess(Protocol):
    """Asks nodes for their descriptions, and administrates them."""

    async def close(self) -> None: ...

    async def fetch_server_info(self, url: str) -> ServerInfo:
        """Fetch a node's description. Raises NodeHttpError."""

    async def post_admin(self, url: str, path: str, instance_id: str) -> None:
        """POST to the administration of one instance. Raises NodeHttpError."""


class NodeHttp:
    """HTTP to addresses at which anybody may listen.

    We limit the size and time of answers, and with a cluster key we accept only signed ones.
    """

    def __init__(self, cluster_key: bytes | None) -> None:
        self._admin_key, self._info_key = (
            derive_admin_key(cluster_key),
            derive_server_info_key(cluster_key),
        )
        # We do not follow redirects, because only the operator decides where nodes are. We do not
        # decompress, because a few bytes may become gigabytes.
        self._client = httpx.AsyncClient(
            timeout=POST_TIMEOUT,
            trust_env=False,
            headers={"Accept-Encoding": "identity"},
            limits=httpx.Limits(max_connections=None),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def fetch_server_info(self, url: str) -> ServerInfo:
        """Fetch ``/server_info``. Raises NodeHttpError; for another release OtherReleaseError,
        whatever else the answer contains."""
        nonce = secrets.token_hex(16)
        answer = await self._fetch_answer(
            "GET", f"{url}/server_info", {NONCE_HEADER: nonce}, POLL_TIMEOUT
        )
        _check_answer(answer, self._info_key, nonce)
        try:
            stated = _stated_decoder.decode(answer.content)
            problem = describe_mismatch(format_release(stated.version, stated.protocol))
            if stated.version not in _NO_RELEASE and problem:
                raise OtherReleaseError(problem)
            return _info_decoder.decode(answer.content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise NodeHttpError(str(error)) from None

    async def post_admin(self, url: str, path: str, instance_id: str) -> None:
        """POST to one instance. The signature is valid only for it. Raises NodeHttpError."""
        headers: dict[str, str] = {}
        nonce = ""
        if self._admin_key is not None:
            headers, nonce = sign_headers(self._admin_key, "POST", path, instance_id)
        answer = await self._fetch_answer("POST", url + path, headers, POST_TIMEOUT)
        _check_answer(answer, self._admin_key, nonce)

    async def _fetch_answer(
        self, method: str, url: str, headers: dict[str, str], timeout: float
    ) -> _Answer:
        """Read the whole answer, within ``timeout`` seconds and ``MAX_ANSWER_BYTES``."""
        content = bytearray()
        try:
            async with (
                asyncio.timeout(timeout),
                self._client.stream(method, url, headers=headers) as response,
            ):
                async for part in response.aiter_raw():
                    content += part
                    if len(content) > MAX_ANSWER_BYTES:
                        raise NodeHttpError(f"the answer exceeds {MAX_ANSWER_BYTES} bytes")
        except httpx.ConnectError as error:
            raise NotListeningError(str(error)) from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, TimeoutError) as error:
            # UnicodeError: a host that cannot be a name.
            raise NodeHttpError(str(error) or type(error).__name__) from None
        signature = response.headers.get(SIGNATURE_HEADER, "")
        return _Answer(response.status_code, signature, bytes(content))


def _check_answer(answer: _Answer, key: bytes | None, nonce: str) -> None:
    """Raise NodeHttpError for a refusal, and for an answer without proof of the key."""
    status, signature, content = answer
    if status != HTTPStatus.OK:
        starting = " (it is starting)" if status == HTTPStatus.SERVICE_UNAVAILABLE else ""
        raise NodeHttpError(f"status {status}{starting}")
    if key is not None and not check_reply(key, nonce, status, content, signature):
        raise NodeHttpError(UNSIGNED)
