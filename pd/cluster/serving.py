"""Asks a layout's proxy, from its own host, about itself and its nodes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from pd.core.addresses import in_url
from pd.core.brief import shorten
from pd.core.errors import SetupError

if TYPE_CHECKING:
    from pd.cluster.host import Host
    from pd.cluster.protocol import Fetched

_ASK_SECONDS = 5.0
_MESSAGE_CHARACTERS = 300


class Readiness(NamedTuple):
    """Whether the proxy can serve; otherwise ``reason`` says what is missing."""

    ready: bool
    reason: str = ""


def ask_readiness(host: Host, url: str) -> Readiness:
    """Ask a proxy. One that does not answer is not ready."""
    try:
        answer = host.read_own(f"{url}/readiness", _ASK_SECONDS)
    except SetupError as error:
        return Readiness(False, error.message)
    if answer.status == 200:
        return Readiness(True)
    return Readiness(False, message_of(answer))


def message_of(answer: Fetched) -> str:
    """Return the message in an answer of a proxy that is an error."""
    try:
        message = str(json.loads(answer.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"it answered {answer.status}"
    return shorten(message, _MESSAGE_CHARACTERS)


def ask_workers(host: Host, url: str) -> dict[str, bool]:
    """URLs of a proxy's nodes, and whether it can use them; empty if it does not answer.

    They are read from its metrics, which need no key.
    """
    from prometheus_client.parser import text_string_to_metric_families

    try:
        text = host.read_own(f"{url}/metrics", _ASK_SECONDS).body.decode()
        return {
            sample.labels["url"]: sample.value == 1
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "pd_proxy_worker_up"
        }
    except (SetupError, ValueError, KeyError):
        return {}


def public_url(url: str, address: str) -> str:
    """The URL as other hosts use it: a wildcard address is replaced by the host's."""
    parts = urlsplit(url)
    if parts.hostname not in ("0.0.0.0", "::"):
        return url
    return f"{parts.scheme}://{in_url(address)}:{parts.port}"
