"""The embedded model's directories, and the package that makes them on the path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

_ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(_ROOT / "scripts"))

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ASSETS = _ROOT / "pd" / "assets"


@pytest.fixture(scope="session")
def assets() -> Path:
    """Where embedded, embedded-draft and embedded-eagle are."""
    return ASSETS


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(ASSETS / "embedded" / "tokenizer.json"))
