"""Records the operations of a body, by running it on abstract values."""

from __future__ import annotations

import contextlib
import contextvars
from typing import TYPE_CHECKING, Any, NoReturn

from pd.core.errors import TracingError
from pd.lang.graph import (
    AbstractValue,
    Argument,
    ForkInto,
    Graph,
    JoinValues,
    SetValue,
    TracedVariable,
)
from pd.lang.ir import ExprList, Gen, Select, SeparateReasoning, list_names
from pd.lang.state import ProgramState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd.lang.body import FunctionBody
    from pd.lang.graph import Stream
    from pd.lang.ir import Expr, GenSettings

# The graph in which we record the body of this thread.
_current: contextvars.ContextVar[Graph | None] = contextvars.ContextVar("graph", default=None)


class _StopTracing(BaseException):  # a body must not catch it as an error
    """Ends a body, because we only need its beginning."""


def get_current_graph() -> Graph | None:
    """Return the graph that is being recorded, if any."""
    return _current.get()


def trace_function(body: FunctionBody, arguments: Mapping[str, Any]) -> Graph:
    """Record a function. Parameters without an argument are abstract.

    Raises TracingError where the body needs the value of an argument or a variable, and whatever
    else the body raises.
    """
    graph = Graph()
    _record(graph, body, arguments)
    return graph


def trace_beginning(body: FunctionBody, arguments: Mapping[str, Any]) -> Graph:
    """Record a function up to its first generation, or as far as its body comes without values."""
    graph = Graph(stops_early=True)
    # A body may fail in any way on abstract values.
    with contextlib.suppress(Exception, SystemExit, _StopTracing):
        _record(graph, body, arguments)
    return graph


def _record(graph: Graph, body: FunctionBody, arguments: Mapping[str, Any]) -> None:
    token = _current.set(graph)
    try:
        graph.result = trace_call(graph, body, (), arguments, None).ret_value
    finally:
        _current.reset(token)


def trace_call(
    graph: Graph,
    body: FunctionBody,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    settings: GenSettings | None,
    backend: object = None,
) -> ProgramState:
    """Record a call of a function: the whole program, or a call by a recorded body."""
    given = {**dict(zip(body.arg_names, args, strict=False)), **kwargs}
    given |= body.bound
    if not graph.streams:
        missing = [name for name in body.arg_names if name not in given]
        given |= {name: Argument(name) for name in missing}
    stream = graph.add_stream(body.name, body.spec_tokens, settings, backend)
    state = ProgramState(TracingExecutor(graph, stream))
    try:
        state.ret_value = body.func(state, **given)
    except TracingError as error:
        if error.function is None:
            message = f"{body.name}: {error.message}"
            raise TracingError(message, function=body.name, variable=error.variable) from error
        raise
    return state


def _refuse_variables(values: list[AbstractValue]) -> None:
    for value in values:
        if isinstance(value, TracedVariable):
            value.refuse("the settings of gen or select")


class TracingExecutor:
    """Records operations instead of performing them."""

    def __init__(
        self, graph: Graph, stream: Stream, variables: Mapping[str, Any] | None = None
    ) -> None:
        self._graph = graph
        self._stream = stream
        self._variables = dict(variables or {})
        self._inherited = frozenset(self._variables)
        self._versions: dict[str, int] = {}

    streams = False

    def submit(self, expr: Expr) -> None:
        for item in expr.items if isinstance(expr, ExprList) else (expr,):
            node = self._graph.add_node(self._stream, item)
            if isinstance(item, Gen | Select | SeparateReasoning):
                _refuse_variables(node.list_values())
            if self._graph.stops_early and isinstance(item, Gen | Select | SeparateReasoning):
                raise _StopTracing
            for name in list_names(item):
                self._variables[name] = self._make_version(name)

    def _make_version(self, name: str) -> TracedVariable:
        version = self._versions.get(name, 0)
        self._versions[name] = version + 1
        return TracedVariable(self._stream.number, name, version)

    def fork(self, size: int) -> list[TracingExecutor]:
        origin = self._stream
        streams = [
            self._graph.add_stream(
                origin.function, origin.spec_tokens, origin.settings, origin.backend
            )
            for _ in range(size)
        ]
        node = self._graph.add_node(origin, ForkInto(tuple(s.number for s in streams)))
        for stream in streams:
            stream.fork = node
        return [TracingExecutor(self._graph, stream, self._variables) for stream in streams]

    def gather(self, values: Mapping[str, list[Any]]) -> None:
        self._graph.add_node(self._stream, JoinValues(dict(values)))
        for name, value in values.items():
            self._make_version(name)
            self._variables[name] = value

    def get_var(self, name: str, timeout: float | None = None) -> Any:
        return self._variables[name]

    def has_var(self, name: str) -> bool:
        return name in self._variables

    def set_var(self, name: str, value: object) -> None:
        self._graph.add_node(self._stream, SetValue(name, value))
        self._make_version(name)
        self._variables[name] = value

    def list_new_vars(self) -> dict[str, Any]:
        return {k: v for k, v in self._variables.items() if k not in self._inherited}

    def sync(self) -> None:
        """Do nothing, because operations are recorded at once."""

    def get_error(self) -> None:
        """Return no error, because nothing is performed."""

    def get_meta(self, name: str, timeout: float | None = None) -> NoReturn:
        self._refuse(f"get_meta_info({name!r})")

    def get_text(self) -> NoReturn:
        self._refuse("text()")

    def get_messages(self) -> NoReturn:
        self._refuse("messages()")

    def iterate_text(self) -> NoReturn:
        self._refuse("text_iter()")

    def iterate_var(self, name: str) -> NoReturn:
        self._refuse(f"text_iter({name!r})")

    def _refuse(self, use: str) -> NoReturn:
        raise TracingError(
            f"the body calls {use}, which needs values, but a traced function knows no values"
        )
