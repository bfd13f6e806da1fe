"""The load processes of a run, and requests of the harness itself.

``python -m pd.bench.load.client`` sends such requests from a load host: it reads JSON lines with
the arguments of :func:`fetch_from_here`, and answers each with a line that has ``status`` and
``text``, or ``error``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import httpx

from pd.bench.load.target import make_tls_context
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
        """Send a GET, or a POST if there is a ``body`` of JSON; return status and text.

        Raises SetupError if no server answers.
        """


def fetch_from_here(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    timeout: float = 30.0,
) -> tuple[int, str]:
    """Send a request from this machine, see :class:`Fetch`.

    We ignore HTTP proxies of the environment, so it takes the same path as the load.
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
            verify=make_tls_context() if url.startswith("https:") else False,
            trust_env=False,
        )
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise SetupError(f"cannot reach {url}: {error or repr(error)}") from error
    return answer.status_code, answer.text


@dataclass(frozen=True)
class LoadClient:
    """Load processes of a run, and the harness's own way to the server.

    Attributes:
        watch: called about once a second during a run; raises an error to end the run.
    """

    places: tuple[LoadPlace, ...]
    fetch: Fetch = fetch_from_here
    watch: Callable[[], None] = lambda: None


def main() -> int:
    """Answer until standard input ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        body = request["body"]
        try:
            status, text = fetch_from_here(
                request["url"],
                headers=request["headers"],
                body=None if body is None else body.encode(),
                timeout=request["timeout"],
            )
            answer = {"status": status, "text": text}
        except SetupError as error:
            answer = {"error": error.message}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
