"""Optimises graphs of programs, and runs them."""

from __future__ import annotations

import logging
import uuid
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from pd.core.errors import PDError
from pd.lang.batches import run_in_order
from pd.lang.executor import Executor
from pd.lang.graph import (
    AbstractValue,
    Argument,
    ForkInto,
    JoinValues,
    SetValue,
    TracedVariable,
    find_producers,
    find_values,
    list_as_text,
    replace_values,
)
from pd.lang.ir import (
    Assign,
    ConstantText,
    Gen,
    RoleBegin,
    RoleEnd,
    SayValue,
    ScopeBegin,
    ScopeEnd,
    Select,
    SeparateReasoning,
    as_expr,
    make_select,
    make_settings,
)
from pd.lang.run import ProgramRun, cancel_runs
from pd.lang.settings import choose_backend, global_config, split_settings
from pd.lang.state import ProgramState
from pd.lang.transcript import Transcript, make_plain_template

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pd.lang.backend import Backend, ProgramPrompt
    from pd.lang.body import FunctionBody
    from pd.lang.graph import Graph, GraphNode, Stream
    from pd.lang.ir import Expr, GenSettings

_log = logging.getLogger(__name__)

# A shorter prefix fills few pages of the cache, so it is not worth a request.
_MIN_PREFIX_CHARACTERS = 64


