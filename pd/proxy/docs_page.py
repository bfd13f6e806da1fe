"""The description of the API as one page of HTML, without scripts."""

from __future__ import annotations

import json
import re
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    Json = dict[str, Any]

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem; border-top: 1px solid #ccc; padding-top: 1rem }
table { border-collapse: collapse }
td, th { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0 }
tr + tr td { border-top: 1px solid #eee }
code { font: 13px ui-monospace, monospace; background: #f4f4f4; padding: 0 .2em }
"""
_LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "minLength": "characters at least",
    "maxLength": "characters at most",
    "maxItems": "items at most",
    "maxProperties": "entries at most",
}


def render_page(document: Json) -> str:
    """The page of an OpenAPI document: a section for each operation, then one for each schema."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    body = [f"<h1>{title}</h1>", f"<p>{_prose(info['description'])}</p>"]
    body.append('<p>For programs: <a href="openapi.json">openapi.json</a></p>')
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            body += _operation(method.upper(), path, operation)
    for name, schema in document["components"]["schemas"].items():
        body += _schema(name, schema)
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>"
    )


def _operation(method: str, path: str, operation: Json) -> Iterator[str]:
    yield f"<h2>{method} <code>{escape(path)}</code></h2>"
    yield f"<p>{_prose(operation.get('description', ''))}</p><table>"
    for media_type, kind in _contents(operation.get("requestBody", {})):
        yield _row("body", media_type, kind)
    for status, response in operation["responses"].items():
        contents = _contents(response) or [("", "")]
        for media_type, kind in contents:
            yield _row(status, media_type, kind, _prose(response["description"]))
    yield "</table>"


def _schema(name: str, schema: Json) -> Iterator[str]:
    yield f'<h2 id="{escape(name)}">{escape(name)}</h2>'
    yield f"<p>{_prose(schema.get('description', ''))}</p><table>"
    required = schema.get("required", ())
    for field, described in schema.get("properties", {}).items():
        needed = "required" if field in required else ""
        if "default" in described and described["default"] is not None:
            needed = f"<code>{escape(json.dumps(described['default']))}</code>"
        prose = _prose(described.get("description", ""))
        yield _row(f"<code>{escape(field)}</code>", _kind(described), needed, prose)
    yield "</table>"


def _contents(body: Json) -> list[tuple[str, str]]:
    """Media types and what they hold."""
    content = body.get("content", {}).items()
    return [(escape(media_type), _kind(held.get("schema", {}))) for media_type, held in content]


def _kind(schema: Json) -> str:
    """A schema in a few words, with its limits."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for several in ("anyOf", "oneOf"):
        if several in schema:
            kinds = [_kind(one) for one in schema[several] if one != {"type": "null"}]
            return ", ".join(filter(None, [" or ".join(dict.fromkeys(kinds)), _limits(schema)]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    kind = escape(schema.get("type", "anything"))
    if "items" in schema:
        kind += f" of {_kind(schema['items'])}"
    limits = _limits(schema)
    return f"{kind}, {limits}" if limits else kind


def _limits(schema: Json) -> str:
    return ", ".join(f"{words} {schema[key]}" for key, words in _LIMITS.items() if key in schema)


def _row(*cells: str) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _prose(text: str) -> str:
    """Text with its code marked."""
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text, quote=False))
    return text.replace("\n\n", "</p><p>")
