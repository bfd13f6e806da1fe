"""Programs as graphs: the operations of a body, recorded without a model.

A body is run once on abstract values instead of arguments and answers. It may put them into texts,
but no decision may depend on them. We refuse such a decision, and name the value.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

from pd.core.errors import TracingError
from pd.lang.ir import ConstantText, Expr, Gen, Select, SeparateReasoning, list_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pd.lang.ir import GenSettings

_OPERATORS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "bool", "len", "iter", "contains", "call", "hash"),
    *("int", "float", "index", "str", "format", "round", "neg", "abs", "sub", "mul", "mod"),
    *("pow", "rpow", "divmod", "pos", "invert", "rtruediv", "rfloordiv", "rand", "ror", "next"),
    *("setitem", "delitem", "complex"),
    *("truediv", "floordiv", "rsub", "rmul", "rmod", "and", "or", "enter", "reversed"),
)


@dataclass(frozen=True, eq=False)
class AbstractValue(Expr):
    """A value, unknown until the program runs.

    It can be appended and added to texts, and ``value[key]`` is abstract, too. Every other use is
    refused.
    """

    path: tuple[Any, ...] = field(default=(), kw_only=True)

    def __getitem__(self, key: object) -> AbstractValue:
        if isinstance(key, AbstractValue):
            key.refuse("an index")
        return replace(self, path=(*self.path, key))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse(f".{name}")

    def describe(self) -> str:
        """Name the value for errors and pictures."""
        raise NotImplementedError

    def refuse(self, use: str) -> NoReturn:
        """Refuse a use of the value."""
        raise TracingError(
            f"{self.describe()} is used by {use}, which needs its value, but a traced function "
            "knows no values: only append it, or bind the argument first (f.bind(name=value))",
            variable=getattr(self, "name", None),
        )

    def walk(self, value: Any) -> Any:
        """Return the part of the value at ``path``."""
        for key in self.path:
            value = value[key]
        return value

    def _describe_path(self) -> str:
        return "".join(f"[{key!r}]" for key in self.path)


def _make_refusal(operator: str) -> Callable[..., NoReturn]:
    def refuse(self: AbstractValue, *args: object) -> NoReturn:
        self.refuse(f"__{operator}__")

    return refuse


for _operator in _OPERATORS:
    setattr(AbstractValue, f"__{_operator}__", _make_refusal(_operator))


@dataclass(frozen=True, eq=False)
class Argument(AbstractValue):
    """An argument of the function."""

    name: str

    def describe(self) -> str:
        return f"argument {self.name!r}{self._describe_path()}"


@dataclass(frozen=True, eq=False)
class TracedVariable(AbstractValue):
    """A variable of a stream, as its ``version``-th operation sets it."""

    stream: int
    name: str
    version: int

    def describe(self) -> str:
        return f"variable {self.name!r}{self._describe_path()}"

    @property
    def key(self) -> tuple[int, str, int]:
        """The operation that sets it."""
        return self.stream, self.name, self.version


@dataclass(frozen=True)
class ForkInto(Expr):
    """Starts streams from here."""

    children: tuple[int, ...]


@dataclass(frozen=True)
class JoinValues(Expr):
    """Sets variables to values from other streams."""

    values: dict[str, Any]


@dataclass(frozen=True)
class SetValue(Expr):
    """Sets a variable to a value of the body's own."""

    name: str
    value: Any


@dataclass
class Stream:
    """The operations of one state.

    Attributes:
        fork: the node that starts it; None for a function's own state.
        function: name of the function.
        spec_tokens: the function's ``num_api_spec_tokens``.
        settings: sampling of the function's call; None for that of the whole run.
        backend: the backend named by the call.
    """

    number: int
    function: str
    spec_tokens: int | None
    settings: GenSettings | None = None
    backend: object = None
    fork: GraphNode | None = None


