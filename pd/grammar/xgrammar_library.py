"""xgrammar (mlc-ai/xgrammar), which compiles grammars and knows which tokens may come next."""

# xgrammar has no types.
# mypy: disable-error-code="no-any-unimported, no-untyped-call"

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import xgrammar

from pd.core.json_schemas import schemas_of_tags
from pd.engine.token_rules import mask_threads
from pd.grammar.gbnf import check_numbers
from pd.grammar.json_schemas import WrongSchemaError, prepare, prepare_tags
from pd.grammar.lengths import split_lengths
from pd.grammar.patterns import matched_by
from pd.grammar.tag_lengths import split_tag_lengths
from pd.grammar.token_characters import TokenCharacters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.grammar.child import Vocabulary


# Masks of parts of grammars that a compiler remembers, since schemas have many parts in common.
CACHE_BYTES = 64 << 20
# A compiled grammar as it is sent: JSON of that without lengths, what that with them is compiled
# from, and what ends free text.
_TEXTS = msgspec.msgpack.Decoder(tuple[str, str | None, tuple[bytes, ...] | None])


def tokenizer_info(vocabulary: Vocabulary) -> xgrammar.TokenizerInfo:
    """The bytes of all tokens."""
    # NOTE: a process that only compiles has a stand-in.
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=vocabulary.tokenizer)
    return xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocabulary.size, stop_token_ids=vocabulary.stop_ids
    )


class Compiled(NamedTuple):
    """A compiled grammar.

    Attributes:
        free: knows all tokens, but not the lengths of strings if ``counted`` does.
        counted: knows lengths and no tokens; see :mod:`pd.grammar.lengths`.
        counted_text: the JSON of which ``counted`` was compiled.
        gates: of a structural tag; see :class:`pd.grammar.tag_lengths.SplitTag`.
    """

    free: xgrammar.CompiledGrammar
    counted: xgrammar.CompiledGrammar | None = None
    counted_text: str | None = None
    gates: tuple[bytes, ...] | None = None

    @property
    def grammars(self) -> list[xgrammar.CompiledGrammar]:
        """Those that there are."""
        return [each for each in (self.free, self.counted) if each is not None]

    @property
    def memory_size_bytes(self) -> int:
        return sum(int(each.memory_size_bytes) for each in self.grammars)


class Compiler:
    """Compiles on the thread that asks; several may.

    Attributes:
        info: the bytes of all tokens.
    """

    def __init__(self, info: xgrammar.TokenizerInfo) -> None:
        self.info = info
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=1, cache_enabled=True, cache_limit_bytes=CACHE_BYTES
        )
        # xgrammar 0.2.8 has no key for a part that repeats more than 128 times.
        self._without_cache = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._of_no_tokens = xgrammar.GrammarCompiler(
            _no_tokens(), max_threads=1, cache_enabled=False
        )

    def compile(self, kind: str, text: str) -> Compiled:
        """Compile a grammar.

        Raises:
            ValueError: it is none. WrongSchemaError names the schema or grammar of a structural
                tag.
            MemoryError: there is not enough.
        """
        if kind == "structural_tag":
            return self._compile_tags(_prepared(text, prepare_tags))
        if kind == "regex":
            return Compiled(self._compile(kind, matched_by(text)))
        if kind == "ebnf":
            check_numbers(text)
        if kind != "json_schema":
            return Compiled(self._compile(kind, text))
        schema = _prepared(text, prepare)
        split = split_lengths(schema)
        if split is None:
            return Compiled(self._compile(kind, json.dumps(schema)))
        free, counted = map(json.dumps, split)
        return Compiled(self._compile(kind, free), self.compile_counted(kind, counted), counted)

    def compile_counted(self, kind: str, text: str) -> xgrammar.CompiledGrammar:
        """Compile a grammar that knows no tokens."""
        return _compiled_with(self._of_no_tokens, kind, text)

    def forget(self) -> None:
        """Compile later grammars as if they were the first."""
        self._compiler.clear_cache()

    def _compile_tags(self, structural_tag: object) -> Compiled:
        kind = "structural_tag"
        split = split_tag_lengths(structural_tag)
        try:
            if split is None:
                return Compiled(self._compile(kind, json.dumps(structural_tag)))
            text = json.dumps(split.counted)
            counted = self.compile_counted(kind, text)
            free = self._compile(kind, json.dumps(split.free))
            return Compiled(free, counted, text, split.gates)
        except ValueError:
            for place, part in schemas_of_tags(structural_tag):
                alone = json.dumps({"type": kind, "format": part})
                try:
                    self.compile_counted(kind, alone)
                except ValueError as error:
                    raise WrongSchemaError(error, place) from None
            raise

    def _compile(self, kind: str, text: str) -> xgrammar.CompiledGrammar:
        try:
            return _compiled_with(self._compiler, kind, text)
        except ValueError as error:
            if _NO_KEY not in str(error):
                raise
            return _compiled_with(self._without_cache, kind, text)


