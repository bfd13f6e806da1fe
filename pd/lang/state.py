"""The state ``s`` of a program, and groups of forked states."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from pd.core.errors import UsageError
from pd.lang.ir import Expr, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, as_expr

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pd.core.errors import ProgramError
    from pd.lang.pieces import Piece

_REFUSED_JOINS = ("concate_and_append", "concatenate_and_append")


class StateExecutor(Protocol):
    """Performs the operations of a state, or records them (see :mod:`pd.lang.tracing`)."""

    @property
    def streams(self) -> bool: ...
    def submit(self, expr: Expr) -> None: ...
    def fork(self, size: int) -> Sequence[StateExecutor]: ...
    def gather(self, values: Mapping[str, list[Any]]) -> None: ...
    def get_var(self, name: str, timeout: float | None = None) -> Any: ...
    def has_var(self, name: str) -> bool: ...
    def set_var(self, name: str, value: object) -> None: ...
    def list_new_vars(self) -> dict[str, Any]: ...
    def get_meta(self, name: str, timeout: float | None = None) -> Any: ...
    def get_text(self) -> str: ...
    def get_messages(self) -> list[dict[str, str]]: ...
    def get_error(self) -> ProgramError | None: ...
    def sync(self) -> None: ...
    def iterate_text(self) -> Iterator[str]: ...
    def iterate_var(self, name: str) -> Iterator[Piece]: ...


class ProgramState:
    """The text of a program so far, and its variables.

    ``s += …`` returns at once. Reading a variable waits until it is there.

    Attributes:
        ret_value: the value of the body.
    """

    ret_value: Any = None

    def __init__(self, executor: StateExecutor) -> None:
        self.stream_executor = executor

    def __iadd__(self, other: object) -> ProgramState:
        self.stream_executor.submit(as_expr(other))
        return self

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __setitem__(self, name: str, value: object) -> None:
        self.set_var(name, value)

    def __contains__(self, name: str) -> bool:
        return self.stream_executor.has_var(name)

    def __repr__(self) -> str:
        return f"ProgramState({self.text()})"

    def get_var(self, name: str) -> Any:
        """Wait for a variable. Raises KeyError if nothing sets it, and ProgramError on failure."""
        return self.stream_executor.get_var(name)

    def set_var(self, name: str, value: object) -> None:
        self.stream_executor.set_var(name, value)

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        """Wait for a variable, and return the server's facts about it, such as its tokens."""
        return self.stream_executor.get_meta(name, timeout)

    def text(self) -> str:
        """Wait for everything, and return the whole text."""
        return self.stream_executor.get_text()

    def messages(self) -> list[dict[str, str]]:
        """Wait for everything, and return the turns of the chat."""
        return self.stream_executor.get_messages()

    def error(self) -> ProgramError | None:
        """Wait for everything, and return the first error, if there is any."""
        return self.stream_executor.get_error()

    def sync(self) -> None:
        """Wait for everything."""
        self.stream_executor.sync()

    def system(self, expr: object = None) -> Any:
        """Append a turn of the system. Without an expression, return a context for it."""
        return self._take_turn("system", expr)

    def user(self, expr: object = None) -> Any:
        """Append a turn of the user. Without an expression, return a context for it."""
        return self._take_turn("user", expr)

    def assistant(self, expr: object = None) -> Any:
        """Append a turn of the assistant. Without an expression, return a context for it."""
        return self._take_turn("assistant", expr)

    def _take_turn(self, role: str, expr: object) -> Any:
        if expr is None:
            return self._surround(RoleBegin(role), RoleEnd(role))
        turn = RoleBegin(role) + as_expr(expr) + RoleEnd(role)
        self.stream_executor.submit(turn)
        return turn

    def var_scope(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose text becomes a variable."""
        return self._surround(ScopeBegin(name), ScopeEnd(name))

    @contextlib.contextmanager
    def _surround(self, begin: RoleBegin | ScopeBegin, end: RoleEnd | ScopeEnd) -> Iterator[None]:
        self.stream_executor.submit(begin)
        yield
        self.stream_executor.submit(end)

    def fork(self, size: int = 1, position_ids_offset: object = None) -> ProgramStateGroup:
        """Return states. Each goes on from here by itself, at the same time as the others."""
        if position_ids_offset is not None:
            raise UsageError("position_ids_offset is not supported; leave it out")
        if size < 1:
            raise UsageError(f"cannot fork into {size} states; use 1 or more")
        states = [ProgramState(executor) for executor in self.stream_executor.fork(int(size))]
        return ProgramStateGroup(states, self)

    @contextlib.contextmanager
    def copy(self, position_ids_offset: object = None) -> Iterator[ProgramState]:
        """Return a context with one forked state, whose variables are gathered at the end."""
        group = self.fork(1, position_ids_offset)
        yield group[0]
        group.join()

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Yield the text, or that of a variable, as it comes. Needs ``run(stream=True)``.

        Without streaming, yield everything at the end. Raises ProgramError if the program fails.
        """
        executor = self.stream_executor
        if not executor.streams:
            yield self.text() if var_name is None else self.get_var(var_name)
        elif var_name is None:
            yield from executor.iterate_text()
        else:
            for piece in executor.iterate_var(var_name):
                yield piece.text

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """Like :meth:`text_iter`; yields pairs of text and facts with ``return_meta_data``."""
        if return_meta_data and var_name is None:
            raise UsageError("return_meta_data needs var_name, because facts belong to variables")
        if return_meta_data and var_name is not None:
            pieces: Iterator[Piece] = self.stream_executor.iterate_var(var_name)
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece.text, piece.meta
        else:
            texts = self.text_iter(var_name)
            while (text := await asyncio.to_thread(next, texts, None)) is not None:
                yield text


class ProgramStateGroup:
    """Forked states. ``group += …`` appends to each of them."""

    def __init__(self, states: list[ProgramState], source: ProgramState) -> None:
        self.states = states
        self._source = source

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> ProgramState:
        return self.states[index]

    def __setitem__(self, index: int, value: ProgramState) -> None:
        """Accept ``group[0] += …``."""
        if self.states[index] is not value:
            raise UsageError(f"cannot replace state {index} of a fork")

    def __iadd__(self, other: object) -> ProgramStateGroup:
        """Append an expression, one expression for each state, or ``other(index)``."""
        for number, state in enumerate(self.states):
            if isinstance(other, list | tuple):
                state += other[number]
            elif callable(other) and not isinstance(other, Expr):
                state += other(number)
            else:
                state += other
        return self

    def join(self, mode: str = "gather_variable") -> None:
        """Wait for all states, and gather their new variables in the state they came from.

        Each becomes a list with the values of the states that set it. A variable that the source
        has already keeps its value. Raises ProgramError if a state failed.
        """
        if mode in _REFUSED_JOINS:
            raise UsageError(
                f"join({mode!r}) is not supported, because it needs attention without positions; "
                "append the texts of the branches to the state instead"
            )
        if mode != "gather_variable":
            raise UsageError(f"invalid mode of join {mode!r}; use 'gather_variable'")
        gathered: dict[str, list[Any]] = {}
        for state in self.states:
            if (error := state.error()) is not None:
                raise error
            for name, value in state.stream_executor.list_new_vars().items():
                gathered.setdefault(name, []).append(value)
        for name in list(gathered):
            if name in self._source:
                del gathered[name]
        self._source.stream_executor.gather(gathered)
