"""The embedded model's directories."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pd.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer


@pytest.fixture(scope="session")
def assets() -> Path:
    """Where embedded, embedded-draft, embedded-eagle and embedded-eagle3 are."""
    return EMBEDDED_MODEL.parent


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
