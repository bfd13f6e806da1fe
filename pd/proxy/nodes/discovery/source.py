"""The interface of sources of node addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

# No source may list more nodes than a proxy watches (pd.proxy.nodes.pool.MAX_WORKERS).
MAX_ADDRESSES = 256
# An empty or failing source says little about the nodes, so we keep its last list for a while.
HOLD_SECONDS = 60.0


class SourceError(Exception):
    """We cannot read a source, or its answer makes no sense. The text is for people."""


class Source(Protocol):
    """Lists the nodes of a deployment.

    Attributes:
        name: name of the source in ``--discover``.
    """

    name: str

    def watch_urls(self) -> AsyncGenerator[frozenset[str], None]:
        """Yield all node URLs (``scheme://host:port``), again after every change.

        Raises SourceError if the source fails. The caller then waits and calls it again.
        """
        ...


def check_count(name: str, urls: frozenset[str]) -> frozenset[str]:
    """Return ``urls``. Raises SourceError if a source lists too many."""
    if len(urls) > MAX_ADDRESSES:
        raise SourceError(f"{name} lists {len(urls)} addresses (at most {MAX_ADDRESSES})")
    return urls
