"""Functions that clients declare, and which of them the model is to call."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

import msgspec
from pydantic import Field, PlainValidator
from typing_extensions import TypedDict

from pd.proxy.fields import mismatch, problem, show

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 1 << 19
_MAX_NAME = 64
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

# How a parameter is written where a call is no JSON: as a text, or as JSON.
ParameterKind = Literal["text", "json"]
Mode = Literal["none", "auto", "required"]


class FunctionInput(TypedDict):
    """A function that the model may call."""

    name: Annotated[
        str, Field(pattern=f"^{_NAME.pattern}$", description="No two functions have the same.")
    ]
    description: NotRequired[
        Annotated[str | None, Field(description="What the function does, for the model.")]
    ]
    parameters: NotRequired[
        Annotated[
            dict[str, object] | None,
            Field(description="A JSON schema of an object. Without it there are no parameters."),
        ]
    ]
    strict: NotRequired[
        Annotated[
            bool | None,
            Field(
                description="With true arguments follow the schema also where calls are the "
                "model's choice. With false keywords that are not enforced are read over."
            ),
        ]
    ]


ToolType = Annotated[
    Literal["function"] | None, Field(description="No other kinds are known, so it may be absent.")
]


class ToolInput(TypedDict):
    """A tool as clients write it."""

    type: NotRequired[ToolType]
    function: Annotated[FunctionInput, Field(description="The function.")]


class FunctionName(TypedDict):
    """One of the request's functions."""

    name: Annotated[str, Field(description="Its name.")]


class NamedTool(TypedDict):
    """The function that has to be called."""

    type: NotRequired[ToolType]
    function: Annotated[FunctionName, Field(description="The function.")]


class Function(NamedTuple):
    """A function of a request."""

    name: str
    schema: dict[str, Any]
    strict: bool | None

    def kinds(self) -> dict[str, ParameterKind]:
        """Parameters of the function, and how each is written where a call is no JSON."""
        return {name: kind_of(schema) for name, schema in properties_of(self.schema).items()}


class ToolChoice(NamedTuple):
    """Whether the model has to call functions, and if only one is left, which."""

    mode: Mode
    name: str | None = None


class Tools(NamedTuple):
    """The functions of a request, and how the template is given them."""

    functions: list[Function]
    shown: list[dict[str, Any]]


def properties_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The parameters that a schema names."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def kind_of(schema: object) -> ParameterKind:
    """A text if the schema takes strings alone."""
    if not isinstance(schema, dict):
        return "json"
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return "text" if all(isinstance(value, str) for value in values) else "json"
    return "text" if schema.get("type") == "string" else "json"


def read_tools(value: object) -> Tools | None:
    """The functions of a list that has any. Raises the error of the first tool that is wrong."""
    if not isinstance(value, list):
        raise mismatch("a list of tools", value)
    if len(value) > MAX_TOOLS:
        raise problem(f"has {len(value)} tools; at most {MAX_TOOLS} are taken")
    functions: list[Function] = []
    names: set[str] = set()
    shown = list(map(_completed, value))
    for number, tool in enumerate(shown):
        function = _read_tool(tool, number)
        if function.name in names:
            raise problem(f"is {function.name!r} for a second time", number, "function", "name")
        names.add(function.name)
        functions.append(function)
    try:
        size = len(msgspec.json.encode(value))
    except RecursionError:
        raise problem("is nested too deeply") from None
    if size > MAX_TOOLS_BYTES:
        raise problem(f"has {size} bytes of JSON; at most {MAX_TOOLS_BYTES} are taken")
    return Tools(functions, shown) if functions else None


def _completed(tool: Any) -> Any:
    """A tool with what clients may leave out, as templates expect it: its type is there, and
    ``properties`` of its parameters are absent rather than null."""
    if not isinstance(tool, dict):
        return tool
    if tool.get("type") is None:
        tool = {"type": "function"} | {k: v for k, v in tool.items() if k != "type"}
    function = tool.get("function")
    schema = function.get("parameters") if isinstance(function, dict) else None
    if isinstance(schema, dict) and schema.get("properties", ...) is None:
        schema = {name: value for name, value in schema.items() if name != "properties"}
        tool = tool | {"function": function | {"parameters": schema}}
    return tool


def _read_tool(tool: object, number: int) -> Function:
    if not isinstance(tool, dict):
        raise mismatch("an object", tool, number)
    if tool.get("type") != "function":
        raise mismatch("'function'", tool.get("type"), number, "type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise mismatch("an object", function, number, "function")

    def wrong(wanted: str, name: str) -> Exception:
        return mismatch(wanted, function.get(name), number, "function", name)

    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(f"1 to {_MAX_NAME} letters, digits, '_' or '-'", "name")
    if not isinstance(function.get("description"), str | None):
        raise wrong("a string", "description")
    if function.get("strict") not in (None, True, False):
        raise wrong("a boolean", "strict")
    if not isinstance(schema, dict | None):
        raise wrong("an object", "parameters")
    if schema is not None and schema.get("type", "object") != "object":
        raise mismatch("'object'", schema["type"], number, "function", "parameters", "type")
    if not isinstance((schema or {}).get("properties", {}), dict):
        raise wrong("a schema whose properties are an object", "parameters")
    if schema is None:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    return Function(name, schema, function.get("strict"))


def read_tool_choice(value: object) -> ToolChoice:
    """Raises for another shape than OpenAI's."""
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    function = value.get("function") if isinstance(value, dict) else None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in (None, "function") and isinstance(function, dict):
        name = function.get("name")
        if not isinstance(name, str):
            raise mismatch("a string", name, "function", "name")
        return ToolChoice("required", name)
    raise problem(
        "must be 'none', 'auto', 'required' or "
        f'{{"type": "function", "function": {{"name": "…"}}}}, not {show(value)}'
    )


ToolList = Annotated[
    Tools | None, PlainValidator(read_tools, json_schema_input_type=list[ToolInput])
]
ToolChoiceValue = Annotated[
    ToolChoice,
    PlainValidator(
        read_tool_choice,
        json_schema_input_type=Literal["none", "auto", "required"] | NamedTool,
    ),
]
