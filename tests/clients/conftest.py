"""A deployment of real processes for programs of other packages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
from calling_model import write_calling_model
from processes import deployment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Served(NamedTuple):
    """A proxy, and the directory of its model."""

    url: str
    model: Path


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A prefill node, a decode node and a proxy, whose model is called ``embedded``."""
    directory = tmp_path_factory.mktemp("clients")
    model = write_calling_model(directory / "embedded")
    flags = ["--dtype", "float32"]
    with deployment(model, directory / "logs", node_flags=flags) as running:
        yield Served(running.proxy.url, model)
