"""A model of random weights. The tests of all files share its compiling processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from grammar_model import make_model
from grammar_nodes import grammars_of, use_grammars

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pd.grammar.grammars import Grammars


@pytest.fixture(scope="module", autouse=True)
def one_child() -> Iterator[None]:
    """Use one child, because it takes longer to start than most grammars to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pd.grammar.grammars._CHILDREN", 1)
        yield


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def shared_grammars(model_directory: Path) -> Iterator[Grammars]:
    with grammars_of(model_directory) as made:
        yield made


@pytest.fixture(scope="module")
def model(model_directory: Path, shared_grammars: Grammars) -> Iterator[Path]:
    with use_grammars(shared_grammars):
        yield model_directory
