"""Follows one source, and keeps its list for a while when it is empty or fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from pd.proxy.nodes.discovery.source import HOLD_SECONDS, SourceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.proxy.nodes.discovery.source import Source

logger = logging.getLogger(__name__)

RETRY_SECONDS = 2.0


class Follower:
    """Follows one source.

    Args:
        on_change: called after a change of ``urls``.

    Attributes:
        urls: the nodes listed by the source. If it is empty or fails, its last list for a while.
    """

    def __init__(self, source: Source, on_change: Callable[[], None]) -> None:
        self.urls: frozenset[str] = frozenset()
        self.hold_seconds = HOLD_SECONDS
        self._source, self._on_change = source, on_change
        self._missing_since: float | None = None
        self._problem = ""

    async def follow_source(self) -> None:
        """Follow the source until cancelled."""
        while True:
            try:
                async with contextlib.aclosing(self._source.watch_urls()) as lists:
                    async for urls in lists:
                        self._take_list(urls, "" if urls else "the list of nodes is empty")
            except SourceError as error:
                self._take_list(frozenset(), str(error))
            except Exception as error:  # whatever one source raises, we keep following it
                logger.exception("discovery: %s failed", self._source.name)
                self._take_list(frozenset(), f"{type(error).__name__}")
            await asyncio.sleep(RETRY_SECONDS)

    def drop_after_hold(self) -> None:
        """Forget the nodes of a source after it was empty or failing for too long."""
        since = self._missing_since
        if since is not None and time.monotonic() - since > self.hold_seconds:
            self._missing_since = None
            logger.warning(
                "discovery: %s: %s for %g s; draining its %d nodes",
                *(self._source.name, self._problem, self.hold_seconds, len(self.urls)),
            )
            self._set_urls(frozenset())

    def _take_list(self, urls: frozenset[str], problem: str) -> None:
        self._report_problem(problem)
        if urls or not self.urls:
            self._missing_since = None
            self._set_urls(urls)
        elif self._missing_since is None:
            self._missing_since = time.monotonic()

    def _set_urls(self, urls: frozenset[str]) -> None:
        if urls != self.urls:
            self.urls = urls
            self._on_change()

    def _report_problem(self, problem: str) -> None:
        if problem == self._problem:
            return
        self._problem = problem
        if problem:
            kept = f"; keeping its {len(self.urls)} nodes for {self.hold_seconds:g} s"
            logger.warning(
                "discovery: %s: %s%s", self._source.name, problem, kept if self.urls else ""
            )
        else:
            logger.info("discovery: %s works again", self._source.name)
