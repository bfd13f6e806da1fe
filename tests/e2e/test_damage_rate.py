"""``scripts/damage_rate.py``: bytes anywhere in the KV are damaged, with and without the digest.

How many answers differ without it is reported, not judged: a byte that surely shows is in
``test_recall.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import damage_rate
import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.full
@pytest.mark.parametrize("prompts", [40])
@pytest.mark.timeout(600)
def test_the_digest_notices_all_and_the_rate_of_other_answers_is_told(
    tmp_path: Path, seed: int, prompts: int
) -> None:
    rows = damage_rate.measure(prompts, seed, tmp_path)
    print(rows)  # the rate of this seed
    assert [row["damage"] for row in rows] == list(damage_rate.WHERE)
    assert all(row["noticed_by_digest"] == prompts for row in rows), rows
    assert all(0.0 <= row["other_answers_rate"] <= 1.0 for row in rows), rows
