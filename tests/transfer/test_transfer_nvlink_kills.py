"""``scripts/nvlink_kills.py`` where there is no GPU: the same kills over tcp, with a tiny model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import nvlink_kills
import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.full
def test_two_kills_are_survived_and_reported(tmp_path: Path) -> None:
    result = tmp_path / "kills.json"
    flags = "--shape tiny --transfer-backend tcp --prefill-device cpu --decode-device cpu"
    flags += " --kv-cache-tokens 16384 --min-prompt 200 --max-prompt 1500 --kills 2"
    assert nvlink_kills.main([*flags.split(), "--output", str(result)]) == 0
    document = json.loads(result.read_text())
    assert document["passed"] and len(document["results"]) == 2
    assert all(kill["in_flight"] and kill["pool_tokens"] == 16384 for kill in document["results"])
    assert sum(kill["lost"] for kill in document["results"]) > 0
