"""What becomes of a test for which this machine lacks something."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

from pd.core.errors import SetupError
from pd.transfer.registry import check_backend


def skip_or_fail(why: str) -> NoReturn:
    """Skip the test. In CI, which has to have everything, that is a failure."""
    if os.environ.get("CI"):
        pytest.fail(f"CI must be able to run every test: {why}")
    pytest.skip(why)


def require_backend(flag: str) -> None:
    """Skip the test if this machine lacks a requirement of a transfer backend."""
    try:
        check_backend(flag)
    except SetupError as error:
        skip_or_fail(error.message)
