"""Base of the models of request bodies, and the errors for bodies that they do not accept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator

from pd.core.errors import InvalidRequestError
from pd.proxy.fields import PROBLEM, problem, show

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema, ErrorDetails

# What a field must be, by the type of pydantic's error.
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
# Begins the tag of an alternative, which pydantic counts to the path of what it holds.
_TAG = "<"
# Keys of a schema that are no condition.
_BESIDE = {"default", "description", "title"}


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a request body that must be a JSON object (NaN and Infinity are no JSON)."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {show(value)}")
    return value


class RequestModel(BaseModel):
    """Base of the models of request bodies.

    JSON's types are kept apart: neither ``"5"`` nor ``true`` is an integer (``5.0`` is one, as in
    JSON Schema). ``null`` counts as absent. A field that the model does not have is ignored, except
    those in ``unsupported`` and ``renamed``.

    Attributes:
        unsupported: fields that would change the result and are refused, each with the values
            that ask for nothing and so are accepted.
        renamed: fields that have another name here and are refused under these, each with its name.
        administrative: the body is small, see :meth:`pd.proxy.bodies.Bodies.open`.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    renamed: ClassVar[Mapping[str, str]] = {}
    administrative: ClassVar[bool] = False
    _required: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        fields = cls.model_fields.items()
        cls._required = tuple(name for name, field in fields if field.is_required())

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """The model of a JSON text. Raises InvalidRequestError."""
        return cls.of(parse_object(body))

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        """The model of a JSON object. Raises InvalidRequestError."""
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise _invalid_request(error) from None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        for name in cls.unsupported.keys() & data.keys():
            value, neutral = data[name], cls.unsupported[name]
            if value is None or any(type(value) is type(n) and value == n for n in neutral):
                continue
            raise problem(f"is not supported yet, but is {show(value)}; leave it out", name)
        given = {name: value for name, value in data.items() if value is not None}
        for name in cls.renamed.keys() & given.keys():
            raise problem(f"is called {cls.renamed[name]} here", name)
        # The validator of a required field that is absent says what it must be.
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
                described["properties"][name] = _nullable(field)
        if cls.unsupported:
            names = ", ".join(f"`{name}`" for name in sorted(cls.unsupported))
            described["description"] += f"\n\nNot supported yet, and refused: {names}."
        for name, ours in cls.renamed.items():
            described["description"] += f"\n\n`{name}` is called `{ours}` here, and refused."
        return described


def _invalid_request(error: ValidationError) -> InvalidRequestError:
    """The error of the API for a body that a model does not accept: its first problem."""
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    name = _name([*first["loc"], *context.get("path", ())])
    if first["type"] == PROBLEM:
        text = context["text"]
    else:
        text = f"must be {_wanted(first)}, not {show(first['input'])}"
    return InvalidRequestError(f"{name} {text}", param=name)


def _nullable(field: JsonSchemaValue) -> JsonSchemaValue:
    """The schema of a field that may also be null."""
    beside: JsonSchemaValue = {key: field[key] for key in _BESIDE & field.keys()}
    value = {key: item for key, item in field.items() if key not in beside}
    kinds = value["anyOf"] if value.keys() == {"anyOf"} else [value]
    return {"anyOf": [*kinds, {"type": "null"}], **beside}


def _wanted(error: ErrorDetails) -> str:
    wanted = _WANTED.get(error["type"])
    return wanted.format(**error.get("ctx", {})) if wanted else error["msg"]


def _name(path: list[str | int]) -> str:
    """A field's name in messages: ``messages[0].role``."""
    name = ""
    for part in path:
        if isinstance(part, str) and part.startswith(_TAG):
            continue
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name
