"""``scripts/damage_rate.py``: bytes anywhere in the KV are damaged, with and without the digest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import damage_rate
import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("prompts", [2, pytest.param(60, marks=pytest.mark.full)])
@pytest.mark.timeout(600)
def test_the_digest_notices_all_and_answers_some(tmp_path: Path, seed: int, prompts: int) -> None:
    rows = damage_rate.measure(prompts, seed, tmp_path)
    print(rows)  # the rate of this seed
    assert [row["damage"] for row in rows] == list(damage_rate.WHERE)
    assert all(row["noticed_by_digest"] == prompts for row in rows), rows
    if prompts > 10:
        assert any(row["other_answers"] > 0 for row in rows), rows
