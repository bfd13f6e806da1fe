"""The grammars of a node: compiled once, kept for further requests within a limit of memory."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pd.core.errors import InvalidRequestError, PDError, QueueFullError, UnavailableError
from pd.grammar.compiler import CompileLimits, GrammarCompiler
from pd.grammar.fair_queue import FairQueue
from pd.grammar.jump_forward import Retokenizer
from pd.grammar.rules import GrammarRules

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pd.core.grammar import Grammar
    from pd.engine.token_rules import TokenRules
    from pd.grammar.child import Result, Vocabulary
    from pd.grammar.token_characters import TokenCharacters
    from pd.grammar.xgrammar_library import Compiled

    MakeRules = Callable[[Collection[int]], TokenRules]
    Done = Callable[["MakeRules | PDError"], None]

logger = logging.getLogger(__name__)

# Size of a compiled grammar, serialized. Loading one of so many bytes takes a fraction of a second.
MAX_COMPILED_BYTES = 64 << 20
# Grammars that wait to be compiled, of one owner and of all.
MAX_WAITING = 256
_MAX_WAITING_OF_ALL = 512
# Memory of the grammars of all requests at once, in multiples of --grammar-cache; it is enough for
# one of the largest in any case. Those that are being loaded may come on top.
_IN_USE_FACTOR = 4
# Processes, so that one grammar that takes long does not keep all others waiting.
_CHILDREN = 2
# Stack of the threads that load grammars.
_STACK_BYTES = 64 << 20
# Processor time and size of grammars that are compiled here, too, when whoever waits has been
# answered: nothing could end that.
_LEARN_SECONDS, _LEARN_BYTES = 0.5, 16 << 20
# How long the end waits for a grammar that is being compiled here: Python must not end while a
# thread is inside the library.
_END_SECONDS = 10.0
# Grammars that cannot be compiled, remembered so that each is tried once.
_MAX_REFUSED = 256


@dataclass
class _Wanted:
    """A grammar that is compiled or waits for it.

    Attributes:
        done: callbacks of those who want it.
        owners: in whose queues it is.
    """

    done: list[Done] = field(default_factory=list)
    owners: set[str] = field(default_factory=set)
    is_started: bool = False


class Grammars:
    """Any thread may use it. The processes that compile start with the first grammar.

    Args:
        vocabulary: what tokens are; or why they are not known, with which every grammar is refused.
        cache_bytes: memory of compiled grammars that no request uses.
        jump_forward: whether rules name the tokens that a grammar forces.

    Attributes:
        outcomes: how often a grammar was wanted and was ``cached``, ``compiled``, ``refused`` as
            wrong or too large, or ``unavailable``.
        compile_seconds, num_compiled: time until new grammars could be used, from their turn on,
            and how many they were.
    """

    def __init__(
        self,
        vocabulary: Vocabulary | str,
        limits: CompileLimits,
        cache_bytes: int,
        *,
        jump_forward: bool = False,
    ) -> None:
        self._vocabulary, self._limits, self._cache_bytes = vocabulary, limits, cache_bytes
        self.outcomes: Counter[str] = Counter()
        self.compile_seconds, self.num_compiled = 0.0, 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._compiled: OrderedDict[Grammar, tuple[Compiled, int]] = OrderedDict()
        self._refused: OrderedDict[Grammar, PDError] = OrderedDict()
        self._bytes = 0
        # Every compiled grammar that something refers to, and its size.
        self._living: list[tuple[weakref.ref[Any], int]] = []
        self._most_living = max(_IN_USE_FACTOR * cache_bytes, limits.max_bytes)
        self._wanted: dict[Grammar, _Wanted] = {}
        self._jobs: FairQueue[Grammar] = FairQueue()
        self._compilers: list[GrammarCompiler] = []
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._info: Any = None
        self._own: Any = None
        self._characters: TokenCharacters | None = None
        self._control: frozenset[int] = frozenset()
        self._retokenizer: Retokenizer | None = None
        self._jump_forward = jump_forward
        self._info_lock = threading.Lock()

    def want(self, grammar: Grammar, done: Done, owner: str = "") -> None:
        """Have a grammar compiled. ``done`` is called once with what makes its rules, or with the
        reason why there are none: at once if that is known, else later by another thread.

        Args:
            owner: whose turn it takes: owners do not wait behind one another's grammars.
        """
        with self._lock:
            known = self._known(grammar) or self._start_workers() or self._queue(grammar, owner)
            if known is None:
                self._wanted[grammar].done.append(done)
                return
            self._count(known)
        done(known)

    def refuse(self, grammar: Grammar, error: PDError) -> None:
        """Have further requests for a grammar fail with this error."""
        with self._lock:
            _, size = self._compiled.pop(grammar, (None, 0))
            self._bytes -= size
            self._remember_refusal(grammar, error)

    @property
    def waiting(self) -> int:
        """Grammars that are compiled or wait for it."""
        return len(self._wanted)

    @property
    def cache_bytes(self) -> int:
        """Memory of the compiled grammars that are kept."""
        return self._bytes

    @property
    def living_bytes(self) -> int:
        """Memory of the compiled grammars that are kept or that requests use."""
        with self._lock:
            return self._count_living()

    def _count_living(self) -> int:
        self._living = [each for each in self._living if each[0]() is not None]
        return sum(size for _, size in self._living)

    def _lack_of_memory(self, more: int) -> QueueFullError | None:
        """Why there is no room for a compiled grammar of so many bytes. The lock is held."""
        if (living := self._count_living()) + more <= self._most_living:
            return None
        return QueueFullError(
            f"the grammars of requests under way take {living >> 20} MiB, and all together may "
            f"take {self._most_living >> 20} MiB ({_IN_USE_FACTOR} times --grammar-cache)"
        )

    def close(self) -> None:
        """Compile nothing more, and wait for what is being compiled here."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            compilers = list(self._compilers)
        for compiler in compilers:
            compiler.close()
        for thread in self._threads:
            thread.join(_END_SECONDS)

    def _known(self, grammar: Grammar) -> MakeRules | PDError | None:
        if isinstance(self._vocabulary, str):
            return InvalidRequestError(
                f"{grammar.kind}: this node cannot constrain output: {self._vocabulary}",
                param=grammar.kind,
            )
        if self._closed:
            return UnavailableError("the node stops")
        if grammar in self._refused:
            return self._refused[grammar]
        if grammar not in self._compiled:
            return None
        self._compiled.move_to_end(grammar)
        return self._make_rules(self._compiled[grammar][0])

    def _queue(self, grammar: Grammar, owner: str) -> PDError | None:
        """Have a grammar take its owner's turn, unless it does already or is being compiled. It is
        passed over if another's turn comes first. Returns why there is no room."""
        wanted = self._wanted.get(grammar)
        if wanted is not None and (wanted.is_started or owner in wanted.owners):
            return None
        number = self._jobs.count(owner)
        if number >= MAX_WAITING or len(self._jobs) >= _MAX_WAITING_OF_ALL:
            return QueueFullError(f"{number} grammars wait to be compiled")
        if (full := self._lack_of_memory(0)) is not None:
            return full
        self._wanted.setdefault(grammar, _Wanted()).owners.add(owner)
        self._jobs.put(owner, grammar)
        self._changed.notify()
        return None

    def _count(self, found: MakeRules | PDError, outcome: str = "cached") -> None:
        if isinstance(found, PDError):
            outcome = "refused" if isinstance(found, InvalidRequestError) else "unavailable"
        self.outcomes[outcome] += 1

    def _start_workers(self) -> PDError | None:
        """Start the threads that are missing. Returns why there is none."""
        assert not isinstance(self._vocabulary, str)
        while len(self._compilers) < _CHILDREN:
            compiler = GrammarCompiler(self._vocabulary, self._limits)
            name = f"grammars-{len(self._compilers)}"
            # More than a process has, so that what it can compile does not overflow here.
            before = threading.stack_size(_STACK_BYTES)
            thread = threading.Thread(target=self._work, args=(compiler,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system has no room for one
                if self._threads:
                    break
                return UnavailableError(f"grammars cannot be compiled here at present: {error}")
            finally:
                threading.stack_size(before)
            self._compilers.append(compiler)
            self._threads.append(thread)
        return None

    def _work(self, compiler: GrammarCompiler) -> None:
        self._prepare(compiler)
        while (grammar := self._next()) is not None:
            began = time.monotonic()
            found: MakeRules | PDError
            try:
                result = compiler.compile(grammar)
                with self._lock:
                    full = self._lack_of_memory(len(result.compiled))
                if full is not None:
                    raise full
                compiled = self._load(result, grammar, compiler.tokens)
                found = self._make_rules(compiled)
            except PDError as error:
                compiled, found = None, error
            except Exception as error:
                logger.exception("a grammar could not be loaded")
                compiled, found = None, UnavailableError(f"a grammar could not be loaded: {error}")
            with self._lock:
                self.compile_seconds += time.monotonic() - began
                self.num_compiled += 1
                if compiled is not None:
                    self._keep(grammar, compiled)
                elif isinstance(found, InvalidRequestError):
                    self._remember_refusal(grammar, found)
                waiting = self._wanted.pop(grammar).done
                for _ in waiting:
                    self._count(found, "compiled")
            for done in waiting:
                self._answer(done, found)
            if compiled is not None and result.compiled:
                self._learn(result, grammar)

    @staticmethod
    def _prepare(compiler: GrammarCompiler) -> None:
        """Begin what the first grammar would wait for otherwise."""
        try:
            compiler.start()
            # NOTE: loads transformers, while the process starts; nodes that get no grammar do
            # without.
            from pd.grammar import xgrammar_library  # noqa: F401
        except Exception:
            # For example, no memory. Each grammar tries again and has the error, if it still is
            # one, as its answer.
            logger.exception("what compiles grammars could not be prepared")

    @staticmethod
    def _answer(done: Done, found: MakeRules | PDError) -> None:
        try:
            done(found)
        except Exception:  # others wait for the same grammar, and all others for this thread
            logger.exception("a request could not be given its grammar")

    def _next(self) -> Grammar | None:
        """The grammar to compile next; None when there will be none."""
        with self._changed:
            while True:
                while len(self._jobs):
                    grammar = self._jobs.get()
                    wanted = self._wanted.get(grammar)
                    if wanted is not None and not wanted.is_started:
                        wanted.is_started = True
                        return grammar
                if self._closed:
                    return None
                self._changed.wait()

    def _load(self, result: Result, grammar: Grammar, tokens: bytes) -> Compiled:
        from pd.grammar.xgrammar_library import (
            Compiler,
            control_tokens,
            load_compiled,
            load_info,
            token_characters,
        )

        with self._info_lock:
            if self._own is None:
                self._info = load_info(tokens)
                self._own = Compiler(self._info)
                assert not isinstance(self._vocabulary, str)
                self._control = control_tokens(self._info, self._vocabulary)
                if self._jump_forward:
                    self._retokenizer = Retokenizer(self._vocabulary.tokenizer)
        if result.compiled:
            compiled = load_compiled(result.compiled, grammar.kind, self._own)
        else:
            # A process did it within the limits, in less time than it takes to hand it over.
            compiled = self._own.compile(grammar.kind, grammar.text)
        with self._info_lock:
            if compiled.counted is not None and self._characters is None:
                self._characters = token_characters(self._info)
        return compiled

    def _learn(self, result: Result, grammar: Grammar) -> None:
        """Compile what took a process longer, for the parts of it that others will have, too."""
        is_small = len(result.compiled) <= _LEARN_BYTES
        is_quick = result.cpu_seconds <= _LEARN_SECONDS
        if not (result.is_silent and is_small and is_quick) or self._closed:
            return
        try:
            self._own.compile(grammar.kind, grammar.text)
        except Exception:
            logger.exception("a grammar could not be compiled a second time")

    def _make_rules(self, compiled: Compiled) -> MakeRules:
        characters = None if compiled.counted is None else self._characters
        return partial(self._rules, compiled, characters)

    def _rules(
        self,
        compiled: Compiled,
        characters: TokenCharacters | None,
        ending: Collection[int],
    ) -> GrammarRules:
        """Rules for a choice. A token that ends it comes where the grammar has its text, or, if
        it is no text, where the grammar is complete."""
        stop_ids = [token for token in ending if token in self._control]
        return GrammarRules(compiled, characters, self._retokenizer, stop_ids)

    def _remember_refusal(self, grammar: Grammar, error: PDError) -> None:
        self._refused[grammar] = error
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)

    def _keep(self, grammar: Grammar, compiled: Compiled) -> None:
        size = int(compiled.memory_size_bytes) + len(grammar.text)
        self._compiled[grammar] = compiled, size
        self._living.append((weakref.ref(compiled.free), size))
        self._bytes += size
        while self._bytes > self._cache_bytes and self._compiled:
            _, (_, dropped) = self._compiled.popitem(last=False)
            self._bytes -= dropped
