"""Runs a command on the head from outside of Ray, by Ray's Jobs REST API: bounded HTTP and JSON."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from pd.core.addresses import is_of_this_machine, resolve_host
from pd.core.errors import SetupError, UsageError
from pd.net.bounded_http import fetch
from pd.util.printable import escape_text

_DASHBOARD_PORT, _POLL_SECONDS, _SHOWN_CHARACTERS = 8265, 0.25, 500
# Bytes and seconds of an answer.
_BOUNDS = (4 << 20, 60.0)


class JobAnswer(msgspec.Struct):
    """The parts of an answer about a job or its log, as far as we need them."""

    status: str = ""
    message: str | None = ""
    logs: str | None = ""


_ANSWERS = msgspec.json.Decoder(JobAnswer)


class JobsServer:
    """The dashboard of a Ray cluster at ``[https://]HOST[:PORT]``. Raises UsageError.

    Attributes:
        url, host: with the given name, and its IP address.
        is_fenced: whether nobody on the network reads our requests: it is on this machine, perhaps
            as the end of a tunnel, or speaks TLS.
    """

    def __init__(self, address: str, token: str) -> None:
        url = urlsplit(address if "://" in address else f"http://{address}")
        try:
            port = url.port or _DASHBOARD_PORT
            self.host = resolve_host(url.hostname or "")
        except (OSError, ValueError) as error:
            raise UsageError(f"Ray cluster {escape_text(address)}: {error}") from None
        self.url = f"{url.scheme}://{url.netloc.removesuffix(f':{port}')}:{port}"
        self.is_fenced = url.scheme == "https" or is_of_this_machine(self.host)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def run_command(self, command: str, seconds: float) -> str:
        """Run a command to its end and return its output. Raises SetupError if it fails."""
        job, deadline = f"pd-{secrets.token_hex(16)}", time.monotonic() + seconds
        self._fetch_answer("/api/jobs/", {"entrypoint": command, "submission_id": job})
        while (answer := self._fetch_answer(f"/api/jobs/{job}")).status in ("PENDING", "RUNNING"):
            if time.monotonic() > deadline:
                self._fetch_answer(f"/api/jobs/{job}/stop", {})
                raise self._make_error(f"job {job} did not end in {seconds:g} s")
            time.sleep(_POLL_SECONDS)
        if answer.status != "SUCCEEDED":
            last_line = (answer.message or "").strip().rpartition("\n")[2]
            raise self._make_error(f"job {job}: {last_line or answer.status}")
        return self._fetch_answer(f"/api/jobs/{job}/logs").logs or ""

    def _fetch_answer(self, path: str, content: dict[str, str] | None = None) -> JobAnswer:
        data = None if content is None else msgspec.json.encode(content)
        try:
            status, body = fetch(self.url + path, *_BOUNDS, content=data, headers=self._headers)
            if status != 200:
                raise self._make_error(f"status {status}: {body.decode(errors='replace')}")
            return _ANSWERS.decode(body)
        except (OSError, ValueError) as error:
            problem = f"{str(error)[:200]}; is this the dashboard, not 6379?"
            raise self._make_error(problem) from None

    def _make_error(self, problem: str) -> SetupError:
        return SetupError(f"Ray cluster {self.url}: {escape_text(problem[:_SHOWN_CHARACTERS])}")


def read_token() -> str:
    """Read Ray's token from where Ray's programs look for it; empty if there is none."""
    mode, token = os.environ.get("RAY_AUTH_MODE", "token"), os.environ.get("RAY_AUTH_TOKEN", "")
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    try:
        return token or (path.read_text().strip() if mode == "token" and path.exists() else "")
    except (OSError, ValueError) as error:
        raise SetupError(f"cannot read Ray's token {path}: {error}") from None
