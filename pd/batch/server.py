"""The server of a batch over HTTP: sends one attempt at one request."""

from __future__ import annotations

import asyncio
import ssl

import httpx

from pd import __version__
from pd.batch import attempts
from pd.batch.attempts import BatchAttempt, make_attempt, make_failure
from pd.core.addresses import parse_base_url
from pd.core.errors import SetupError, UsageError

_CONNECT_SECONDS = 10.0
# Shorter than servers keep idle connections, so none closes one while we send.
_IDLE_SECONDS = 2.0


class BatchServer:
    """A server with OpenAI's API.

    Args:
        url: base address, with or without ``/v1``.
        api_key: bearer token; None for none. No message shows it.
        timeout: seconds for one attempt, from connecting to the end of the answer.
        concurrency: most connections.

    Raises UsageError for an invalid address or key.
    """

    def __init__(self, url: str, api_key: str | None, timeout: float, concurrency: int) -> None:
        self.url = parse_base_url(url, "--url", "--api-key")
        self._timeout = timeout
        headers = {"Accept-Encoding": "identity", "User-Agent": f"pd-launch-batch/{__version__}"}
        if api_key is not None:
            if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
                raise UsageError("the API key must consist of printable ASCII characters")
            headers["Authorization"] = f"Bearer {api_key}"
        tls = ssl.create_default_context() if self.url.startswith("https:") else False
        # We ignore proxies of the environment, so the key reaches only the named server.
        self._client = httpx.AsyncClient(
            headers=headers,
            verify=tls,
            trust_env=False,
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=concurrency, keepalive_expiry=_IDLE_SECONDS),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def check_models(self) -> None:
        """Ask for the models. Raises SetupError if no server with OpenAI's API answers."""
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                answer = await self._client.get(f"{self.url}/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, TimeoutError) as error:
            raise SetupError(f"cannot reach {self.url}: {_describe_error(error)}") from None
        self._check_access(answer.status_code)
        if answer.is_redirect:
            raise SetupError(f"{self.url} redirects to another address; name that one")
        if answer.status_code == 404:
            raise SetupError(f"{self.url} has no OpenAI API: {self.url}/v1/models is not there")

    async def send_request(self, path: str, content: bytes, name: str) -> BatchAttempt:
        """Send a request once, with ``name`` as its X-Request-Id.

        Raises SetupError if the server rejects the API key.
        """
        headers = {"Content-Type": "application/json", "X-Request-Id": name}
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._client.stream(
                    "POST", self.url + path, content=content, headers=headers
                ) as answer,
            ):
                self._check_access(answer.status_code)
                body = bytearray()
                async for part in answer.aiter_bytes():
                    body += part
                    if len(body) > attempts.MAX_ANSWER_BYTES:
                        limit = f"an answer has at most {attempts.MAX_ANSWER_BYTES >> 20} MiB"
                        return make_failure("answer_too_long", limit)
                return make_attempt(answer.status_code, answer.headers, bytes(body), name)
        except TimeoutError:
            return make_failure("timeout", f"no answer within {self._timeout:g} s")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            message = f"cannot reach {self.url}: {_describe_error(error)}"
            failure = make_failure("connection_failed", message)
            return failure._replace(try_again=True, unreachable=True)
        except httpx.TransportError as error:
            message = f"the connection was lost: {_describe_error(error)}"
            return make_failure("connection_lost", message)._replace(try_again=True)
        except httpx.HTTPError as error:
            return make_failure("invalid_answer", _describe_error(error))

    def _check_access(self, status: int) -> None:
        if status in (401, 403):
            raise SetupError(
                f"{self.url} refuses the API key, or wants one (HTTP status {status}); give it as "
                "PD_API_KEY or --api-key"
            )


def _describe_error(error: Exception) -> str:
    return str(error) or type(error).__name__
