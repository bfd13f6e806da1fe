"""The grammars of a node: compiled once, kept for further requests within a limit of memory."""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

from pd.core.errors import InvalidRequestError, PDError, QueueFullError, UnavailableError
from pd.grammar.compiler import CompileLimits, GrammarCompiler
from pd.grammar.jump_forward import Retokenizer
from pd.grammar.rules import GrammarRules

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pd.core.grammar import Grammar
    from pd.engine.token_rules import TokenRules
    from pd.grammar.child import Vocabulary

    MakeRules = Callable[[Collection[int]], TokenRules]
    Done = Callable[["MakeRules | PDError"], None]

logger = logging.getLogger(__name__)

# Size of a compiled grammar, serialized. Loading one of so many bytes takes a fraction of a second.
MAX_COMPILED_BYTES = 64 << 20
# Grammars that wait to be compiled.
MAX_WAITING = 256
# Children, so that one grammar that takes long does not keep all others waiting.
_CHILDREN = 2
# Grammars that cannot be compiled, remembered so that each is tried once.
_MAX_REFUSED = 256


class Grammars:
    """Any thread may use it.

    Args:
        vocabulary: None where the model has no tokenizer; then every grammar is refused.
        cache_bytes: memory of compiled grammars that no request uses.
        jump_forward: whether rules name the tokens that a grammar forces.
    """

    def __init__(
        self,
        vocabulary: Vocabulary | None,
        limits: CompileLimits,
        cache_bytes: int,
        *,
        jump_forward: bool = False,
    ) -> None:
        self._vocabulary, self._limits, self._cache_bytes = vocabulary, limits, cache_bytes
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, tuple[Any, int]] = OrderedDict()
        self._refused: OrderedDict[Grammar, PDError] = OrderedDict()
        self._bytes = 0
        self._waiting: dict[Grammar, list[Done]] = {}
        self._jobs: queue.Queue[Grammar | None] = queue.Queue()
        self._workers: list[threading.Thread] = []
        self._compilers: list[GrammarCompiler] = []
        self._closed = False
        self._info: Any = None
        self._retokenizer: Retokenizer | None = None
        self._jump_forward = jump_forward
        self._info_lock = threading.Lock()

    def want(self, grammar: Grammar, done: Done) -> None:
        """Have a grammar compiled. ``done`` is called once with what makes its rules, or with the
        reason why there are none: at once if that is known, else later by another thread."""
        with self._lock:
            known = self._known(grammar)
            if known is None and grammar in self._waiting:
                self._waiting[grammar].append(done)
                return
            if known is None and len(self._waiting) >= MAX_WAITING:
                known = QueueFullError(f"{MAX_WAITING} grammars wait to be compiled")
            if known is None:
                self._waiting[grammar] = [done]
                if len(self._workers) < min(len(self._waiting), _CHILDREN):
                    self._start_worker()
                self._jobs.put(grammar)
                return
        done(known)

    def close(self) -> None:
        """Compile nothing more."""
        with self._lock:
            self._closed = True
            workers, compilers = self._workers, self._compilers
        for compiler in compilers:
            compiler.close()
        for _ in workers:
            self._jobs.put(None)

    def _known(self, grammar: Grammar) -> MakeRules | PDError | None:
        if self._vocabulary is None:
            return InvalidRequestError(
                "this node cannot constrain output: its model has no tokenizer.json, or "
                "--grammar-backend is none",
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

    def _start_worker(self) -> None:
        assert self._vocabulary is not None
        compiler = GrammarCompiler(self._vocabulary, self._limits)
        worker = threading.Thread(
            target=self._work,
            args=(compiler,),
            name=f"grammars-{len(self._workers)}",
            daemon=True,
        )
        self._compilers.append(compiler)
        self._workers.append(worker)
        worker.start()

    def _work(self, compiler: GrammarCompiler) -> None:
        while (grammar := self._jobs.get()) is not None:
            found: MakeRules | PDError
            try:
                compiled = self._load(compiler.compile(grammar))
                found = self._make_rules(compiled)
            except PDError as error:
                compiled, found = None, error
            except Exception as error:
                logger.exception("a grammar could not be loaded")
                compiled, found = None, UnavailableError(f"a grammar could not be loaded: {error}")
            with self._lock:
                if compiled is not None:
                    self._keep(grammar, compiled)
                elif isinstance(found, InvalidRequestError):
                    self._refused[grammar] = found
                    if len(self._refused) > _MAX_REFUSED:
                        self._refused.popitem(last=False)
                waiting = self._waiting.pop(grammar)
            for done in waiting:
                done(found)

    def _load(self, compiled: bytes) -> Any:
        # NOTE: loads transformers; nodes that get no grammar do without.
        from pd.grammar.xgrammar_library import load_compiled, tokenizer_info

        with self._info_lock:
            if self._info is None:
                assert self._vocabulary is not None
                self._info = tokenizer_info(self._vocabulary)
                if self._jump_forward:
                    self._retokenizer = Retokenizer(self._vocabulary.tokenizer)
        return load_compiled(compiled, self._info)

    def _make_rules(self, compiled: Any) -> MakeRules:
        return partial(GrammarRules, compiled, self._retokenizer)

    def _keep(self, grammar: Grammar, compiled: Any) -> None:
        size = int(compiled.memory_size_bytes) + len(grammar.text)
        self._compiled[grammar] = compiled, size
        self._bytes += size
        while self._bytes > self._cache_bytes and self._compiled:
            _, (_, dropped) = self._compiled.popitem(last=False)
            self._bytes -= dropped
