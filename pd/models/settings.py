"""Values of a checkpoint's JSON files, read with type checks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from pd.core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

Settings: TypeAlias = Mapping[str, object]
"""A JSON object, such as the content of ``config.json``."""


def read_json(path: Path) -> dict[str, object]:
    """Read the JSON object in a file.

    Raises:
        UsageError: the file is unreadable or does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} does not hold a JSON object")
    return value


def get_positive_int(cfg: Settings, key: str) -> int:
    """Return ``cfg[key]``. Raises UsageError unless it is a positive integer."""
    value = cfg.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UsageError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def get_positive_int_or(cfg: Settings, key: str, default: int) -> int:
    """Return ``cfg[key]``, or ``default`` if the key is absent, null or 0. Raises UsageError unless
    the result is a positive integer."""
    return get_positive_int({key: cfg.get(key) or default}, key)


def get_count(cfg: Settings, key: str, default: int = 0) -> int:
    """Return ``cfg[key]``, or ``default`` if the key is absent or null. Raises UsageError unless it
    is an integer of at least 0."""
    value = default if cfg.get(key) is None else cfg[key]
    if not isinstance(value, int) or value < 0:
        raise UsageError(f"config.json: {key} must be a number of at least 0, not {value!r}")
    return int(value)


def get_number(cfg: Settings, key: str, default: float = 0.0) -> float:
    """Return ``cfg[key]``, or ``default`` if the key is absent or null. Raises UsageError unless it
    is a number."""
    value = cfg.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float):
        raise UsageError(f"config.json: {key} must be a number, not {value!r}")
    return float(value)


def get_mapping(cfg: Settings, *keys: str) -> Settings:
    """Return the first object under one of ``keys``, or an empty one. Raises UsageError if a key
    holds something else."""
    for key in keys:
        value = cfg.get(key)
        if value:
            if not isinstance(value, dict):
                raise UsageError(f"config.json: {key} must be an object, not {value!r}")
            return value
    return {}
