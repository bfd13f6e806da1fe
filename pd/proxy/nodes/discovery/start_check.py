"""Rejects, at the start, nodes on other hosts without a cluster key."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pd.core.addresses import is_loopback
from pd.core.errors import UsageError
from pd.proxy.nodes.discovery.source import SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.proxy.nodes.discovery.source import Source

_SECONDS = 5.0


async def refuse_strangers(sources: Sequence[Source]) -> None:
    """Query every source once. Raises UsageError for a node beyond loopback."""
    for source, urls in zip(sources, await asyncio.gather(*map(_list_urls, sources)), strict=True):
        for url in sorted(urls):
            if not is_loopback(urlsplit(url).hostname or ""):
                raise UsageError(
                    f"--discover {source.name} lists {url}: nodes on other hosts must prove a "
                    "cluster key; set --cluster-key-file"
                )


async def _list_urls(source: Source) -> frozenset[str]:
    """Return the current nodes of a source; none if it fails, because it may work later."""
    with contextlib.suppress(SourceError, TimeoutError, StopAsyncIteration):
        async with asyncio.timeout(_SECONDS), contextlib.aclosing(source.watch_urls()) as lists:
            return await anext(lists)
    return frozenset()
