"""Performs the operations of one state, in order, while the program's body goes on."""

from __future__ import annotations

import contextvars
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd.core.errors import ProgramError
from pd.lang.ir import (
    Assign,
    ConstantText,
    Expr,
    ExprList,
    Gen,
    RoleBegin,
    RoleEnd,
    SayValue,
    ScopeBegin,
    ScopeEnd,
    Select,
    SeparateReasoning,
    as_expr,
    list_names,
    reasoning_name,
)
from pd.lang.pieces import Piece, StreamedVariable, join_pieces
from pd.lang.reasoning import split_reasoning
from pd.lang.speculation import TextSpeculation, TurnSpeculation
from pd.lang.transcript import Transcript

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pd.lang.backend import ModelAnswer
    from pd.lang.ir import GenSettings
    from pd.lang.run import ProgramRun

# The thread of the body performs these itself, because they take no time.
_CHEAP = (ConstantText, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd)


@dataclass(frozen=True)
class Fork(Expr):
    """Starts states from here. Only executors make it."""

    children: tuple[Executor, ...]


class Executor:
    """Performs operations one after the other, on a thread that lives while there are any.

    The body's thread submits operations and reads results. ``_changed`` guards everything that both
    threads touch; the transcript belongs to whoever performs operations.
    """

    def __init__(self, run: ProgramRun, *, starts: bool = True) -> None:
        """``starts``: begin at once, instead of where a :class:`Fork` finds its parent."""
        self.run = run
        self._transcript = Transcript(run.template)
        self._changed = threading.Condition()
        self._queue: deque[Expr] = deque()
        self._is_busy = not starts
        self._has_begun = starts
        self._pending: Counter[str] = Counter()
        self._lost: set[str] = set()
        self._variables: dict[str, Any] = {}
        # All values of each variable so far, because a compiled program may read an earlier one.
        self._versions: dict[str, list[Any]] = {}
        self._inherited: frozenset[str] = frozenset()
        self._meta: dict[str, Any] = {}
        self._streamed: dict[str, StreamedVariable] = {}
        # Open scopes, with the position where each begins.
        self._scopes: list[tuple[str, int]] = []
        self._error: ProgramError | None = None
        # The thread of a streamed body while it runs.
        self._body: int | None = None
        self._text_speculation: TextSpeculation | None = None
        self._turn_speculation: TurnSpeculation | None = None
        if run.spec_tokens is not None:
            if run.backend.is_chat_model:
                self._turn_speculation = TurnSpeculation(run.spec_tokens)
            else:
                self._text_speculation = TextSpeculation(run.spec_tokens)

    # Called by the body.

    def submit(self, expr: Expr) -> None:
        """Append an operation. It is performed after all earlier ones."""
        items = expr.items if isinstance(expr, ExprList) else (expr,)
        with self._changed:
            self._pending.update(list_names(expr))
            self._queue.extend(items)
            starts = not self._is_busy
            self._is_busy = True
        if not starts:
            return
        if all(isinstance(item, _CHEAP) for item in items) or not self.run.uses_threads:
            self._drain()
        else:
            self._start_thread()

    def fork(self, size: int) -> list[Executor]:
        """Make states. They begin here, once everything before has been performed."""
        children = [Executor(self.run, starts=False) for _ in range(size)]
        self.submit(Fork(tuple(children)))
        return children

    @property
    def streams(self) -> bool:
        """Whether answers come in pieces."""
        return self.run.streams

    def begin_body(self) -> None:
        """Note that the body runs on this thread, while other threads read the state."""
        self._body = threading.get_ident()

    def end_body(self) -> None:
        with self._changed:
            self._body = None
            self._changed.notify_all()

    def get_var(self, name: str, timeout: float | None = None) -> Any:
        """Wait for a variable.

        Raises:
            KeyError: no operation has set it.
            ProgramError: its operation failed, or an earlier one did.
            TimeoutError: it is not there in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_known(name), timeout):
                raise TimeoutError(f"variable {name!r} is not there after {timeout} s")
            if name in self._lost and self._error is not None:
                raise self._error
            if name in self._variables:
                return self._variables[name]
            if self._error is not None:
                raise self._error
        raise KeyError(name)

    def has_var(self, name: str) -> bool:
        """Wait for pending operations on a variable, and tell whether it is set."""
        with self._changed:
            self._changed.wait_for(
                lambda: (self._has_begun and not self._pending[name]) or self._is_settled()
            )
            return name in self._variables

    def get_meta(self, name: str, timeout: float | None = None) -> Any:
        """Wait for a variable, and return facts about its answer; None if there are none."""
        self.get_var(name, timeout)
        with self._changed:
            return self._meta.get(name)

    def set_var(self, name: str, value: object) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._pending[name] or self._is_settled())
            self._variables[name] = value
            self._lost.discard(name)
            self._changed.notify_all()

    def get_version(self, name: str, number: int) -> Any:
        """Wait for the ``number``-th value of a variable. Raises as :meth:`get_var` does."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    len(self._versions.get(name, ())) > number or self._error or not self._is_busy
                )
            )
            values = self._versions.get(name, ())
            if len(values) > number:
                return values[number]
            if self._error is not None:
                raise self._error
        raise KeyError(name)

    def gather(self, values: Mapping[str, object]) -> None:
        """Set variables to the values from forked states."""
        for name, value in values.items():
            self.set_var(name, value)

    def list_new_vars(self) -> dict[str, Any]:
        """Return the variables set since the state began."""
        self.sync()
        with self._changed:
            return {k: v for k, v in self._variables.items() if k not in self._inherited}

    def sync(self) -> None:
        """Wait until all operations so far have been performed, or have failed."""
        with self._changed:
            self._changed.wait_for(self._is_settled)

    def get_text(self) -> str:
        self.sync()
        return self._transcript.text

    def get_messages(self) -> list[dict[str, str]]:
        self.sync()
        return list(self._transcript.messages)

    def get_error(self) -> ProgramError | None:
        self.sync()
        return self._error

    def fail(self, error: ProgramError) -> None:
        """Have all operations from here on fail, unless an earlier one has failed."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def iterate_text(self) -> Iterator[str]:
        """Yield the text as it grows. Raises the error of the state at the end."""
        position = 0
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: len(self._transcript.text) > position or self._is_settled()  # noqa: B023
                )
                is_last = self._is_settled()
                new = self._transcript.text[position:]
                position = max(position, len(self._transcript.text))
            if new:
                yield new
            if is_last:
                break
        if self._error is not None:
            raise self._error

    def iterate_var(self, name: str) -> Iterator[Piece]:
        """Yield the pieces of a variable as they come. Raises as :meth:`get_var` does."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._streamed or self._is_known(name))
            streamed = self._streamed.get(name)
        if streamed is None:
            value = self.get_var(name)
            yield Piece(value, self._meta.get(name))
            return
        position, held = 0, None
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: len(streamed.pieces) > position or streamed.is_done  # noqa: B023
                )
                new = streamed.pieces[position:]
                position += len(new)
                is_last = streamed.is_done
            for piece in new:
                held = piece if held is None else join_pieces(held, piece)
                if held.text:
                    yield held
                    held = None
            if is_last:
                break
        if name in self._lost and self._error is not None:
            raise self._error

    # Under `_changed`.

    def _is_settled(self) -> bool:
        is_body_over = self._body is None or self._body == threading.get_ident()
        return not self._is_busy and is_body_over

    def _is_known(self, name: str) -> bool:
        """Whether waiting any longer would teach us nothing new about a variable."""
        if self._is_settled():
            return True
        return not self._pending[name] and (name in self._variables or name in self._lost)

    # Called by the thread that performs operations.

    def _start_thread(self) -> None:
        context = contextvars.copy_context()
        name = f"program-{self.run.function}"
        thread = threading.Thread(target=context.run, args=(self._drain,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the process has as many threads as it may
            message = f"{self.run.function}: {error}; use fewer forks, or a lower num_threads"
            self.fail(ProgramError(message, function=self.run.function))
            self._drain()

    def _drain(self) -> None:
        """Perform operations until there are none."""
        while True:
            with self._changed:
                if not self._queue:
                    self._is_busy = False
                    self._changed.notify_all()
                    return
                expr = self._queue.popleft()
            try:
                if self._error is None:
                    self._perform(expr)
            except Exception as error:  # noqa: BLE001 (backends may fail in any way)
                self.fail(self._name_error(expr, error))
            with self._changed:
                names = list_names(expr)
                self._pending.subtract(names)
                if self._error is not None:
                    self._lose(expr, names)
                self._changed.notify_all()

    def _lose(self, expr: Expr, names: Iterable[str]) -> None:
        """Give up the variables and forks of a failed operation. Called under ``_changed``."""
        self._lost.update(names)
        for streamed in self._streamed.values():
            streamed.is_done = True
        if isinstance(expr, Fork):
            for child in expr.children:
                if self._error is not None:
                    child.fail(self._error)
                child.start()

    def _name_error(self, expr: Expr, error: Exception) -> ProgramError:
        if isinstance(error, ProgramError) and error.function is not None:
            return error
        variable = next(iter(list_names(expr)), None)
        where = self.run.function if variable is None else f"{self.run.function}: {variable!r}"
        named = ProgramError(
            f"{where}: {str(error) or type(error).__name__}",
            function=self.run.function,
            variable=variable,
        )
        named.__cause__ = error
        return named

    def _perform(self, expr: Expr) -> None:
        match expr:
            case ConstantText(value):
                self._say(value)
            case Gen():
                self._perform_gen(expr)
            case Select():
                self._perform_select(expr)
            case RoleBegin(role):
                self._open_turn(role)
            case RoleEnd(role):
                self._close_turn(role)
            case ScopeBegin(name):
                self._scopes.append((name, len(self._transcript.text)))
            case ScopeEnd():
                name, start = self._scopes.pop()
                self._set(name, self._transcript.text[start:])
            case SeparateReasoning(gen, family):
                self._perform_reasoning(gen, family)
            case SayValue(read):
                self._say_value(read())
            case Assign(name, read):
                self._set(name, read())
            case Fork(children):
                self._perform_fork(children)
            case _:
                raise TypeError(f"unknown operation {expr!r}")

    def _say(self, text: str) -> None:
        if self._turn_speculation is not None and self._transcript.role == "assistant":
            self._turn_speculation.add_text(text)
            return
        if self._text_speculation is not None:
            self._text_speculation.match_text(text)
        with self._changed:
            self._transcript.append(text)
            self._changed.notify_all()

    def _say_value(self, value: object) -> None:
        expr = as_expr(value)
        if not isinstance(expr, ConstantText):
            raise TypeError(f"cannot append {value!r}: only texts can be read from variables")
        self._say(expr.value)

    def _set(self, name: str | None, value: object, meta: object = None) -> None:
        if name is None:
            return
        with self._changed:
            self._variables[name] = value
            self._versions.setdefault(name, []).append(value)
            if meta is not None:
                self._meta[name] = meta
            self._changed.notify_all()

    def _perform_gen(self, gen: Gen) -> None:
        settings = self.run.defaults.override(gen.settings)
        if self._turn_speculation is not None and self._transcript.role == "assistant":
            self._turn_speculation.add_gen(gen.name, settings)
        elif self.run.streams and self._text_speculation is None and settings.n in (None, 1):
            self._stream_gen(gen.name, settings)
        else:
            answer = self._generate(settings)
            self._finish_gen(gen.name, answer.texts, answer.meta)

    def _generate(self, settings: GenSettings) -> ModelAnswer:
        if self._text_speculation is None:
            return self._ask(settings)
        return self._text_speculation.generate(settings, self._ask)

    def _ask(self, settings: GenSettings) -> ModelAnswer:
        prompt = self._transcript.make_prompt()
        with self.run.name_request() as rid:
            return self.run.backend.generate(prompt, settings, rid)

    def _finish_gen(self, name: str | None, texts: tuple[str, ...], meta: object) -> None:
        with self._changed:
            self._transcript.append(texts[0])
        self._set(name, texts[0] if len(texts) == 1 else list(texts), meta)

    def _stream_gen(self, name: str | None, settings: GenSettings) -> None:
        streamed = StreamedVariable()
        with self._changed:
            if name is not None:
                self._streamed[name] = streamed
        whole = None
        prompt = self._transcript.make_prompt()
        with self.run.name_request() as rid:
            for answer in self.run.backend.stream(prompt, settings, rid):
                piece = Piece(answer.texts[0], answer.meta)
                whole = piece if whole is None else join_pieces(whole, piece)
                with self._changed:
                    streamed.pieces.append(piece)
                    self._transcript.append(piece.text)
                    self._changed.notify_all()
        with self._changed:
            streamed.is_done = True
        self._set(name, whole.text if whole else "", whole.meta if whole else None)

    def _perform_select(self, select: Select) -> None:
        assert isinstance(select.choices, tuple)
        if self._turn_speculation is not None and self._transcript.role == "assistant":
            raise ProgramError(
                "select cannot be speculated in a chat: leave out num_api_spec_tokens"
            )
        prompt = self._transcript.make_prompt()
        with self.run.name_request() as rid:
            decision = self.run.backend.select(prompt, select.choices, select.method, rid)
        self._say(decision.decision)
        self._set(select.name, decision.decision, decision.meta_info)

    def _perform_reasoning(self, gen: Gen, family: str | None) -> None:
        """Perform a generation, and keep its reasoning out of the text."""
        if self._turn_speculation is not None:
            raise ProgramError(
                "separate_reasoning cannot be speculated in a chat: leave out num_api_spec_tokens"
            )
        answer = self._generate(self.run.defaults.override(gen.settings))
        pairs = [
            split_reasoning(text, self._transcript.text, self.run.template.source, family)
            for text in answer.texts
        ]
        if gen.name is not None:
            found = [reasoning for reasoning, _ in pairs]
            self._set(reasoning_name(gen.name), found[0] if len(found) == 1 else found)
        self._finish_gen(gen.name, tuple(content for _, content in pairs), answer.meta)

    def _open_turn(self, role: str) -> None:
        with self._changed:
            replaces = self._transcript.open_turn(role)
            self._changed.notify_all()
        if replaces and self._scopes:
            raise ProgramError(
                f"var_scope({self._scopes[0][0]!r}) spans turns that the model's chat "
                "template shows differently later: end it before the next turn"
            )

    def _close_turn(self, role: str) -> None:
        if self._turn_speculation is not None and role == "assistant":
            self._speculate_turn(self._turn_speculation)
        with self._changed:
            self._transcript.close_turn(role)
            self._changed.notify_all()

    def _speculate_turn(self, speculation: TurnSpeculation) -> None:
        text, variables = speculation.answer_turn(self._ask)
        with self._changed:
            self._transcript.append(text)
        for name, value, meta in variables:
            self._set(name, value, meta)

    def _perform_fork(self, children: tuple[Executor, ...]) -> None:
        """Start states from here, after the server has computed their common text."""
        if len(children) > 1 and self._transcript.text:
            with self.run.name_request() as rid:
                self.run.backend.cache_prefix(self._transcript.make_prompt(), rid)
        for child in children:
            with self._changed:
                child.inherit(self._transcript.copy(), dict(self._variables))
            child.start()

    def inherit(self, transcript: Transcript, variables: dict[str, Any]) -> None:
        """Take over where the parent is. Its thread calls this before :meth:`start`."""
        self._transcript = transcript
        self._inherited = frozenset(variables)
        with self._changed:
            self._variables = variables | self._variables
            self._has_begun = True
            self._changed.notify_all()

    def start(self) -> None:
        """Begin to perform operations. The parent's thread calls this once."""
        with self._changed:
            if not self._queue:
                self._is_busy = False
                self._changed.notify_all()
                return
        if self.run.uses_threads:
            self._start_thread()
        else:
            self._drain()