class CompiledProgram:
    """A traced function. It runs without the body, so nothing waits for a variable to be read.

    Attributes:
        body: the traced body.
        nodes: the operations left after optimisation.
        result: the value of the body, with abstract values in it.
    """

    def __init__(self, body: FunctionBody, graph: Graph, backend: object = None) -> None:
        self.body = body
        self.nodes = fold_constants(drop_dead_nodes(graph))
        self.result = graph.result
        self._graph = graph
        self._backend = backend

    def print_graph(self) -> None:
        """Print the operations left after optimisation."""
        print(list_as_text(self.nodes))

    def run(self, *args: Any, backend: object = None, **kwargs: Any) -> ProgramState:
        """Run the program on the arguments of the function, and wait for everything.

        Errors of the model are in ``error()`` of the state.
        """
        settings, named = split_settings(kwargs)
        arguments = self.body.name_arguments(args) | named
        job = self._make_job(choose_backend(backend or self._backend), settings, arguments)
        try:
            job.perform()
        except BaseException:  # also Ctrl-C
            cancel_runs(job.runs)
            raise
        return job.state

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: object = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        **kwargs: Any,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run the program for each set of arguments, as :meth:`ProgramFunction.run_batch` does."""
        settings, unknown = split_settings(kwargs)
        self.body.refuse_settings(unknown)
        used = choose_backend(backend or self._backend)
        batch = [self.body.name_arguments(each) for each in batch_kwargs]
        jobs = [self._make_job(used, settings, each) for each in batch]
        if global_config.enable_precache_with_tracing and len(batch) > 1:
            send_prefix(self._graph, batch, used)
        states = run_in_order(jobs, num_threads, progress_bar=progress_bar)
        return states if generator_style else list(states)

    def _make_job(
        self, backend: Backend, settings: GenSettings, arguments: Mapping[str, Any]
    ) -> _CompiledJob:
        complete = self.body.complete_arguments(arguments)
        return _CompiledJob(self, self._graph.streams[0], backend, settings, complete)


class _CompiledJob:
    """A run of a compiled program."""

    def __init__(
        self,
        program: CompiledProgram,
        stream: Stream,
        backend: Backend,
        settings: GenSettings,
        arguments: dict[str, Any],
    ) -> None:
        self._program = program
        self._backend = backend
        self._settings = settings
        self._arguments = arguments
        self._executors: dict[int, Executor] = {}
        self.runs: list[ProgramRun] = []
        self._executor = self._find_executor(stream)
        self.state = ProgramState(self._executor)

    def run_to_end(self) -> None:
        """Perform everything. Keep an error in the state."""
        try:
            self.perform()
        except Exception as error:  # noqa: BLE001 (arguments may be anything)
            self._executor.fail(self._program.body.name_error(error))
            cancel_runs(self.runs)
        self.state.sync()

    def perform(self) -> None:
        """Perform everything. Raises errors of arguments, and of values in the result."""
        for node in self._program.nodes:
            self._submit(node)
        self.state.sync()
        if self.state.error() is None:
            self.state.ret_value = replace_values(self._program.result, self._read)

    def _find_executor(self, stream: Stream) -> Executor:
        """Return the executor of a stream. Those of forked streams exist already."""
        if stream.number not in self._executors:
            settings = self._settings if stream.settings is None else stream.settings
            backend = self._backend
            if stream.backend is not None:
                backend = choose_backend(stream.backend)
            run = ProgramRun(stream.function, backend, settings, spec_tokens=stream.spec_tokens)
            if self.runs:
                self.runs[0].adopt(run)
            self.runs.append(run)
            self._executors[stream.number] = Executor(run)
        return self._executors[stream.number]

    def _submit(self, node: GraphNode) -> None:
        executor, expr = self._find_executor(node.stream), node.expr
        match expr:
            case Argument():
                executor.submit(as_expr(self._read(expr)))
            case TracedVariable():
                executor.submit(SayValue(lambda: self._read(expr)))
            case ForkInto(children):
                self._executors |= zip(children, executor.fork(len(children)), strict=True)
            case JoinValues(values):
                for name in values:
                    executor.submit(self._make_assignment(name, values[name]))
            case SetValue(name, value):
                executor.submit(self._make_assignment(name, value))
            case Gen(name, settings):
                executor.submit(Gen(name, self._complete_settings(settings)))
            case SeparateReasoning(Gen(name, settings), family):
                gen = Gen(name, self._complete_settings(settings))
                executor.submit(SeparateReasoning(gen, family))
            case Select(name, choices, method):
                executor.submit(make_select(name, replace_values(choices, self._read), method))
            case _:
                executor.submit(expr)

    def _make_assignment(self, name: str, value: object) -> Assign:
        return Assign(name, lambda: replace_values(value, self._read))

    def _complete_settings(self, settings: GenSettings) -> GenSettings:
        """Put arguments into the settings of a generation."""
        values = {f.name: getattr(settings, f.name) for f in fields(settings)}
        if not any(isinstance(value, AbstractValue) for value in values.values()):
            return settings
        return make_settings(**replace_values(values, self._read))

    def _read(self, value: AbstractValue) -> Any:
        """Wait for an abstract value. The thread of an executor calls this for variables."""
        if isinstance(value, TracedVariable):
            executor = self._executors[value.stream]
            return value.walk(executor.get_version(value.name, value.version))
        assert isinstance(value, Argument)
        return value.walk(self._arguments[value.name])


def drop_dead_nodes(graph: Graph) -> list[GraphNode]:
    """Drop operations without effect: no text of the state, variable or result.

    These are at the ends of branches and of calls whose variables nobody reads.
    """
    producers = find_producers(graph.nodes)
    needed = [node for node in graph.nodes if node.stream.number == 0]
    needed += [
        producers[value.key]
        for value in find_values(graph.result)
        if isinstance(value, TracedVariable)
    ]
    live: set[int] = set()
    while needed:
        node = needed.pop()
        if node.number in live:
            continue
        live.add(node.number)
        if node.previous is not None:
            needed.append(node.previous)
        values = node.list_values()
        needed += [producers[v.key] for v in values if isinstance(v, TracedVariable)]
    kept = [node for node in graph.nodes if node.number in live]
    streams = {node.stream.number for node in kept}
    nodes = []
    for node in kept:
        if isinstance(node.expr, ForkInto):
            children = tuple(child for child in node.expr.children if child in streams)
            if children:
                nodes.append(replace(node, expr=ForkInto(children)))
        else:
            nodes.append(node)
    return nodes


def fold_constants(nodes: Sequence[GraphNode]) -> list[GraphNode]:
    """Join neighbouring constants of a stream, and drop empty ones."""
    folded: list[GraphNode] = []
    last: dict[int, int] = {}
    for node in nodes:
        place = last.get(node.stream.number)
        if isinstance(node.expr, ConstantText):
            if not node.expr.value:
                continue
            before = None if place is None else folded[place].expr
            if place is not None and isinstance(before, ConstantText):
                joined = ConstantText(before.value + node.expr.value)
                folded[place] = replace(folded[place], expr=joined)
                continue
        last[node.stream.number] = len(folded)
        folded.append(node)
    return folded


def send_prefix(graph: Graph, batch: Sequence[Mapping[str, Any]], backend: Backend) -> None:
    """Have the server compute the longest text with which all runs of a batch begin."""
    template = backend.get_chat_template() or make_plain_template()
    prompt = find_prefix(graph, batch, Transcript(template))
    if len(prompt.text) < _MIN_PREFIX_CHARACTERS:
        return
    try:
        backend.cache_prefix(prompt, uuid.uuid4().hex)
    except PDError as error:
        _log.warning("a batch goes on without its prefix in the cache: %s", error)


def find_prefix(
    graph: Graph, batch: Sequence[Mapping[str, Any]], transcript: Transcript
) -> ProgramPrompt:
    """Find the text with which the program begins for all arguments of a batch."""
    for node in graph.nodes:
        if node.stream.number != 0:
            break
        try:
            if not _extend_prefix(transcript, node.expr, batch):
                break
        except PDError:
            break  # the chat template refuses the turn, which the runs will report
    return transcript.make_prompt()


def _extend_prefix(transcript: Transcript, expr: Expr, batch: Sequence[Mapping[str, Any]]) -> bool:
    """Append the text an operation says in all runs. Return whether the next one may follow."""
    match expr:
        case ConstantText(value):
            transcript.append(value)
        case RoleBegin(role):
            transcript.open_turn(role)
        case RoleEnd(role):
            transcript.close_turn(role)
        case ScopeBegin() | ScopeEnd() | SetValue():
            pass
        case Argument(name):
            if not all(name in arguments for arguments in batch):
                return False
            try:
                values = [expr.walk(arguments[name]) for arguments in batch]
            except Exception:  # noqa: BLE001 (arguments may be anything; the run will report it)
                return False
            if not all(isinstance(value, str) for value in values):
                return False
            shared = _find_common_prefix(values)
            transcript.append(shared)
            return all(value == shared for value in values)
        case _:
            return False
    return True


def _find_common_prefix(texts: Sequence[str]) -> str:
    """Find the longest text with which all of the texts begin."""
    # All texts lie between the first and the last one in their order.
    first, last = min(texts), max(texts)
    pairs = enumerate(zip(first, last, strict=False))
    end = next((place for place, (one, other) in pairs if one != other), len(first))
    return first[:end]
