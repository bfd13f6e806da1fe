"""Functions of the language, and how they run: once, or for a batch of arguments."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from pd.core.errors import UsageError
from pd.lang.batches import run_in_order
from pd.lang.compiler import CompiledProgram, send_prefix
from pd.lang.executor import Executor
from pd.lang.run import ProgramRun, cancel_runs, running_run
from pd.lang.settings import choose_backend, global_config, split_settings
from pd.lang.state import ProgramState
from pd.lang.tracing import get_current_graph, trace_beginning, trace_call, trace_function

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pd.lang.backend import Backend
    from pd.lang.body import FunctionBody
    from pd.lang.graph import Graph
    from pd.lang.ir import GenSettings

    Arguments = Mapping[str, Any]


class ProgramFunction:
    """A function of the language: a body, and the ways to run it.

    Attributes:
        body: the function of Python, with its parameters.
    """

    def __init__(self, body: FunctionBody) -> None:
        self.body = body
        self.__name__ = body.name
        self.__doc__ = body.func.__doc__

    def bind(self, **kwargs: Any) -> ProgramFunction:
        """Return the function with some arguments set."""
        return ProgramFunction(self.body.bind(kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run the function, as :meth:`run` does."""
        return self.run(*args, **kwargs)

    def run(
        self,
        *args: Any,
        stream: bool = False,
        backend: object = None,
        use_thread: bool = True,
        **kwargs: Any,
    ) -> ProgramState:
        """Run the function on the arguments of its body.

        Args:
            stream: return before the body ends, for :meth:`ProgramState.text_iter`.
            backend: the model; by default, that of the calling program, and then that of
                :func:`pd.lang.set_default_backend`.
            use_thread: perform operations while the body goes on. Without, each is performed when
                it is appended, which is easier to debug.
            kwargs: arguments of the body, and sampling (:data:`pd.lang.settings.RUN_SETTINGS`) of
                all generations that do not set their own.

        Raises whatever the body raises. Errors of the model are in ``error()`` of the state, and
        raised to the body if it reads a variable.
        """
        settings, arguments = split_settings(kwargs)
        graph = get_current_graph()
        if graph is not None:
            return trace_call(graph, self.body, args, arguments, settings, backend)
        run = self._make_run(choose_backend(backend), settings, stream, use_thread)
        executor = Executor(run)
        state = ProgramState(executor)
        if stream:
            self._start_body(executor, state, self.body.name_arguments(args) | arguments)
            return state
        try:
            self._run_body(run, state, args, arguments)
        except BaseException:  # also Ctrl-C
            cancel_runs([run])
            raise
        if global_config.verbosity >= 2:
            print(state.text())
        return state

    def run_batch(
        self,
        batch_kwargs: Sequence[Arguments | Sequence[Any]],
        *,
        backend: object = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        **kwargs: Any,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run the function once for each set of arguments, and return the states in order.

        A run that fails does not stop the others: ``error()`` of its state says why, also if the
        body raised. Ctrl-C aborts all requests.

        Args:
            batch_kwargs: arguments by name, or lists of arguments in the order of the parameters.
            num_threads: runs at a time; ``auto`` is 16 for each core, and 96 at least.
            progress_bar: show how many runs have ended.
            generator_style: return an iterator, which yields each state once it is complete.
            kwargs: sampling, as in :meth:`run`.
        """
        settings, unknown = split_settings(kwargs)
        self.body.refuse_settings(unknown)
        used = choose_backend(backend)
        batch = [self.body.name_arguments(each) for each in batch_kwargs]
        if global_config.enable_precache_with_tracing and len(batch) > 1:
            send_prefix(trace_beginning(self.body, {}), batch, used)
        jobs = [_BodyJob(self, self._make_run(used, settings, False, True), each) for each in batch]
        states = run_in_order(jobs, num_threads, progress_bar=progress_bar)
        return states if generator_style else list(states)

    def trace(self, *, backend: object = None, **kwargs: Any) -> Graph:
        """Record the body as a graph. Parameters without an argument are abstract.

        Raises TracingError if a decision of the body depends on an abstract value.
        """
        return trace_function(self.body, kwargs)

    def compile(self, *, backend: object = None) -> CompiledProgram:
        """Record the body, and optimise it. Raises TracingError as :meth:`trace` does."""
        return CompiledProgram(self.body, trace_function(self.body, {}), backend)

    def cache(self, backend: object = None) -> None:
        """Have the server compute the text with which every run begins."""
        send_prefix(trace_beginning(self.body, {}), [{}], choose_backend(backend))

    def _make_run(
        self, backend: Backend, settings: GenSettings, streams: bool, uses_threads: bool
    ) -> ProgramRun:
        if streams and self.body.spec_tokens is not None:
            raise UsageError(
                f"{self.__name__}: num_api_spec_tokens and stream cannot be combined; leave one out"
            )
        return ProgramRun(
            self.__name__,
            backend,
            settings,
            streams=streams,
            uses_threads=uses_threads,
            spec_tokens=self.body.spec_tokens,
        )

    def _run_body(
        self, run: ProgramRun, state: ProgramState, args: Sequence[Any], arguments: Arguments
    ) -> None:
        token = running_run.set(run)
        try:
            state.ret_value = self.body.call(state, args, arguments)
        finally:
            running_run.reset(token)

    def run_to_end(self, executor: Executor, state: ProgramState, arguments: Arguments) -> None:
        """Run the body, and wait for everything. Keep its error in the state."""
        try:
            self._run_body(executor.run, state, (), arguments)
        except BaseException as error:  # noqa: BLE001 (a body may raise anything, also SystemExit)
            executor.fail(self.body.name_error(error))
            cancel_runs([executor.run])
        executor.sync()

    def _start_body(self, executor: Executor, state: ProgramState, arguments: Arguments) -> None:
        """Run the body on a thread of its own."""
        began = threading.Event()

        def run_body() -> None:
            executor.begin_body()
            began.set()
            try:
                self.run_to_end(executor, state, arguments)
            finally:
                executor.end_body()

        threading.Thread(target=run_body, name=f"body-{self.__name__}", daemon=True).start()
        began.wait()


class _BodyJob:
    """A run of a body in a batch."""

    def __init__(self, function: ProgramFunction, run: ProgramRun, arguments: Arguments) -> None:
        self._function = function
        self._arguments = arguments
        self._executor = Executor(run)
        self.state = ProgramState(self._executor)
        self.runs = [run]

    def run_to_end(self) -> None:
        self._function.run_to_end(self._executor, self.state, self._arguments)
