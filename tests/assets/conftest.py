"""The embedded model's directories."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

_ROOT = Path(__file__).parents[2]

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ASSETS = _ROOT / "pd" / "assets"

# What needs the trained model and its tokenizer is collected once a training run has made them.
if not (ASSETS / "embedded-eagle").is_dir():
    collect_ignore = ["test_embedded_generators.py", "test_embedded_model.py"]


@pytest.fixture(scope="session")
def assets() -> Path:
    """Where embedded, embedded-draft and embedded-eagle are."""
    return ASSETS


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(ASSETS / "embedded" / "tokenizer.json"))