_NO_KEY = "per_rule_fsm_hashes"


def _no_tokens() -> xgrammar.TokenizerInfo:
    """A vocabulary for grammars that are only asked whether they take a text."""
    return xgrammar.TokenizerInfo(["x", "</s>"], stop_token_ids=[1])


def _compiled_with(
    compiler: xgrammar.GrammarCompiler, kind: str, text: str
) -> xgrammar.CompiledGrammar:
    """Raises ValueError and MemoryError."""
    compile_kind: Any = {
        # Whitespace between tokens without end would let a model write nothing else.
        "json_schema": partial(compiler.compile_json_schema, any_whitespace=False),
        "regex": compiler.compile_regex,
        "ebnf": compiler.compile_grammar,
        "structural_tag": compiler.compile_structural_tag,
    }[kind]
    try:
        compiled: xgrammar.CompiledGrammar = compile_kind(text)
        return compiled
    except MemoryError:
        raise
    except Exception as error:
        if "bad_alloc" in str(error):
            raise MemoryError from error
        raise ValueError(_reason(error)) from error


def dump_info(info: xgrammar.TokenizerInfo) -> bytes:
    """The bytes of all tokens, for another process."""
    serialized: str = info.serialize_json()
    return serialized.encode()


def load_info(dumped: bytes) -> xgrammar.TokenizerInfo:
    """Load the result of :func:`dump_info`."""
    return xgrammar.TokenizerInfo.deserialize_json(dumped.decode())


class _AddedToken(msgspec.Struct):
    id: int
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    """The part of a ``tokenizer.json`` that is read."""

    added_tokens: list[_AddedToken] = []


_TOKENIZER_FILE = msgspec.json.Decoder(_TokenizerFile)


def control_tokens(info: xgrammar.TokenizerInfo, vocabulary: Vocabulary) -> frozenset[int]:
    """Tokens that are no text: those that the tokenizer names as special, those without bytes, and
    those with which the model ends its output."""
    content = Path(vocabulary.tokenizer).read_bytes()
    added = _TOKENIZER_FILE.decode(content).added_tokens
    special = [token.id for token in added if token.special]
    return frozenset([*special, *info.special_token_ids, *info.stop_token_ids])


def token_characters(info: xgrammar.TokenizerInfo) -> TokenCharacters:
    """The table of all tokens."""
    control = frozenset([*info.special_token_ids, *info.stop_token_ids])
    return TokenCharacters(info.decoded_vocab, control)


def dump_compiled(compiled: Compiled) -> bytes:
    """A compiled grammar without its vocabulary, for another process.

    What counts lengths is compiled again there, in less time than its JSON takes, which grows with
    the square of the number of strings.
    """
    free = compiled.free.serialize_json()
    return msgspec.msgpack.encode([free, compiled.counted_text, compiled.gates])


def load_compiled(dumped: bytes, kind: str, compiler: Compiler) -> Compiled:
    """Load the result of :func:`dump_compiled`, of a grammar of this kind, for use with a
    compiler's vocabulary."""
    dumped_free, text, gates = _TEXTS.decode(dumped)
    free = xgrammar.CompiledGrammar.deserialize_json(dumped_free, compiler.info)
    counted = None if text is None else compiler.compile_counted(kind, text)
    return Compiled(free, counted, text, gates)


def matcher(
    compiled: xgrammar.CompiledGrammar, stop_ids: Sequence[int] = ()
) -> xgrammar.GrammarMatcher:
    """The state of an output that is empty so far and ends with one of ``stop_ids``."""
    return xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_ids) or None)


@cache
def batch_matcher() -> xgrammar.BatchGrammarMatcher:
    """Fills masks of several outputs on several threads."""
    return xgrammar.BatchGrammarMatcher(max_threads=mask_threads())


def allows(compiled: Compiled, text: str | bytes) -> bool:
    """Whether a text is a whole output."""
    for each in compiled.grammars:
        whole = xgrammar.GrammarMatcher(each, terminate_without_stop_token=True)
        if not whole.accept_string(text) or not whole.is_completed():
            return False
    return True


def _prepared(text: str, change: Callable[[object], object]) -> object:
    """Parse a text of JSON and write its schemas as xgrammar needs them. Raises ValueError."""
    try:
        return change(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"it is no schema: {error}") from None
    except RecursionError:
        raise ValueError("it is too deep") from None


def _reason(error: Exception) -> str:
    """The first line of a message, without where in xgrammar it was raised."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    _, mark, rest = line.partition(".cc:")
    return rest.partition(": ")[2] if mark else line
