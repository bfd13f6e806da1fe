"""Renders the API's description as one HTML page without scripts."""

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
    """Render an OpenAPI document: a section per operation, then one per schema."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    body = [f"<h1>{title}</h1>", f"<p>{_render_prose(info['description'])}</p>"]
    body.append('<p>For programs: <a href="openapi.json">openapi.json</a></p>')
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            body += _render_operation(method.upper(), path, operation)
    for name, schema in document["components"]["schemas"].items():
        body += _render_schema(name, schema)
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>"
    )


def _render_operation(method: str, path: str, operation: Json) -> Iterator[str]:
    yield f"<h2>{method} <code>{escape(path)}</code></h2>"
    yield f"<p>{_render_prose(operation.get('description', ''))}</p><table>"
    for media_type, kind in _list_contents(operation.get("requestBody", {})):
        yield _render_row("body", media_type, kind)
    for status, response in operation["responses"].items():
        contents = _list_contents(response) or [("", "")]
        for media_type, kind in contents:
            yield _render_row(status, media_type, kind, _render_prose(response["description"]))
    yield "</table>"


def _render_schema(name: str, schema: Json) -> Iterator[str]:
    yield f'<h2 id="{escape(name)}">{escape(name)}</h2>'
    yield f"<p>{_render_prose(schema.get('description', ''))}</p><table>"
    required = schema.get("required", ())
    for field, described in schema.get("properties", {}).items():
        needed = "required" if field in required else ""
        if "default" in described and described["default"] is not None:
            needed = f"<code>{escape(json.dumps(described['default']))}</code>"
        prose = _render_prose(described.get("description", ""))
        yield _render_row(
            f"<code>{escape(field)}</code>", _describe_schema(described), needed, prose
        )
    yield "</table>"


def _list_contents(body: Json) -> list[tuple[str, str]]:
    """List the media types of a body with descriptions of their schemas."""
    content = body.get("content", {}).items()
    return [
        (escape(media_type), _describe_schema(held.get("schema", {})))
        for media_type, held in content
    ]


def _describe_schema(schema: Json) -> str:
    """Describe a schema and its limits in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for several in ("anyOf", "oneOf"):
        if several in schema:
            kinds = [_describe_schema(one) for one in schema[several] if one != {"type": "null"}]
            return ", ".join(
                filter(None, [" or ".join(dict.fromkeys(kinds)), _describe_limits(schema)])
            )
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    kind = escape(schema.get("type", "anything"))
    if "items" in schema:
        kind += f" of {_describe_schema(schema['items'])}"
    limits = _describe_limits(schema)
    return f"{kind}, {limits}" if limits else kind


def _describe_limits(schema: Json) -> str:
    return ", ".join(f"{words} {schema[key]}" for key, words in _LIMITS.items() if key in schema)


def _render_row(*cells: str) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _render_prose(text: str) -> str:
    """Render text as HTML, with marked code."""
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text, quote=False))
    return text.replace("\n\n", "</p><p>")
