"""A running pd with the embedded model, for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cluster import Cluster

import pd.lang as pl
from pd.embedded import EMBEDDED_MODEL
from pd.proxy.config import ProxyConfig
from pd.proxy.server import ProxyThread

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A unified node with the embedded model, in float32."""
    with Cluster(EMBEDDED_MODEL, prefill=0, decode=0, unified=1, kv_cache_tokens=32768) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def url(cluster: Cluster) -> Iterator[str]:
    """The proxy of the node."""
    nodes = [node.url for node in cluster.unified]
    with ProxyThread(ProxyConfig(port=0, unified=nodes)) as proxy:
        yield proxy.url


@pytest.fixture(scope="session")
def endpoint(url: str) -> pl.RuntimeEndpoint:
    return pl.RuntimeEndpoint(url)


@pytest.fixture
def default_backend(endpoint: pl.RuntimeEndpoint) -> Iterator[None]:
    pl.set_default_backend(endpoint)
    yield
    pl.set_default_backend(None)
