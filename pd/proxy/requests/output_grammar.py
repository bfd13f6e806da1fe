"""Makes the grammar of an answer from the fields of a request."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import msgspec

from pd.core.errors import InvalidRequestError
from pd.core.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from pd.proxy.requests.fields import describe_value, make_problem
from pd.proxy.requests.known_fields import CHAT, COMPLETIONS, FieldPlace, add_place
from pd.proxy.requests.request_model import check_known
from pd.structured.lenient_schemas import drop_unenforced
from pd.structured.pattern_check import find_unenforced_in_pattern
from pd.structured.schema_check import find_unenforced, find_unenforced_in_tag

RESPONSE_FORMAT = FieldPlace((COMPLETIONS, CHAT), "response_format")
_REFUSED = add_place(
    RESPONSE_FORMAT,
    frozenset(
        {
            *("type", "json_schema", "schema", "name", "description", "strict"),
            *("format", "structures", "triggers", "at_least_one", "stop_after_first"),
        }
    ),
)
# Kinds of constraints in fields.
FieldKind = GrammarKind | Literal["choice", "json_object"]
# SGLang's schema for any JSON.
_ANY_SCHEMA = "$$ANY$$"
# Options of a structural tag in the older shape, with lists of structures and triggers.
_TAG_OPTIONS = ("at_least_one", "stop_after_first")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def make_schema_grammar(
    schema: object, param: str, *, strict: bool = True, advice: str = ""
) -> Grammar:
    """Make the grammar of a JSON schema, which may be an object or a text.

    Args:
        param: name of the field, for errors.
        strict: refuse keywords we cannot enforce.
        advice: remedy for such a keyword; the end of the error.

    Raises:
        InvalidRequestError: the value is not a schema, or we cannot enforce a keyword.
    """
    if isinstance(schema, str):
        schema = {} if schema == _ANY_SCHEMA else _parse_json(schema, param)
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError(
            f"{param} must be an object, not {describe_value(schema)}", param=param
        )
    try:
        keyword = find_unenforced(schema) if strict else None
        text = json.dumps(schema if strict else drop_unenforced(schema), ensure_ascii=False)
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidRequestError(f"{param} is not a JSON schema: {error}", param=param) from None
    if keyword is not None:
        raise InvalidRequestError(
            f"{param}: {keyword} is not enforced by this server{advice}", param=param
        )
    return Grammar("json_schema", text)


def make_response_grammar(value: dict[str, Any] | None) -> Grammar | None:
    """Make the grammar of a checked ``response_format``; None for text."""
    if value is None or value["type"] == "text":
        return None
    if value["type"] == "structural_tag":
        return _make_tag_grammar(value, "response_format")
    described = _find_description(value) or {}
    schema = described.get("schema")
    if schema is None:
        if value["type"] == "json_object":
            return Grammar("json_schema", '{"type": "object"}')
        schema = {}
    strict = described.get("strict") is not False
    advice = "; set strict to false to ignore it"
    return make_schema_grammar(schema, "response_format", strict=strict, advice=advice)


def check_response_format(value: dict[str, Any]) -> dict[str, Any]:
    """Check the shape of a ``response_format``. We check a structural tag with its grammar."""
    check_known(RESPONSE_FORMAT, _REFUSED, value)
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema", "structural_tag"):
        raise make_problem(
            "must have the type 'text', 'json_object', 'json_schema' or 'structural_tag', not "
            f"{describe_value(kind)}"
        )
    if kind in ("text", "structural_tag"):
        return value
    described = _find_description(value)
    if described is None and kind == "json_object":
        return value
    if not isinstance(described, dict):
        raise make_problem(f"must have an object 'json_schema', not {describe_value(described)}")
    if not isinstance(described.get("schema"), dict | None):
        raise make_problem(
            f"must have an object 'schema', not {describe_value(described['schema'])}"
        )
    if described.get("strict") not in (None, True, False):
        raise make_problem(
            f"must have a boolean 'strict', not {describe_value(described['strict'])}"
        )
    return value


def _find_description(value: dict[str, Any]) -> Any:
    """Return the member of a ``response_format`` with the schema; None if there is none.

    OpenAI's clients write ``json_schema``, but others write the schema into the format itself. We
    treat null like an absent member.
    """
    described = value.get("json_schema")
    return value if described is None and value.get("schema") is not None else described


def find_only_grammar(
    *, regex: str | None, json_schema: object, ebnf: str | None, structural_tag: object
) -> Grammar | None:
    """Make the grammar of the native shape's fields, at most one of which may be set.

    Raises:
        InvalidRequestError: two fields are set, or the grammar is wrong.
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
    return make_field_grammar(kind, kind, texts[kind])


def make_field_grammar(field: str, kind: FieldKind, value: Any) -> Grammar | None:
    """Make the grammar of a constraint; None without one.

    Args:
        field: name of the field, for errors.
        value: the field's value, with a checked type.

    Raises:
        InvalidRequestError: the value is not a schema, or we cannot enforce a keyword.
    """
    if value is None or value is False:
        return None
    if kind == "json_object":
        return Grammar("json_schema", '{"type": "object"}')
    if kind == "json_schema":
        return make_schema_grammar(value, field)
    if kind == "structural_tag":
        return _make_tag_grammar(value, field)
    if kind == "choice":
        rule = "root ::= " + " | ".join(map(_quote_text, value))
        if len(rule.encode(errors="surrogatepass")) > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                f"{field} has more than {MAX_GRAMMAR_BYTES} bytes of texts", param=field
            )
        return Grammar("ebnf", rule)
    keyword = find_unenforced_in_pattern(value, in_json=False) if kind == "regex" else None
    if keyword is not None:
        raise InvalidRequestError(f"{field}: {keyword} is not enforced by this server", param=field)
    return Grammar(kind, value)


def _quote_text(text: str) -> str:
    """Quote a text for GBNF."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", plain) + '"'


def _normalize_tag(tag: dict[str, Any], param: str) -> dict[str, Any]:
    """Convert a structural tag to the shape with a format.

    vLLM and SGLang also take the older shape, with lists of structures and triggers. ``param``
    names the field in errors.

    Raises InvalidRequestError for any other shape.
    """

    def must_have(wanted: str, value: object) -> InvalidRequestError:
        return InvalidRequestError(
            f"{param} must have {wanted}, not {describe_value(value)}", param=param
        )

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


def _make_tag_grammar(value: object, param: str) -> Grammar:
    """Make the grammar of a structural tag, which may be an object or a text.

    ``param`` names the field in errors. Raises InvalidRequestError for an unenforceable schema.
    """
    if isinstance(value, str):
        value = _parse_json(value, param)
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"{param} must be an object, not {describe_value(value)}", param=param
        )
    value = _normalize_tag(value, param)
    try:
        keyword = find_unenforced_in_tag(value)
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidRequestError(f"{param} has no JSON schema: {error}", param=param) from None
    if keyword is not None:
        raise InvalidRequestError(f"{param}: {keyword} is not enforced by this server", param=param)
    return Grammar("structural_tag", text)


def _parse_json(text: str, param: str) -> object:
    try:
        # We use the parser of bodies, because Python's accepts NaN and lone surrogates.
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{param} is not JSON: {error}", param=param) from None
