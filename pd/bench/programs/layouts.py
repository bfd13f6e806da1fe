"""Starts the deployments that programs run on."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from pd.commands.processes import ENDING, Children, interrupt_on
from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd.commands.processes import LaunchedProcess

# Roles of the nodes of each layout.
LAYOUTS = {
    "unified": ("unified",),
    "1p1d": ("prefill", "decode"),
    "elastic": ("unified", "unified", "unified"),
}
# The proxy counts a request just after its client has the answer.
_COUNT_SECONDS = 10.0
_POLL = 0.02
_TOTAL = re.compile(r"^pd_proxy_(prompt|cached)_tokens_total ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True)
class ProgramLayout:
    """Settings of a deployment.

    Attributes:
        layout: a name of :data:`LAYOUTS`.
        schedule_policy: ``--schedule-policy`` of the nodes.
        kv_cache_tokens: pool of the nodes that prefill; None for an ample one.
        more_flags: further flags of every node.
    """

    layout: str
    device: str
    page_size: int
    radix_cache: bool = True
    schedule_policy: str = "lpm"
    kv_cache_tokens: int | None = None
    more_flags: tuple[str, ...] = ()

    @property
    def answers_stay(self) -> bool:
        """Whether answers stay in the cache in which later prompts look."""
        return self.layout != "1p1d"

    def list_flags(self, role: str, ample_tokens: int) -> list[str]:
        """List the flags of a node. ``ample_tokens``: size of an ample pool."""
        tokens = ample_tokens if self.kv_cache_tokens is None else self.kv_cache_tokens
        flags = ["--device", self.device, "--port", "0", "--page-size", str(self.page_size)]
        flags += ["--kv-cache-tokens", str(ample_tokens if role == "decode" else tokens)]
        flags += ["--schedule-policy", self.schedule_policy]
        if self.device == "cpu":
            threads = max(1, (os.cpu_count() or 1) // len(LAYOUTS[self.layout]))
            flags += ["--cpu-threads", str(threads)]
        if role == "prefill":
            flags += ["--bootstrap-port", "0"]
        if self.layout == "elastic":
            flags += ["--elastic", "auto"]
        if not self.radix_cache:
            flags += ["--radix-cache", "off"]
        return [*flags, *self.more_flags]


class RunningLayout:
    """A running deployment: ``url`` is its proxy's."""

    def __init__(self, proxy: LaunchedProcess, children: Children) -> None:
        self.url = proxy.url
        self._children = children
        self._client = httpx.Client(base_url=proxy.url, trust_env=False, timeout=60.0)

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Tokenize a text as the proxy does."""
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        response = self._client.post("/tokenize", json=body)
        if response.status_code != httpx.codes.OK:
            raise SetupError(f"/tokenize answered {response.status_code}: {response.text[:500]}")
        tokens: list[int] = response.json()["tokens"]
        return tokens

    def read_tokens(self) -> tuple[int, int]:
        """Read how many prompt tokens there were so far, and how many of them were cached."""
        found = dict(_TOTAL.findall(self._client.get("/metrics").text))
        return int(float(found["prompt"])), int(float(found["cached"]))

    def wait_tokens(self, before: tuple[int, int], prompt_tokens: int) -> int:
        """Wait until the proxy has counted all prompts since a reading.

        Returns:
            The number of their tokens that were cached.

        Raises:
            SetupError: the proxy counts other prompts than those that we know.
        """
        deadline = time.monotonic() + _COUNT_SECONDS
        while True:
            self._children.check_alive()
            prompts, cached = self.read_tokens()
            grown = prompts - before[0]
            if grown == prompt_tokens:
                return cached - before[1]
            if grown > prompt_tokens or time.monotonic() > deadline:
                raise SetupError(
                    f"the proxy counted {grown} prompt tokens, but the recorded requests have "
                    f"{prompt_tokens}; a request was sent twice, or the recorder misread one"
                )
            time.sleep(_POLL)


@contextlib.contextmanager
def start_layout(
    model: str | Path, settings: ProgramLayout, ample_tokens: int
) -> Iterator[RunningLayout]:
    """Start nodes and a proxy on this machine; stop them at the end.

    Raises SetupError if a process ends or is not ready in time.
    """
    with interrupt_on(*ENDING), tempfile.TemporaryDirectory(prefix="pd-programs-") as directory:
        children = Children(Path(directory))
        try:
            nodes = [
                children.start(
                    f"{role} node {number}",
                    *(role, "--model", model, *settings.list_flags(role, ample_tokens)),
                )
                for number, role in enumerate(LAYOUTS[settings.layout])
            ]
            _wait_ready(children, nodes)
            workers = [
                word
                for role, node in zip(LAYOUTS[settings.layout], nodes, strict=True)
                for word in (f"--{role}", node.url)
            ]
            # Proxies do not know that nodes have no cache, so they must not look for prefixes.
            policy = [] if settings.radix_cache else ["--policy", "round_robin"]
            proxy = children.start("proxy", "proxy", "--port", "0", *workers, *policy)
            _wait_ready(children, [proxy])
            yield RunningLayout(proxy, children)
        finally:
            children.stop()


def _wait_ready(children: Children, started: Sequence[LaunchedProcess]) -> None:
    children.wait_ready(started, lambda seconds: None)
