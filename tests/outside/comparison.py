"""Compares two descriptions of the outside, and writes one down so that diffs are readable."""

from __future__ import annotations

import json
from typing import Any

_WIDTH = 100
_MISSING = object()


def find_differences(expected: Any, actual: Any, where: str = "") -> list[str]:
    """List each place where two JSON values differ, one line per place."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        differences = []
        for key in sorted(expected.keys() | actual.keys()):
            place = f"{where} > {key}" if where else key
            pair = expected.get(key, _MISSING), actual.get(key, _MISSING)
            differences += find_differences(*pair, place)
        return differences
    if isinstance(expected, list) and isinstance(actual, list):
        if len(expected) == len(actual):
            pairs = enumerate(zip(expected, actual, strict=True))
            return [
                difference
                for index, (old, new) in pairs
                for difference in find_differences(old, new, f"{where} > {index}")
            ]
        gone = [f"{where}: {_show(each)} is gone" for each in expected if each not in actual]
        new = [f"{where}: {_show(each)} is new" for each in actual if each not in expected]
        return gone + new or [f"{where}: {len(expected)} entries became {len(actual)}"]
    # NOTE: 1, 1.0 and True are equal in Python, but not on the outside.
    if type(expected) is type(actual) and expected == actual:
        return []
    if actual is _MISSING:
        return [f"{where}: {_show(expected)} is gone"]
    if expected is _MISSING:
        return [f"{where}: {_show(actual)} is new"]
    return [f"{where}: {_show(expected)} became {_show(actual)}"]


def render(value: Any) -> str:
    """Write a value as sorted JSON, in which everything that fits stands on one line."""
    return _render(value, 0) + "\n"


def _render(value: Any, indent: int) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    if len(text) + indent <= _WIDTH or not isinstance(value, dict | list):
        return text
    inner, outer = " " * (indent + 1), " " * indent
    if isinstance(value, dict):
        items = [
            f"{inner}{json.dumps(key, ensure_ascii=False)}: {_render(value[key], indent + 1)}"
            for key in sorted(value)
        ]
        return "{\n" + ",\n".join(items) + f"\n{outer}}}"
    items = [inner + _render(each, indent + 1) for each in value]
    return "[\n" + ",\n".join(items) + f"\n{outer}]"


def _show(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]}…"
