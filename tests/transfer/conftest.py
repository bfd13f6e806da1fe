"""Fixtures of the transfer backends' tests."""

from __future__ import annotations

import pytest
from staged_pair import Pair


@pytest.fixture
def pair():
    made: list[Pair] = []

    def make(**kwargs) -> Pair:
        made.append(Pair(**kwargs))
        return made[-1]

    yield make
    for one in made:
        one.out.held = False
        one.p.close()
        one.d.close()
