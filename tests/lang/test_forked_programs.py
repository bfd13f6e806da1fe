"""Programs in processes that are forked from one with an endpoint."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pd.lang as pl


def test_forked_processes_share_no_connection(url: str) -> None:
    backend = pl.RuntimeEndpoint(url)
    kept = backend._service._client  # type: ignore[attr-defined]

    @pl.function
    def program(s: Any, word: str) -> None:
        s += word + pl.gen("a", 4)

    expected = program.run("parent", backend=backend, temperature=0)["a"]

    def run_in_child() -> None:
        assert backend._service._client is not kept  # type: ignore[attr-defined]
        assert program.run("parent", backend=backend, temperature=0)["a"] == expected

    child = multiprocessing.get_context("fork").Process(target=run_in_child)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert backend._service._client is kept  # type: ignore[attr-defined]