@dataclass
class GraphNode:
    """One operation of a stream."""

    number: int
    stream: Stream
    expr: Expr
    previous: GraphNode | None

    def list_values(self) -> list[AbstractValue]:
        """List the abstract values in the operation."""
        if isinstance(self.expr, AbstractValue):
            return [self.expr]
        if isinstance(self.expr, Gen):
            return list(find_values(vars(self.expr.settings)))
        if isinstance(self.expr, SeparateReasoning):
            return list(find_values(vars(self.expr.gen.settings)))
        if isinstance(self.expr, Select):
            return list(find_values(self.expr.choices))
        if isinstance(self.expr, JoinValues):
            return list(find_values(self.expr.values))
        if isinstance(self.expr, SetValue):
            return list(find_values(self.expr.value))
        return []

    def list_names(self) -> list[str]:
        """List the variables set by the operation."""
        if isinstance(self.expr, JoinValues):
            return list(self.expr.values)
        if isinstance(self.expr, SetValue):
            return [self.expr.name]
        return list_names(self.expr)

    def describe(self) -> str:
        """Describe the operation in a line."""
        expr = self.expr
        match expr:
            case ConstantText(value):
                return f"constant {value!r}"
            case AbstractValue():
                return expr.describe()
            case Gen(name):
                return f"gen {name!r}"
            case Select(name, choices):
                return f"select {name!r} from {describe_value(choices)}"
            case ForkInto(children):
                return f"fork into {', '.join(f'stream {child}' for child in children)}"
            case JoinValues(values):
                return f"join {', '.join(values)}"
            case SetValue(name, value):
                return f"set {name!r} = {describe_value(value)}"
        return repr(expr)


class Graph:
    """A traced program.

    Attributes:
        nodes: operations in the order of the program.
        streams: streams by number; 0 is the function's own.
        result: the value of the body.
        stops_early: record the body only up to its first generation.
    """

    def __init__(self, *, stops_early: bool = False) -> None:
        self.stops_early = stops_early
        self.nodes: list[GraphNode] = []
        self.streams: list[Stream] = []
        self.result: Any = None
        self._last: dict[int, GraphNode] = {}

    def add_stream(
        self,
        function: str,
        spec_tokens: int | None,
        settings: GenSettings | None = None,
        backend: object = None,
    ) -> Stream:
        stream = Stream(len(self.streams), function, spec_tokens, settings, backend)
        self.streams.append(stream)
        return stream

    def add_node(self, stream: Stream, expr: Expr) -> GraphNode:
        previous = self._last.get(stream.number, stream.fork)
        node = GraphNode(len(self.nodes), stream, expr, previous)
        self.nodes.append(node)
        self._last[stream.number] = node
        return node

    def to_text(self) -> str:
        """List the operations, one a line, with their streams."""
        return list_as_text(self.nodes)

    def to_dot(self) -> str:
        """Draw the graph in the language of Graphviz."""
        lines = ["digraph program {", "  node [shape=box, fontname=monospace];"]
        producers = find_producers(self.nodes)
        for node in self.nodes:
            label = node.describe().replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f'  n{node.number} [label="{label}"];')
            if node.previous is not None:
                lines.append(f"  n{node.previous.number} -> n{node.number};")
            for value in node.list_values():
                if isinstance(value, TracedVariable):
                    source = producers[value.key]
                    lines.append(f"  n{source.number} -> n{node.number} [style=dashed];")
        return "\n".join([*lines, "}"])

    def show(self, style: str = "text") -> None:
        """Print the graph, as ``text`` or as ``dot`` for Graphviz."""
        print(self.to_dot() if style == "dot" else self.to_text())


def list_as_text(nodes: Sequence[GraphNode]) -> str:
    """List operations, one a line, with their streams."""
    return "\n".join(
        f"stream {node.stream.number:2d}: %{node.number} = {node.describe()}" for node in nodes
    )


def find_values(value: object) -> Iterator[AbstractValue]:
    """Find the abstract values within lists, tuples and dicts."""
    if isinstance(value, AbstractValue):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_values(item)
    elif isinstance(value, dict):
        yield from find_values(list(value.values()))


def replace_values(value: Any, read: Callable[[AbstractValue], Any]) -> Any:
    """Replace the abstract values within lists, tuples and dicts."""
    if isinstance(value, AbstractValue):
        return read(value)
    if isinstance(value, list | tuple):
        return type(value)(replace_values(item, read) for item in value)
    if isinstance(value, dict):
        return {key: replace_values(item, read) for key, item in value.items()}
    return value


def describe_value(value: object) -> str:
    """Describe a value. It may contain abstract ones."""
    if isinstance(value, AbstractValue):
        return value.describe()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe_value, value))}]"
    return repr(value)


def find_producers(nodes: list[GraphNode]) -> dict[tuple[int, str, int], GraphNode]:
    """Map each version of each variable of each stream to the node that sets it."""
    versions: dict[tuple[int, str], int] = {}
    producers = {}
    for node in nodes:
        for name in node.list_names():
            place = node.stream.number, name
            version = versions.get(place, 0)
            producers[(*place, version)] = node
            versions[place] = version + 1
    return producers
