"""Functions that a model may call."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pd.structured.schema_walk import list_allowed_values

# How a parameter is written in a call that is not JSON.
ParameterKind = Literal["text", "json"]
Mode = Literal["none", "auto", "required"]


class Function(NamedTuple):
    """A function of a request."""

    name: str
    schema: dict[str, Any]
    strict: bool | None

    def classify_parameters(self) -> dict[str, ParameterKind]:
        """Map each parameter to the way it is written in a call that is not JSON."""
        return {name: classify_schema(part) for name, part in get_properties(self.schema).items()}


class ToolChoice(NamedTuple):
    """Whether the model must call functions.

    Attributes:
        name: the only function that may be called, if the client named one.
    """

    mode: Mode
    name: str | None = None


class Tools(NamedTuple):
    """The functions of a request.

    Attributes:
        shown: the tools as the chat template gets them.
    """

    functions: list[Function]
    shown: list[dict[str, Any]]


def get_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters that a schema names, with their schemas."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def classify_schema(schema: object) -> ParameterKind:
    """Return "text" for a schema that allows only strings, else "json"."""
    if not isinstance(schema, dict):
        return "json"
    values = list_allowed_values(schema)
    if values:
        return "text" if all(isinstance(value, str) for value in values) else "json"
    return "text" if schema.get("type") == "string" else "json"


def name_parameters_field(number: int) -> str:
    """Return the field with a function's parameters, by the function's position in the request."""
    return f"tools[{number}].function.parameters"
