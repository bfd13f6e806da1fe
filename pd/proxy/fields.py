"""Strict reading of JSON bodies: every refusal names the field, its value and the remedy."""

from __future__ import annotations

import math
import reprlib
from typing import Any

import msgspec

from pd.core.errors import InvalidRequestError

_TYPE_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
_SHOWN = 100
_PART = 1 << 16
# What is not shown of a value of megabytes is not written down first.
_brief = reprlib.Repr()
_brief.maxlevel = 3
_brief.maxlist = _brief.maxdict = 20
_brief.maxstring = _brief.maxlong = _brief.maxother = 4 * _SHOWN


def show(value: object) -> str:
    """A client's value as it may stand in a message: short, with its type."""
    text = _brief.repr(value)
    if len(text) > _SHOWN:
        text = text[:_SHOWN] + "…"
    return f"{text} ({_TYPE_NAMES.get(type(value), type(value).__name__)})"


def are_all(kind: type, values: list[Any]) -> bool:
    """Whether every value is exactly of this type. Long lists are looked at in parts, so that other
    threads run in between."""
    parts = (values[i : i + _PART] for i in range(0, len(values), _PART))
    return all({*map(type, part)} == {kind} for part in parts)


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a request body that must be a JSON object (NaN and Infinity are no JSON)."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {show(value)}")
    return value


class Fields:
    """A JSON object whose values are taken out by name and type; null counts as absent.

    JSON's types are kept apart: neither ``"5"`` nor ``true`` is an integer.
    """

    def __init__(self, data: dict[str, Any], prefix: str = "") -> None:
        self.data = data
        self._prefix = prefix

    def name(self, field: str) -> str:
        """How messages call a field."""
        return self._prefix + field

    def has(self, field: str) -> bool:
        return self.data.get(field) is not None

    def raw(self, field: str) -> Any:
        return self.data.get(field)

    def wrong(self, field: str, wanted: str) -> InvalidRequestError:
        """The error for a value that is not what was wanted."""
        message = f"{self.name(field)} must be {wanted}, not {show(self.data.get(field))}"
        return InvalidRequestError(message, param=self.name(field))

    def integer(self, field: str) -> int | None:
        value = self.data.get(field)
        if value is None:
            return None
        if type(value) is not int:
            raise self.wrong(field, "an integer")
        if not -(1 << 63) <= value < 1 << 63:
            raise self.wrong(field, "an integer of at most 64 bits")
        return value

    def number(self, field: str) -> float | None:
        value = self.data.get(field)
        if value is None:
            return None
        if type(value) not in (int, float) or abs(value) > 1e300 or not math.isfinite(value):
            raise self.wrong(field, "a finite number")
        return float(value)

    def boolean(self, field: str, default: bool = False) -> bool:
        value = self.data.get(field)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.wrong(field, "a boolean")
        return value

    def string(self, field: str) -> str | None:
        value = self.data.get(field)
        if value is None:
            return None
        if type(value) is not str:
            raise self.wrong(field, "a string")
        return value

    def strings(self, field: str) -> list[str]:
        """A string or a list of strings, as a list."""
        value = self.data.get(field)
        if value is None:
            return []
        if type(value) is str:
            return [value]
        if type(value) is not list or not are_all(str, value):
            raise self.wrong(field, "a string or a list of strings")
        return value

    def integers(self, field: str) -> list[int]:
        value = self.data.get(field)
        if value is None:
            return []
        if type(value) is not list or not are_all(int, value):
            raise self.wrong(field, "a list of integers")
        return value

    def mapping(self, field: str) -> Fields | None:
        value = self.data.get(field)
        if value is None:
            return None
        if type(value) is not dict:
            raise self.wrong(field, "an object")
        return Fields(value, f"{self.name(field)}.")

    def refuse(self, unsupported: dict[str, tuple[Any, ...]]) -> None:
        """Refuse fields that would change the result and are not supported.

        Args:
            unsupported: for each field the values that ask for nothing and so are accepted.
        """
        for field, neutral in unsupported.items():
            value = self.data.get(field)
            if value is None or any(type(value) is type(n) and value == n for n in neutral):
                continue
            message = f"{self.name(field)} is not supported yet, but is {show(value)}; leave it out"
            raise InvalidRequestError(message, param=self.name(field))
