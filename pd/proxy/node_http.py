"""Requests of the proxy to nodes over HTTP: for what they are, and to do something."""

from __future__ import annotations

import asyncio
import logging
import secrets
from http import HTTPStatus
from typing import NamedTuple

import httpx
import msgspec

from pd.core.cluster_key import admin_key, server_info_key
from pd.core.signed_requests import (
    NONCE_HEADER,
    SIGNATURE_HEADER,
    check_reply,
    signed_headers,
)
from pd.proxy.node_handle import ServerInfo

# httpx logs every request, and each node is polled every second.
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
    """No answer, or none that is of use; the message says why."""


class NotListeningError(NodeHttpError):
    """Nobody listens there."""


class _Answer(NamedTuple):
    status: int
    signature: str
    content: bytes


class NodeHttp:
    """HTTP to addresses at which anybody may listen: answers are bounded in size and time, and with
    a cluster key only those of its holders count."""

    def __init__(self, cluster_key: bytes | None) -> None:
        self._admin_key, self._info_key = admin_key(cluster_key), server_info_key(cluster_key)
        # Redirects are not followed: where a node is is for the operator to say. Nor is anything
        # decompressed: a few bytes may become gigabytes.
        self._client = httpx.AsyncClient(
            timeout=POST_TIMEOUT,
            trust_env=False,
            headers={"Accept-Encoding": "identity"},
            limits=httpx.Limits(max_connections=None),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def server_info(self, url: str) -> ServerInfo:
        """The ``/server_info`` that answers at a node's URL. Raises NodeHttpError."""
        nonce = secrets.token_hex(16)
        answer = await self._ask("GET", f"{url}/server_info", {NONCE_HEADER: nonce}, POLL_TIMEOUT)
        _check(answer, self._info_key, nonce)
        try:
            return _info_decoder.decode(answer.content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise NodeHttpError(str(error)) from None

    async def post(self, url: str, path: str, instance_id: str) -> None:
        """Have an instance do something: the request is signed for it alone. Raises
        NodeHttpError."""
        headers: dict[str, str] = {}
        nonce = ""
        if self._admin_key is not None:
            headers, nonce = signed_headers(self._admin_key, "POST", path, instance_id)
        answer = await self._ask("POST", url + path, headers, POST_TIMEOUT)
        _check(answer, self._admin_key, nonce)

    async def _ask(self, method: str, url: str, headers: dict[str, str], timeout: float) -> _Answer:
        """The whole answer, within ``timeout`` seconds and ``MAX_ANSWER_BYTES``."""
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


def _check(answer: _Answer, key: bytes | None, nonce: str) -> None:
    """Raise NodeHttpError for a refusal, and for an answer without proof of the key."""
    status, signature, content = answer
    if status != HTTPStatus.OK:
        starting = " (it is starting)" if status == HTTPStatus.SERVICE_UNAVAILABLE else ""
        raise NodeHttpError(f"status {status}{starting}")
    if key is not None and not check_reply(key, nonce, status, content, signature):
        raise NodeHttpError(UNSIGNED)
