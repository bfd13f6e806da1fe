"""From fields of a request to the grammar that its output has to follow."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import msgspec

from pd.core.errors import InvalidRequestError
from pd.core.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from pd.proxy.fields import problem, show
from pd.proxy.json_schemas import (
    read_over,
    what_is_not_enforced,
    what_of_tags_is_not_enforced,
)
from pd.proxy.patterns import what_is_not_enforced_of

# Kinds of constraints that a field may hold.
FieldKind = GrammarKind | Literal["choice", "json_object"]
# SGLang's schema of whatever is JSON.
_ANY_SCHEMA = "$$ANY$$"
# Options of a structural tag that is written as lists of structures and triggers.
_TAG_OPTIONS = ("at_least_one", "stop_after_first")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def schema_grammar(schema: object, param: str, *, strict: bool = True, advice: str = "") -> Grammar:
    """The grammar of a JSON schema, an object or its text.

    Args:
        param: the field, for messages.
        strict: refuse what would not be enforced.
        advice: what a client may do about that; the end of the message.

    Raises:
        InvalidRequestError: it is no schema, or not enforced.
    """
    if isinstance(schema, str):
        schema = {} if schema == _ANY_SCHEMA else _parsed(schema, param)
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError(f"{param} must be an object, not {show(schema)}", param=param)
    try:
        found = what_is_not_enforced(schema) if strict else None
        text = json.dumps(schema if strict else read_over(schema), ensure_ascii=False)
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidRequestError(f"{param} is no JSON schema: {error}", param=param) from None
    if found is not None:
        raise InvalidRequestError(
            f"{param}: {found} is not enforced by this server{advice}", param=param
        )
    return Grammar("json_schema", text)


def response_format_grammar(value: dict[str, Any] | None) -> Grammar | None:
    """The grammar of OpenAI's ``response_format``; None for text. Its shape was checked."""
    if value is None or value["type"] == "text":
        return None
    if value["type"] == "structural_tag":
        return _tag_grammar(value, "response_format")
    described = _described(value) or {}
    schema = described.get("schema")
    if schema is None:
        if value["type"] == "json_object":
            return Grammar("json_schema", '{"type": "object"}')
        schema = {}
    strict = described.get("strict") is not False
    advice = "; with strict set to false it is read over"
    return schema_grammar(schema, "response_format", strict=strict, advice=advice)


def check_response_format(value: dict[str, Any]) -> dict[str, Any]:
    """Raise for a ``response_format`` of another shape than OpenAI's. The shape of a structural tag
    is checked where its grammar is made."""
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema", "structural_tag"):
        raise problem(
            "must have the type 'text', 'json_object', 'json_schema' or 'structural_tag', not "
            f"{show(kind)}"
        )
    if kind in ("text", "structural_tag"):
        return value
    described = _described(value)
    if described is None and kind == "json_object":
        return value
    if not isinstance(described, dict):
        raise problem(f"must have an object 'json_schema', not {show(described)}")
    if not isinstance(described.get("schema"), dict | None):
        raise problem(f"must have an object 'schema', not {show(described['schema'])}")
    if described.get("strict") not in (None, True, False):
        raise problem(f"must have a boolean 'strict', not {show(described['strict'])}")
    return value


def _described(value: dict[str, Any]) -> Any:
    """The member of a ``response_format`` that holds the schema, and None without one: OpenAI's
    ``json_schema``, or the format itself, where some clients write the schema. A member that is
    null counts as absent."""
    described = value.get("json_schema")
    return value if described is None and value.get("schema") is not None else described


def only_grammar(
    *, regex: str | None, json_schema: object, ebnf: str | None, structural_tag: object
) -> Grammar | None:
    """The one grammar among the fields of the native shape, or None.

    Raises:
        InvalidRequestError: there are two, or it is no schema, or something that it says would not
            be enforced.
    """
    texts: dict[GrammarKind, object] = {
        "regex": regex,
        "json_schema": json_schema,
        "ebnf": ebnf,
        "structural_tag": structural_tag,
    }
    given: list[GrammarKind] = [kind for kind, text in texts.items() if text is not None]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequestError(
            f"{' and '.join(given)} cannot constrain the same output", param=given[1]
        )
    (kind,) = given
    return field_grammar(kind, kind, texts[kind])


