"""Base of the models of request bodies, and the errors for invalid bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator

from pd.core.errors import InvalidRequestError
from pd.proxy.requests.fields import PROBLEM, describe_value, make_problem
from pd.proxy.requests.known_fields import FieldPlace, add_place, asks_for_nothing, explain_refusal

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

# The expected value in errors, by the type of pydantic's error.
_WANTED = {
    "bool_type": "a boolean",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a finite number",
    "int_type": "an integer",
    "list_type": "a list",
    "literal_error": "one of {expected}",
    "model_type": "an object",
    "string_too_long": "a string with a length of at most {max_length}",
    "string_too_short": "a string with a length of at least {min_length}",
    "string_type": "a string",
}
_REFUSED = (
    "\n\nOther fields that OpenAI, vLLM or SGLang define are refused, with the place or the name "
    "that works here. Unknown fields are ignored."
)
# Begins the tag of a union's member. Pydantic adds the tag to an error's path, and we drop it.
_TAG = "<"
# Keys of a schema without conditions.
_ANNOTATIONS = {"default", "description", "title"}


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body, which must be a JSON object. NaN and Infinity are not JSON."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {describe_value(value)}")
    return value


def check_known(place: FieldPlace, refused: frozenset[str], data: dict[str, Any]) -> None:
    """Raise an error for a known field ignored by this place.

    ``refused``: return value of :func:`add_place`.
    """
    for name, value in data.items():
        if name in refused and not asks_for_nothing(place, name, value):
            raise make_problem(explain_refusal(place, name), name)


class RequestModel(BaseModel):
    """Base of the models of request bodies.

    We do not convert between JSON's types: neither ``"5"`` nor ``true`` is an integer, but ``5.0``
    is one, as in JSON Schema. We treat ``null`` like an absent field. A field that the model does
    not have is refused if :mod:`pd.proxy.requests.known_fields` lists it, and ignored otherwise.

    Attributes:
        place: place of the object in requests; None for a base of several models.
        administrative: the body is small, see :meth:`pd.proxy.http.bodies.Bodies.open_body`.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    place: ClassVar[FieldPlace | None] = None
    administrative: ClassVar[bool] = False
    _required: ClassVar[tuple[str, ...]] = ()
    _refused: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        fields = cls.model_fields.items()
        cls._required = tuple(name for name, field in fields if field.is_required())
        if cls.place is not None:
            names = frozenset(field.alias or name for name, field in fields)
            cls._refused = add_place(cls.place, names)

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse a JSON text. Raises InvalidRequestError."""
        return cls.from_object(parse_object(body))

    @classmethod
    def from_object(cls, given: dict[str, Any]) -> Self:
        """Validate a JSON object. Raises InvalidRequestError."""
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise _invalid_request(error) from None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        if cls.place is not None:
            check_known(cls.place, cls._refused, data)
        given = {name: value for name, value in data.items() if value is not None}
        # We set null for an absent required field, so that its validator names the expected value.
        for name in cls._required:
            given.setdefault(name, None)
        return given

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        described = handler.resolve_ref_schema(handler(schema))
        for name, field in described.get("properties", {}).items():
            if name not in cls._required:
                described["properties"][name] = _make_nullable(field)
        if cls.place is not None:
            described["description"] += _REFUSED
        return described


def _invalid_request(error: ValidationError) -> InvalidRequestError:
    """Convert pydantic's error to ours. It names the first problem only."""
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    name = _join_path([*first["loc"], *context.get("path", ())])
    if first["type"] == PROBLEM:
        text = context["text"]
    else:
        wanted = (
            _WANTED[first["type"]].format(**context) if first["type"] in _WANTED else first["msg"]
        )
        text = f"must be {wanted}, not {describe_value(first['input'])}"
    return InvalidRequestError(f"{name} {text}", param=name)


def _make_nullable(field: JsonSchemaValue) -> JsonSchemaValue:
    """Make the schema of a field that may also be null."""
    annotations: JsonSchemaValue = {key: field[key] for key in _ANNOTATIONS & field.keys()}
    value = {key: item for key, item in field.items() if key not in annotations}
    kinds = value["anyOf"] if value.keys() == {"anyOf"} else [value]
    return {"anyOf": [*kinds, {"type": "null"}], **annotations}


def _join_path(path: list[str | int]) -> str:
    """Return a field's name for errors, such as ``messages[0].role``."""
    name = ""
    for part in path:
        if isinstance(part, str) and part.startswith(_TAG):
            continue
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name
