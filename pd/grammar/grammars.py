"""The grammars of a node: compiled once, and cached within a memory limit."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pd.core.errors import (
    CostlyGrammarError,
    InvalidRequestError,
    PDError,
    QueueFullError,
    UnavailableError,
)
from pd.engine.token_rules import explain_slow_masks
from pd.grammar.compiler import CompileLimits, GrammarCompiler
from pd.grammar.jump_forward import Retokenizer
from pd.grammar.owner_shares import OwnerShares
from pd.grammar.rules import GrammarRules
from pd.util.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pd.core.grammar import Grammar
    from pd.core.sampling_params import SamplingParams
    from pd.engine.rule_budget import RuleBudget
    from pd.engine.token_rules import TokenRules
    from pd.grammar.compile_jobs import Result, Vocabulary
    from pd.grammar.token_characters import TokenCharacters
    from pd.grammar.xgrammar_library import Compiled, Compiler

    Done = Callable[["MakeRules | PDError"], None]

logger = logging.getLogger(__name__)

# Limit on a serialized compiled grammar. Loading this many bytes takes a fraction of a second.
MAX_COMPILED_BYTES = 64 << 20
# Limits on grammars waiting to be compiled, of one owner and of all.
MAX_WAITING = 256
_MAX_WAITING_OF_ALL = 512
# Limit on the memory of all requests' grammars, in multiples of --grammar-cache. We always allow
# one of the largest. Grammars being loaded may come on top.
_IN_USE_FACTOR = 4
# Processor time for a grammar compiled by another node, in multiples of the limit, because that
# node may be faster.
RESUMED_SHARE = 4.0
# Compiling processes. We use several, because a slow grammar would stall all others.
_CHILDREN = 2
# Stack of the threads that load grammars.
_STACK_BYTES = 64 << 20
# Limits on grammars that we compile in the node, too, after we have answered their requests. They
# are small, because nothing can end such a compilation.
_LEARN_SECONDS, _LEARN_BYTES = 0.5, 16 << 20
# Limit on `close`'s wait for a compilation in the node, because Python must not exit while a thread
# is inside the library.
_END_SECONDS = 10.0
# Cached first masks per grammar; they differ by the tokens that end an output.
_MAX_FIRST_MASKS = 16
# Remembered refusals, so we try each grammar only once.
_MAX_REFUSED = 256


@dataclass(frozen=True, eq=False)
class MakeRules:
    """Makes the rules of a request's choices.

    Attributes:
        budget: the request's budget; None before :meth:`for_request`.
    """

    compiled: Compiled
    characters: TokenCharacters | None
    retokenizer: Retokenizer | None
    control: frozenset[int]
    budget: RuleBudget | None = None

    def for_request(self, budget: RuleBudget) -> MakeRules:
        """Return a copy for one request."""
        return replace(self, budget=budget)

    def has_first_mask(self, ending: Collection[int]) -> bool:
        """Return whether the mask of an empty output is cached."""
        masks = self.compiled.first_masks
        return masks is not None and tuple(self._stop_ids(ending)) in masks

    def compute_first_mask(self, ending: Collection[int]) -> None:
        """Compute and cache the mask of an empty output. This may take long."""
        rules = self._make(ending)
        masks = self.compiled.first_masks
        assert masks is not None
        mask = np.full(-(-int(self.compiled.free.tokenizer_info.vocab_size) // 32), -1, np.int32)
        rules.fill_mask(mask)
        if len(masks) >= _MAX_FIRST_MASKS:
            masks.clear()
        masks[rules.stop_ids] = mask

    def check_choices(self, params: SamplingParams) -> InvalidRequestError | None:
        """Return an error if a request has too many choices for this grammar."""
        slow = explain_slow_masks(self.compiled.mask_seconds or 0.0, params.n)
        if slow is None or params.grammar is None:
            return None
        kind = params.grammar.kind
        return InvalidRequestError(f"{kind}: {slow}", param=kind)

    def __call__(self, ending: Collection[int]) -> TokenRules:
        """Make the rules of a choice.

        A stop token is allowed where the grammar allows its text. A stop token without text is
        allowed where the output is complete.
        """
        return self._make(ending)

    def _make(self, ending: Collection[int]) -> GrammarRules:
        stop_ids = self._stop_ids(ending)
        return GrammarRules(self.compiled, self.characters, self.retokenizer, stop_ids, self.budget)

    def _stop_ids(self, ending: Collection[int]) -> list[int]:
        return [token for token in ending if token in self.control]


class _Key(NamedTuple):
    """A grammar to compile. If another node began the output, we do not measure its cost."""

    grammar: Grammar
    is_resumed: bool


class _Refusal(NamedTuple):
    """Why we refuse a grammar to owners with this share of the limits, or less."""

    error: PDError
    share: float


@dataclass
class _PendingGrammar:
    """A grammar that compiles or waits in queues.

    Attributes:
        done: callbacks with their owners.
        owners: owners whose queues contain the grammar.
    """

    done: list[tuple[Done, str]] = field(default_factory=list)
    owners: set[str] = field(default_factory=set)
    is_started: bool = False


class Grammars:
    """Compiles and caches the grammars of a node.

    Any thread may use it. The compiling processes start with the first grammar.

    Args:
        vocabulary: the model's tokens; or a reason why they are unknown, used to refuse all
            grammars.
        cache_bytes: memory for unused compiled grammars.
        jump_forward: make rules find the tokens forced by a grammar.

    Attributes:
        outcomes: number of requested grammars that were ``cached``, ``compiled``, ``refused`` as
            wrong or too large, or ``unavailable``.
        compile_seconds, num_compiled: total time from a grammar's turn until it is ready, and
            number of these grammars.
        shares: each owner's share of the limits.
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
        self._compiled: OrderedDict[Grammar, tuple[Compiled, int]] = OrderedDict()
        self._refused: OrderedDict[Grammar, _Refusal] = OrderedDict()
        self._bytes = 0
        # All compiled grammars in memory, and their sizes.
        self._living: list[tuple[weakref.ref[Any], int]] = []
        self._max_living = max(_IN_USE_FACTOR * cache_bytes, limits.max_bytes)
        self._pending: dict[_Key, _PendingGrammar] = {}
        self.shares = OwnerShares()
        self._compilers: list[GrammarCompiler] = []
        if not isinstance(vocabulary, str):
            self._compilers = [GrammarCompiler(vocabulary, limits) for _ in range(_CHILDREN)]
        # Each thread has one of the compilers.
        self._own_compiler = threading.local()
        self._without_thread = list(self._compilers)
        self._work = WorkQueue(
            "grammars", _CHILDREN, self._compile_pending, prepare=self._prepare_thread
        )
        self._closed = False
        self._info: Any = None
        self._own: Compiler | None = None
        self._characters: TokenCharacters | None = None
        self._control: frozenset[int] = frozenset()
        self._retokenizer: Retokenizer | None = None
        self._jump_forward = jump_forward
        self._info_lock = threading.Lock()

    def request_rules(
        self, grammar: Grammar, done: Done, owner: str = "", *, is_resumed: bool = False
    ) -> None:
        """Look up or compile a grammar, and call ``done`` once with its rules' maker or an error.

        We call it at once if we know the result, and otherwise later, from another thread.

        Args:
            owner: client whose turn the grammar takes. Owners take turns, so an owner does not wait
                for all grammars of another.
            is_resumed: another, maybe faster node has compiled the grammar and begun the output.
        """
        key = _Key(grammar, is_resumed)
        with self._lock:
            known = self._find_result(key, owner) or self._queue_grammar(key, owner)
            if known is None:
                self._pending[key].done.append((done, owner))
                return
            self._count_outcome(known)
        done(known)

    def refuse_grammar(self, grammar: Grammar, error: PDError, owner: str = "") -> None:
        """Refuse a grammar from now on, and halve the owner's share of the limits.

        Owners with a larger share than this owner had may still try the grammar.
        """
        share = self.shares.get_share(owner)
        self.shares.halve_share(owner)
        with self._lock:
            if share == 1.0:
                _, size = self._compiled.pop(grammar, (None, 0))
                self._bytes -= size
            self._remember_refusal(grammar, error, share)

    @property
    def waiting(self) -> int:
        """Number of grammars compiling or waiting in queues."""
        return len(self._pending)

    @property
    def cache_bytes(self) -> int:
        """Memory of the cached grammars."""
        return self._bytes

    @property
    def living_bytes(self) -> int:
        """Memory of the compiled grammars in the cache and in requests."""
        with self._lock:
            return self._count_living()

    def _count_living(self) -> int:
        self._living = [each for each in self._living if each[0]() is not None]
        return sum(size for _, size in self._living)

    def _check_memory(self, more: int) -> QueueFullError | None:
        """Return an error if there is no room for ``more`` bytes. The caller holds the lock."""
        if (living := self._count_living()) + more <= self._max_living:
            return None
        return QueueFullError(
            f"memory of all requests' grammars: {living >> 20} MiB (limit "
            f"{self._max_living >> 20} MiB, {_IN_USE_FACTOR} x --grammar-cache); try again later"
        )

    def close(self) -> None:
        """Stop compiling, and wait for compilations in the node."""
        with self._lock:
            self._closed = True
        for compiler in self._compilers:
            compiler.close()
        self._work.wait_until_idle(_END_SECONDS)
        self._work.close()

    def _find_result(self, key: _Key, owner: str) -> MakeRules | PDError | None:
        grammar = key.grammar
        if isinstance(self._vocabulary, str):
            return InvalidRequestError(
                f"{grammar.kind}: this node cannot constrain output: {self._vocabulary}",
                param=grammar.kind,
            )
        if self._closed:
            return UnavailableError("the node stops")
        refusal = None if key.is_resumed else self._refused.get(grammar)
        if refusal is not None and self.shares.get_share(owner) <= refusal.share:
            return refusal.error
        if grammar not in self._compiled:
            return None
        self._compiled.move_to_end(grammar)
        return self._make_rules(self._compiled[grammar][0])

    def _queue_grammar(self, key: _Key, owner: str) -> PDError | None:
        """Queue a grammar for its owner, unless it is queued or compiling already.

        If another owner's turn comes first, we compile it then and skip it in this queue.

        Returns:
            An error if there is no room.
        """
        pending = self._pending.get(key)
        if pending is not None and (pending.is_started or owner in pending.owners):
            return None
        number = self._work.count_waiting(owner)
        if number >= MAX_WAITING or self._work.count_waiting() >= _MAX_WAITING_OF_ALL:
            return QueueFullError(
                f"your waiting grammars: {number} (limit {MAX_WAITING}, and {_MAX_WAITING_OF_ALL} "
                "of all clients); try again later"
            )
        if (full := self._check_memory(0)) is not None:
            return full
        # A larger stack than a child's, because a grammar it compiles must not overflow ours.
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._work.put(key, owner)
        except UnavailableError as error:
            return error
        finally:
            threading.stack_size(before)
        self._pending.setdefault(key, _PendingGrammar()).owners.add(owner)
        return None

    def _count_outcome(self, found: MakeRules | PDError, outcome: str = "cached") -> None:
        if isinstance(found, PDError):
            outcome = "refused" if isinstance(found, InvalidRequestError) else "unavailable"
        self.outcomes[outcome] += 1

    def _prepare_thread(self) -> None:
        """Start the child and load the library in parallel, before the first grammar needs them."""
        compiler = self._own_compiler.compiler = self._without_thread.pop()
        try:
            compiler.start()
            # NOTE: This loads transformers. Nodes without grammars do not need it.
            from pd.grammar import xgrammar_library  # noqa: F401
        except Exception:
            # For example, out of memory. Each grammar tries again and reports the error if it
            # persists.
            logger.exception("cannot prepare to compile grammars")

    def _compile_pending(self, key: _Key) -> None:
        """Compile a grammar, unless an earlier owner's turn came first."""
        with self._lock:
            pending = self._pending.get(key)
            if pending is None or pending.is_started:
                return
            pending.is_started = True
            share = max(map(self.shares.get_share, pending.owners))
        if key.is_resumed:
            share = RESUMED_SHARE
        compiler: GrammarCompiler = self._own_compiler.compiler
        grammar, began = key.grammar, time.monotonic()
        found: MakeRules | PDError
        try:
            result = compiler.compile_grammar(grammar, share, is_tried=not key.is_resumed)
            with self._lock:
                full = self._check_memory(len(result.compiled))
            if full is not None:
                raise full
            compiled = self._load_result(result, grammar, compiler.tokens)
            found = self._make_rules(compiled)
        except PDError as error:
            compiled, found = None, error
        except Exception as error:
            logger.exception("cannot load a grammar")
            compiled, found = None, UnavailableError(f"cannot load a grammar: {error}")
        with self._lock:
            self.compile_seconds += time.monotonic() - began
            self.num_compiled += 1
            is_costly = isinstance(found, CostlyGrammarError)
            if compiled is not None:
                self._keep_compiled(grammar, compiled, is_known=not key.is_resumed)
            elif isinstance(found, InvalidRequestError) and not (is_costly and key.is_resumed):
                self._remember_refusal(grammar, found, share if is_costly else 1.0)
            waiting = self._pending.pop(key).done
            again = [
                each for each in waiting if is_costly and self.shares.get_share(each[1]) > share
            ]
            waiting = [each for each in waiting if each not in again]
            for _ in waiting:
                self._count_outcome(found, "compiled")
        if is_costly and not key.is_resumed:
            for owner in {owner for _, owner in waiting}:
                self.shares.halve_share(owner)
        for done, owner in again:
            self.request_rules(grammar, done, owner)
        if is_costly and key.is_resumed:
            found = UnavailableError(f"{found} by an output that another node began")
        for done, _ in waiting:
            self._deliver_outcome(done, found)
        if compiled is not None and result.compiled:
            self._compile_again(result, grammar)

    @staticmethod
    def _deliver_outcome(done: Done, found: MakeRules | PDError) -> None:
        try:
            done(found)
        except Exception:  # other requests need this grammar, and all need this thread
            logger.exception("cannot give a request its grammar")

    def _load_result(self, result: Result, grammar: Grammar, tokens: bytes) -> Compiled:
        from pd.grammar.xgrammar_library import (
            Compiler,
            count_characters,
            find_control_tokens,
            load_compiled,
            load_info,
        )

        with self._info_lock:
            if self._own is None:
                self._info = load_info(tokens)
                self._own = Compiler(self._info)
                assert not isinstance(self._vocabulary, str)
                self._control = find_control_tokens(self._info, self._vocabulary)
                if self._jump_forward:
                    self._retokenizer = Retokenizer(self._vocabulary.tokenizer)
        if result.compiled:
            compiled = load_compiled(result.compiled, grammar.kind, self._own)
        else:
            # The child compiled it within the limits, and faster than we could transfer it.
            compiled = self._own.compile_text(grammar.kind, grammar.text)
        with self._info_lock:
            if compiled.counted is not None and self._characters is None:
                self._characters = count_characters(self._info)
        return compiled._replace(mask_seconds=result.mask_seconds, first_masks={})

    def _compile_again(self, result: Result, grammar: Grammar) -> None:
        """Compile a transferred grammar here, too, because our cache then has its parts.

        Other grammars with the same parts then compile faster.
        """
        is_small = len(result.compiled) <= _LEARN_BYTES
        is_quick = result.cpu_seconds <= _LEARN_SECONDS
        if not (result.is_silent and is_small and is_quick) or self._closed:
            return
        assert self._own is not None  # _load_result has set it
        try:
            self._own.compile_text(grammar.kind, grammar.text)
        except Exception:
            logger.exception("cannot compile a grammar a second time")

    def _make_rules(self, compiled: Compiled) -> MakeRules:
        characters = None if compiled.counted is None else self._characters
        return MakeRules(compiled, characters, self._retokenizer, self._control)

    def _remember_refusal(self, grammar: Grammar, error: PDError, share: float) -> None:
        known = self._refused.get(grammar)
        if known is None or known.share <= share:
            self._refused[grammar] = _Refusal(error, share)
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)

    def _keep_compiled(self, grammar: Grammar, compiled: Compiled, *, is_known: bool) -> None:
        """Count the memory of a compiled grammar, and cache it if we measured its cost."""
        size = int(compiled.memory_size_bytes) + len(grammar.text)
        self._living.append((weakref.ref(compiled.free), size))
        if not is_known:
            return
        self._compiled[grammar] = compiled, size
        self._bytes += size
        self._refused.pop(grammar, None)
        while self._bytes > self._cache_bytes and self._compiled:
            _, (_, dropped) = self._compiled.popitem(last=False)
            self._bytes -= dropped