def field_grammar(field: str, kind: FieldKind, value: Any) -> Grammar | None:
    """The grammar of a constraint; None without one.

    Args:
        field: its name, for messages.
        value: of the field, whose type was checked.

    Raises:
        InvalidRequestError: it is no schema, or something that it says would not be enforced.
    """
    if value is None or value is False:
        return None
    if kind == "json_object":
        return Grammar("json_schema", '{"type": "object"}')
    if kind == "json_schema":
        return schema_grammar(value, field)
    if kind == "structural_tag":
        return _tag_grammar(value, field)
    if kind == "choice":
        return _choice_grammar(value, field)
    found = what_is_not_enforced_of(value, in_json=False) if kind == "regex" else None
    if found is not None:
        raise InvalidRequestError(f"{field}: {found} is not enforced by this server", param=field)
    return Grammar(kind, value)


def _choice_grammar(texts: list[str], param: str) -> Grammar:
    """The grammar of one of several texts."""
    rule = "root ::= " + " | ".join(map(_quoted, texts))
    if len(rule.encode(errors="surrogatepass")) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"{param} has more than {MAX_GRAMMAR_BYTES} bytes of texts", param=param
        )
    return Grammar("ebnf", rule)


def _quoted(text: str) -> str:
    """A text as GBNF writes it."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", plain) + '"'


def _as_format(tag: dict[str, Any], param: str) -> dict[str, Any]:
    """A structural tag as one with a format, from either shape in which vLLM and SGLang take it:
    with a format, or with lists of structures and triggers. ``param``: the field, for messages.

    Raises InvalidRequestError for another shape.
    """

    def must_have(wanted: str, value: object) -> InvalidRequestError:
        return InvalidRequestError(f"{param} must have {wanted}, not {show(value)}", param=param)

    structures, triggers = tag.get("structures"), tag.get("triggers")
    if structures is None and triggers is None:
        if not isinstance(tag.get("format"), dict):
            raise must_have("an object 'format'", tag.get("format"))
        return tag
    if not isinstance(structures, list) or not all(isinstance(each, dict) for each in structures):
        raise must_have("a list of objects 'structures'", structures)
    if not isinstance(triggers, list) or not all(isinstance(each, str) for each in triggers):
        raise must_have("a list of strings 'triggers'", triggers)
    for number, each in enumerate(structures):
        for name in ("begin", "end"):
            if not isinstance(each.get(name), str):
                raise must_have(f"a string 'structures[{number}].{name}'", each.get(name))
    for name in _TAG_OPTIONS:
        if not isinstance(tag.get(name), bool | None):
            raise must_have(f"a boolean {name!r}", tag[name])
    tags = [
        {
            "type": "tag",
            "begin": each["begin"],
            "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
            "end": each["end"],
        }
        for each in structures
    ]
    content: dict[str, Any] = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    content |= {name: True for name in _TAG_OPTIONS if tag.get(name)}
    return {"type": "structural_tag", "format": content}


def _tag_grammar(value: object, param: str) -> Grammar:
    """The grammar of a structural tag, an object or its text, whose schemas are enforced. It has a
    format, whatever shape the tag had. ``param``: the field, for messages."""
    if isinstance(value, str):
        value = _parsed(value, param)
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{param} must be an object, not {show(value)}", param=param)
    value = _as_format(value, param)
    try:
        found = what_of_tags_is_not_enforced(value)
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidRequestError(f"{param} has no JSON schema: {error}", param=param) from None
    if found is not None:
        raise InvalidRequestError(f"{param}: {found} is not enforced by this server", param=param)
    return Grammar("structural_tag", text)


def _parsed(text: str, param: str) -> object:
    try:
        # Like bodies: unlike Python's, this parser takes neither NaN nor a lone surrogate.
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{param} is not JSON: {error}", param=param) from None
