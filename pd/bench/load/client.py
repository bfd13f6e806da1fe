"""The load processes of a run, and the requests that the harness itself makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import httpx

from pd.bench.load.target import tls_context
from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pd.bench.load.load_process import LoadPlace


class Fetch(Protocol):
    """One HTTP request of the harness itself."""

    def __call__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        timeout: float = 30.0,
    ) -> tuple[int, str]:
        """Status and text of the answer to a GET, or with a ``body`` of JSON to a POST.

        Raises SetupError if no server answers.
        """


def fetch_from_here(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    timeout: float = 30.0,
) -> tuple[int, str]:
    """A request from this machine, see :class:`Fetch`.

    It takes the way of the load: to the server that was named, past every HTTP proxy of the
    environment.
    """
    method = "GET" if body is None else "POST"
    kind = {} if body is None else {"Content-Type": "application/json"}
    try:
        answer = httpx.request(
            method,
            url,
            content=body,
            headers=kind | dict(headers or {}),
            timeout=timeout,
            verify=tls_context() if url.startswith("https:") else False,
            trust_env=False,
        )
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise SetupError(f"cannot reach {url}: {error or repr(error)}") from error
    return answer.status_code, answer.text


def _nothing() -> None:
    """Every run goes on."""


@dataclass(frozen=True)
class LoadClient:
    """Load processes of a run, and the way of the harness itself to the server.

    Attributes:
        watch: called about once a second during a run; an error that it raises ends the run.
    """

    places: tuple[LoadPlace, ...]
    fetch: Fetch = fetch_from_here
    watch: Callable[[], None] = _nothing
