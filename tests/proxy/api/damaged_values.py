"""Random damage to JSON values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random

ODD: list[Any] = [None, True, -1, 1e300, "", "\ud800", [], {}, [[]], [None], {"": []}, "x" * 3000]


def damage(rng: random.Random, value: Any) -> Any:
    """Replace a random part of the value."""
    if rng.random() < 0.3 or not value or not isinstance(value, list | dict):
        return rng.choice(ODD)
    value = json.loads(json.dumps(value))
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if rng.random() < 0.2:
        del value[key]
    else:
        value[key] = damage(rng, value[key])
    return value
