"""Expressions of programs, to be appended to a state by ``s += …``.

An expression is data. :mod:`pd.lang.executor` performs it, and :mod:`pd.lang.tracing` records it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.lang.choices import AnyMethod

# Patterns of `gen(dtype=…)`. A number may have white space after it, where it ends.
REGEX_INT = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r"\"[\w\d\s]*\""

_PATTERNS = {"int": REGEX_INT, "float": REGEX_FLOAT, "bool": REGEX_BOOL, "str": REGEX_STR}


@dataclass(frozen=True)
class GenSettings:
    """Sampling of a generation. None leaves a setting to the program's run, and then to the model.

    The names are those of ``sampling_params`` of ``POST /generate``; ``dtype`` is a name.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stop_regex: str | tuple[str, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    dtype: str | None = None
    regex: str | None = None
    json_schema: str | None = None

    def override(self, other: GenSettings) -> GenSettings:
        """Return these settings, overridden by all of ``other`` but None."""
        given = {f.name: getattr(other, f.name) for f in fields(other)}
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    @property
    def is_number(self) -> bool:
        """Whether the answer is a number."""
        return self.dtype in ("int", "float")

    @property
    def pattern(self) -> str | None:
        """The regular expression of the answer, if there is one."""
        return self.regex if self.dtype is None else _PATTERNS[self.dtype]


class Expr:
    """Base of all expressions. ``+`` joins expressions and texts."""

    def __add__(self, other: object) -> ExprList:
        return ExprList((*_split(self), *_split(other)))

    def __radd__(self, other: object) -> ExprList:
        return ExprList((*_split(other), *_split(self)))


def as_expr(value: object) -> Expr:
    """Turn a text into an expression. Raises TypeError for any other value."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        return ConstantText(value)
    raise TypeError(
        f"cannot append {type(value).__name__} to a program: give a text, or an expression such as "
        "gen(…)"
    )


def _split(value: object) -> tuple[Expr, ...]:
    expr = as_expr(value)
    return expr.items if isinstance(expr, ExprList) else (expr,)


@dataclass(frozen=True)
class ExprList(Expr):
    """Expressions, one after the other."""

    items: tuple[Expr, ...]


@dataclass(frozen=True)
class ConstantText(Expr):
    """A text of the program's own."""

    value: str


@dataclass(frozen=True)
class Gen(Expr):
    """A text by the model, kept under a name if there is one."""

    name: str | None = None
    settings: GenSettings = field(default_factory=GenSettings)


@dataclass(frozen=True)
class Select(Expr):
    """The likeliest of several texts. Its choices are an expression only in graphs."""

    name: str | None
    choices: tuple[str, ...] | Expr
    method: AnyMethod


@dataclass(frozen=True)
class RoleBegin(Expr):
    """Opens the turn of a role in a chat."""

    role: str


@dataclass(frozen=True)
class RoleEnd(Expr):
    """Closes the turn of a role."""

    role: str


@dataclass(frozen=True)
class ScopeBegin(Expr):
    """From here on, text belongs to a variable."""

    name: str


@dataclass(frozen=True)
class ScopeEnd(Expr):
    """Up to here, text belongs to a variable."""

    name: str


@dataclass(frozen=True)
class SeparateReasoning(Expr):
    """Keeps the reasoning of a generation apart, as ``NAME_reasoning_content``.

    Attributes:
        family: name of the tags around the reasoning; None finds them in the chat template.
    """

    gen: Gen
    family: str | None


@dataclass(frozen=True)
class SayValue(Expr):
    """Appends a value of a compiled program, which may have to be waited for."""

    read: Callable[[], object]


@dataclass(frozen=True)
class Assign(Expr):
    """Sets a variable to a value of a compiled program."""

    name: str
    read: Callable[[], object]


def reasoning_name(name: str) -> str:
    """Return the name of the variable with the reasoning of a generation."""
    return f"{name}_reasoning_content"


def list_names(expr: Expr) -> list[str]:
    """List the variables set by an expression, with repetitions."""
    if isinstance(expr, ExprList):
        return [name for item in expr.items for name in list_names(item)]
    if isinstance(expr, SeparateReasoning):
        names = list_names(expr.gen)
        return [*names, *map(reasoning_name, names)]
    if isinstance(expr, Gen | Select | ScopeEnd | Assign) and expr.name is not None:
        return [expr.name]
    return []


def make_select(name: str | None, choices: object, method: AnyMethod) -> Select:
    """Check choices, and make a selection. Raises UsageError without any."""
    if isinstance(choices, Expr):
        return Select(name, choices, method)
    if not isinstance(choices, list | tuple) or not choices:
        raise UsageError("select needs choices: a list with at least one text")
    for choice in choices:
        if not isinstance(choice, str | Expr):
            raise UsageError(f"select: choice {choice!r} is not a text")
    return Select(name, tuple(choices), method)


def make_settings(**values: Any) -> GenSettings:
    """Check the values of a generation and make its settings.

    Raises ValueError for a wrong ``dtype`` or ``json_schema``.
    """
    for name in ("stop", "stop_token_ids", "stop_regex"):
        if isinstance(values.get(name), list | tuple):
            values[name] = tuple(values[name])
    if (dtype := values.get("dtype")) is not None:
        name = dtype.__name__ if isinstance(dtype, type) else str(dtype)
        if name not in _PATTERNS:
            raise ValueError(f"invalid dtype {dtype!r}: use int, float, str or bool")
        if values.get("regex") is not None:
            raise ValueError(f"dtype {name} and a regex both constrain the answer: give one")
        values["dtype"] = name
    if (schema := values.get("json_schema")) is not None:
        values["json_schema"] = _dump_schema(schema)
    return GenSettings(**values)


def _dump_schema(schema: object) -> str:
    """Return the text of a JSON schema: a text, an object, or a model of pydantic."""
    import json

    if isinstance(schema, str):
        return schema
    make = getattr(schema, "model_json_schema", None)
    if make is not None:
        schema = make()
    if not isinstance(schema, dict):
        raise ValueError(
            f"invalid json_schema {schema!r}: give its text, an object, or a model of pydantic"
        )
    return json.dumps(schema)
