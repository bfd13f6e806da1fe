"""Every example gives the same interpreted and compiled, and its output is worth looking at."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster import Cluster

import pd.lang as pl
from pd import Engine
from pd.embedded import EMBEDDED_MODEL
from pd.proxy.config import ProxyConfig
from pd.proxy.server import ProxyThread

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# What the embedded model does well, it must do well in the example.
EXPECTED = {
    "few_shot": ["6 of 6 right", "4 of 4 right"],
    "generative_agents": ["Anna Berg", "is home at 15"],
    "json_extraction": ["5 of 5 right"],
    "llm_judge": ["What is 12 + 30? 12 + 30 = 42"],
    "multi_turn_chat": ["6 of 6 right"],
    "rag_pipeline": ["4 of 4"],
    "react_agent": ["'Action: Finish[1116]'", "'right answer': 1116"],
    "skeleton_of_thought": ["The prefill node computes the KV cache of the prompt"],
    "tree_of_thought": ["votes {'93':"],
}
# Those that make test runs: with schemas, several turns, choices and forks.
QUICK = {"json_extraction", "multi_turn_chat", "rag_pipeline", "react_agent", "tree_of_thought"}


@pytest.fixture
def example_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    sys.modules.pop("runner", None)


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested() -> None:
    files = {path.stem for path in EXAMPLES.glob("*.py")} - {"runner"}
    assert files == EXPECTED.keys()


@pytest.mark.usefixtures("example_path")
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in EXPECTED],
)
def test_an_example_gives_the_same_interpreted_and_compiled(
    name: str, endpoint: pl.RuntimeEndpoint
) -> None:
    module = load(name)
    interpreted = module.main(module.Runner(endpoint))
    compiled = module.main(module.Runner(endpoint, compiled=True))
    assert compiled == interpreted
    print(interpreted)
    for text in EXPECTED[name]:
        assert text in str(interpreted)


@pytest.fixture(scope="module")
def split() -> Iterator[pl.RuntimeEndpoint]:
    """The proxy of a prefill node and a decode node."""
    with Cluster(EMBEDDED_MODEL, kv_cache_tokens=32768) as cluster:
        roles = {"prefill": cluster.prefill, "decode": cluster.decode}
        urls = {role: [node.url for node in nodes] for role, nodes in roles.items()}
        with ProxyThread(ProxyConfig(port=0, **urls)) as proxy:
            yield pl.RuntimeEndpoint(proxy.url)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The model in this program."""
    with Engine(EMBEDDED_MODEL, dtype="float32") as engine:
        yield engine


@pytest.mark.full
@pytest.mark.usefixtures("example_path")
@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_gives_the_same_everywhere(
    name: str, endpoint: pl.RuntimeEndpoint, split: pl.RuntimeEndpoint, engine: Engine
) -> None:
    module = load(name)
    expected = module.main(module.Runner(endpoint))
    for backend in (split, engine):
        for compiled in (False, True):
            assert module.main(module.Runner(backend, compiled=compiled)) == expected
