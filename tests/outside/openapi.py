"""Describes an OpenAPI document without its prose and without the names of its schemas."""

from __future__ import annotations

from typing import Any

_REF_PREFIX = "#/components/schemas/"
_PROSE = ("title", "description", "summary", "operationId", "tags", "examples", "example")
# Keys whose value maps names that clients use, which may be words such as ``title``, to schemas.
_NAMES = ("properties", "patternProperties")


def describe_openapi(document: dict[str, Any]) -> dict[str, Any]:
    """Describe each operation, with its schemas where they are used."""
    schemas = document.get("components", {}).get("schemas", {})
    operations = {
        f"{method.upper()} {path}": _normalize(operation, schemas, ())
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    return {"operations": operations, "security": document.get("security")}


def _normalize(value: Any, schemas: dict[str, Any], inside: tuple[str, ...]) -> Any:
    """Drop prose and put schemas in the place of references to them.

    ``inside``: the references around this value, because schemas may contain themselves.
    """
    if isinstance(value, list):
        return [_normalize(each, schemas, inside) for each in value]
    if not isinstance(value, dict):
        return value
    reference = value.get("$ref")
    if isinstance(reference, str):
        if reference in inside:
            levels = len(inside) - inside.index(reference)
            return {"same as": f"{levels} schemas up"}
        schema = schemas[reference.removeprefix(_REF_PREFIX)]
        return _normalize(schema, schemas, (*inside, reference))
    found: dict[str, Any] = {}
    for key, inner in value.items():
        if key in _NAMES:
            found[key] = {
                name: _normalize(schema, schemas, inside) for name, schema in inner.items()
            }
        elif key == "required" and isinstance(inner, list):
            found[key] = sorted(inner)
        elif key in ("default", "const", "enum"):
            found[key] = inner
        elif key == "discriminator":
            found[key] = {"propertyName": inner["propertyName"]}
        elif key not in _PROSE:
            found[key] = _normalize(inner, schemas, inside)
    return found
