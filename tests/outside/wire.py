"""Describes structs of msgspec by what they look like to whoever decodes them.

A struct is known by its tag or, if it has none, by its fields: never by the name of its class. The
order of fields matters, because some structs travel as arrays.
"""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import inspect

if TYPE_CHECKING:
    from collections.abc import Iterator


def leaf_classes(base: Any, package: str, *, only_leaves: bool = True) -> list[Any]:
    """List the subclasses that a package defines of a class, or of ``module:attribute``."""
    if isinstance(base, str):
        module, _, attribute = base.partition(":")
        base = getattr(importlib.import_module(module), attribute)
    classes = {cls for cls in _subclasses(base) if f"{cls.__module__}.".startswith(f"{package}.")}
    parents = {parent for cls in classes for parent in cls.__mro__[1:]} if only_leaves else set()
    return [cls for cls in classes if cls not in parents]


def _subclasses(base: Any) -> Iterator[Any]:
    for cls in base.__subclasses__():
        yield cls
        yield from _subclasses(cls)


def describe_structs(classes: list[Any]) -> dict[str, Any]:
    """Describe these structs, those with a tag by their tags."""
    tagged: dict[str, list[Any]] = {}
    others: list[Any] = []
    for cls in classes:
        info = inspect.type_info(cls)
        assert isinstance(info, inspect.StructType)
        entry = _describe(info)
        place = others if info.tag is None else tagged.setdefault(str(info.tag), [])
        if entry not in place:
            place.append(entry)
    for entries in (others, *tagged.values()):
        entries.sort(key=json.dumps)
    return {"by tag": tagged, "without tag": others}


def _describe(info: inspect.StructType) -> dict[str, Any]:
    config = info.cls.__struct_config__
    facts: dict[str, Any] = {"fields": [_describe_field(field) for field in info.fields]}
    if info.tag_field not in (None, "type"):
        facts["tag field"] = info.tag_field
    for option in ("array_like", "forbid_unknown_fields", "omit_defaults"):
        if getattr(config, option):
            facts[option] = True
    return facts


def _describe_field(field: inspect.Field) -> str:
    text = f"{field.encode_name}: {_describe_type(field.type)}"
    if field.required:
        return text
    if field.default_factory is not inspect.NODEFAULT:
        return f"{text} = {_plain(field.default_factory())!r}"
    # msgspec reports no default for fields that are UNSET by default.
    return f"{text} = {'absent' if field.default is inspect.NODEFAULT else _plain(field.default)!r}"


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Raw):
        return bytes(value)
    return msgspec.to_builtins(value, enc_hook=str)


def _describe_type(info: inspect.Type) -> str:
    """Write a type down, with its bounds."""
    if isinstance(info, inspect.Metadata):
        return _describe_type(info.type)
    if isinstance(info, inspect.UnionType):
        return " | ".join(sorted(_describe_type(each) for each in info.types))
    if isinstance(info, inspect.LiteralType):
        return f"one of {sorted(info.values, key=repr)}"
    if isinstance(info, inspect.EnumType):
        return f"one of {sorted((each.value for each in info.cls), key=repr)}"
    if isinstance(info, inspect.StructType):
        if info.tag is not None:
            return f"<{info.tag}>"
        return f"{{{', '.join(field.encode_name for field in info.fields)}}}"
    if isinstance(info, inspect.DataclassType | inspect.TypedDictType | inspect.NamedTupleType):
        return f"{{{', '.join(field.encode_name for field in info.fields)}}}"
    if isinstance(info, inspect.DictType):
        inner = f"[{_describe_type(info.key_type)}, {_describe_type(info.value_type)}]"
    elif isinstance(info, inspect.TupleType):
        inner = f"[{', '.join(_describe_type(each) for each in info.item_types)}]"
    elif isinstance(info, inspect.CollectionType):
        inner = f"[{_describe_type(info.item_type)}]"
    else:
        inner = ""
    name = type(info).__name__.removesuffix("Type").lower()
    return f"{name}{inner}{_describe_bounds(info)}"


def _describe_bounds(info: inspect.Type) -> str:
    bounds = {
        name: getattr(info, name)
        for name in ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length")
        if getattr(info, name, None) is not None
    }
    return f"({', '.join(f'{name} {value}' for name, value in bounds.items())})" if bounds else ""
