"""The fields ``tools`` and ``tool_choice``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from pydantic import Field, PlainValidator
from typing_extensions import TypedDict

from pd.proxy.requests.fields import describe_value, make_mismatch, make_problem
from pd.proxy.text.tools.functions import Function, ToolChoice, Tools
from pd.structured.schema_shapes import check_shapes

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 1 << 19
# Anthropic's limit. OpenAI's is half of it.
_MAX_NAME = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


class FunctionInput(TypedDict):
    """A function that the model may call."""

    name: Annotated[
        str,
        Field(
            pattern=f"^{_NAME.pattern}$", description="The function's name, unique in the request."
        ),
    ]
    description: NotRequired[
        Annotated[str | None, Field(description="What the function does, for the model.")]
    ]
    parameters: NotRequired[
        Annotated[
            dict[str, object] | None,
            Field(
                description="A JSON schema of an object. Without it, the function has no "
                "parameters."
            ),
        ]
    ]
    strict: NotRequired[
        Annotated[
            bool | None,
            Field(
                description="If true, arguments follow the schema even where calls are the model's "
                "choice. If false, keywords that are not enforced are ignored."
            ),
        ]
    ]


ToolType = Annotated[
    Literal["function"] | None,
    Field(description="May be left out, because there is no other type."),
]


class ToolInput(TypedDict):
    """A tool as clients write it."""

    type: NotRequired[ToolType]
    function: Annotated[FunctionInput, Field(description="The function.")]


class FunctionName(TypedDict):
    """One of the request's functions."""

    name: Annotated[str, Field(description="Its name.")]


class NamedTool(TypedDict):
    """The function that the model must call."""

    type: NotRequired[ToolType]
    function: Annotated[FunctionName, Field(description="The function.")]


def read_tools(value: object) -> Tools | None:
    """Read a list of tools; None if it is empty. Raises the error of the first wrong one."""
    if not isinstance(value, list):
        raise make_mismatch("a list of tools", value)
    if len(value) > MAX_TOOLS:
        raise make_problem(f"has {len(value)} tools; at most {MAX_TOOLS} are allowed")
    functions: list[Function] = []
    names: set[str] = set()
    shown = list(map(_complete_tool, value))
    for number, tool in enumerate(shown):
        function = _read_tool(tool, number)
        if function.name in names:
            raise make_problem(
                f"is {function.name!r} for a second time", number, "function", "name"
            )
        names.add(function.name)
        functions.append(function)
    try:
        size = len(msgspec.json.encode(value))
    except RecursionError:
        raise make_problem("is nested too deeply") from None
    if size > MAX_TOOLS_BYTES:
        raise make_problem(f"has {size} bytes of JSON; at most {MAX_TOOLS_BYTES} are allowed")
    return Tools(functions, shown) if functions else None


def _complete_tool(tool: Any) -> Any:
    """Add the parts of a tool that clients may leave out, because templates expect them.

    The type is there, and ``properties`` of the parameters are absent instead of null.
    """
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
        raise make_mismatch("an object", tool, number)
    if tool.get("type") != "function":
        raise make_mismatch("'function'", tool.get("type"), number, "type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise make_mismatch("an object", function, number, "function")

    def make_error(wanted: str, name: str) -> Exception:
        return make_mismatch(wanted, function.get(name), number, "function", name)

    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise make_error(f"1 to {_MAX_NAME} letters, digits, '_' or '-'", "name")
    if not isinstance(function.get("description"), str | None):
        raise make_error("a string", "description")
    if function.get("strict") not in (None, True, False):
        raise make_error("a boolean", "strict")
    if not isinstance(schema, dict | None):
        raise make_error("an object", "parameters")
    if schema is not None and schema.get("type", "object") != "object":
        raise make_mismatch("'object'", schema["type"], number, "function", "parameters", "type")
    try:
        check_shapes(schema or {})
    except ValueError as error:
        raise make_problem(
            f"is not a JSON schema: {error}", number, "function", "parameters"
        ) from None
    if schema is None:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    return Function(name, schema, function.get("strict"))


def read_tool_choice(value: object) -> ToolChoice:
    """Read ``tool_choice`` in OpenAI's shape."""
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    function = value.get("function") if isinstance(value, dict) else None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in (None, "function") and isinstance(function, dict):
        name = function.get("name")
        if not isinstance(name, str):
            raise make_mismatch("a string", name, "function", "name")
        return ToolChoice("required", name)
    raise make_problem(
        "must be 'none', 'auto', 'required' or "
        f'{{"type": "function", "function": {{"name": "…"}}}}, not {describe_value(value)}'
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
