"""xgrammar (mlc-ai/xgrammar): compiles grammars and finds the tokens they allow next."""

# xgrammar has no types.
# mypy: disable-error-code="no-any-unimported, no-untyped-call"

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import xgrammar

from pd.engine.token_rules import count_mask_threads
from pd.grammar.lengths import split_lengths
from pd.grammar.tag_lengths import split_tag_lengths
from pd.grammar.token_characters import TokenCharacters
from pd.structured.gbnf import check_numbers
from pd.structured.pattern_rewriting import rewrite_pattern
from pd.structured.schema_rewriting import WrongSchemaError, rewrite_schema, rewrite_tag
from pd.structured.schema_walk import walk_tag_schemas

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from pd.grammar.compile_jobs import Vocabulary


# A compiler's cache for masks of parts of grammars, because schemas have many parts in common.
CACHE_BYTES = 64 << 20
# A serialized compiled grammar: JSON of the grammar without lengths, source text of the one with
# lengths, and gates.
_TEXTS = msgspec.msgpack.Decoder(tuple[str, str | None, tuple[bytes, ...] | None])


def read_tokenizer(vocabulary: Vocabulary) -> xgrammar.TokenizerInfo:
    """Read the bytes of all tokens."""
    # NOTE: In a process that only compiles, this is a stand-in.
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=vocabulary.tokenizer)
    return xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocabulary.size, stop_token_ids=vocabulary.stop_ids
    )


class Compiled(NamedTuple):
    """A compiled grammar.

    Attributes:
        free: grammar with all tokens, but without lengths of strings if there is a ``counted``.
        counted: grammar with lengths and no tokens; see :mod:`pd.grammar.lengths`.
        counted_text: the source JSON of ``counted``.
        gates: of a structural tag; see :class:`pd.grammar.tag_lengths.SplitTag`.
        mask_seconds: processor time of a mask, if we measured it.
        first_masks: masks of an empty output, by the tokens that end it.
    """

    free: xgrammar.CompiledGrammar
    counted: xgrammar.CompiledGrammar | None = None
    counted_text: str | None = None
    gates: tuple[bytes, ...] | None = None
    mask_seconds: float | None = None
    first_masks: dict[tuple[int, ...], npt.NDArray[np.int32]] | None = None

    @property
    def grammars(self) -> list[xgrammar.CompiledGrammar]:
        return [each for each in (self.free, self.counted) if each is not None]

    @property
    def memory_size_bytes(self) -> int:
        return sum(int(each.memory_size_bytes) for each in self.grammars)


class Compiler:
    """Compiles grammars on the calling thread. Several threads may call it at once.

    Attributes:
        info: the bytes of all tokens.
    """

    def __init__(self, info: xgrammar.TokenizerInfo) -> None:
        self.info = info
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=1, cache_enabled=True, cache_limit_bytes=CACHE_BYTES
        )
        # xgrammar 0.2.8 has no cache key for a part that repeats more than 128 times.
        self._without_cache = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        # For grammars that we only ask whether they accept a text.
        no_tokens = xgrammar.TokenizerInfo(["x", "</s>"], stop_token_ids=[1])
        self._of_no_tokens = xgrammar.GrammarCompiler(no_tokens, max_threads=1, cache_enabled=False)

    def compile_text(self, kind: str, text: str) -> Compiled:
        """Compile a grammar.

        Raises:
            ValueError: the text is not a grammar. A WrongSchemaError names the wrong schema or
                grammar of a structural tag.
            MemoryError: out of memory.
        """
        if kind == "structural_tag":
            return self._compile_tags(_rewrite_json(text, rewrite_tag))
        if kind == "regex":
            return Compiled(self._compile_free(kind, rewrite_pattern(text)))
        if kind == "ebnf":
            check_numbers(text)
        if kind != "json_schema":
            return Compiled(self._compile_free(kind, text))
        schema = _rewrite_json(text, rewrite_schema)
        split = split_lengths(schema)
        if split is None:
            return Compiled(self._compile_free(kind, json.dumps(schema)))
        free, counted = map(json.dumps, split)
        return Compiled(
            self._compile_free(kind, free), self.compile_counted(kind, counted), counted
        )

    def compile_counted(self, kind: str, text: str | xgrammar.Grammar) -> xgrammar.CompiledGrammar:
        """Compile a grammar without tokens."""
        return _compile_with(self._of_no_tokens, kind, text)

    def compile_rule(self, name: str, text: str) -> xgrammar.CompiledGrammar:
        """Compile an EBNF grammar printed by xgrammar, with this root rule and without tokens.

        Raises ValueError, also for printed parts that EBNF cannot express.
        """
        try:
            grammar = xgrammar.Grammar.from_ebnf(text, root_rule_name=name)
        except RuntimeError as error:
            raise ValueError(_describe_error(error)) from error
        return self.compile_counted("ebnf", grammar)

    def clear_cache(self) -> None:
        """Drop the masks of earlier grammars."""
        self._compiler.clear_cache()

    def _compile_tags(self, structural_tag: object) -> Compiled:
        kind = "structural_tag"
        split = split_tag_lengths(structural_tag)
        try:
            if split is None:
                return Compiled(self._compile_free(kind, json.dumps(structural_tag)))
            text = json.dumps(split.counted)
            counted = self.compile_counted(kind, text)
            free = self._compile_free(kind, json.dumps(split.free))
            return Compiled(free, counted, text, split.gates)
        except ValueError:
            for place, part in walk_tag_schemas(structural_tag):
                alone = json.dumps({"type": kind, "format": part})
                try:
                    self.compile_counted(kind, alone)
                except ValueError as error:
                    raise WrongSchemaError(error, place) from None
            raise

    def _compile_free(self, kind: str, text: str) -> xgrammar.CompiledGrammar:
        try:
            return _compile_with(self._compiler, kind, text)
        except ValueError as error:
            if _NO_KEY not in str(error):
                raise
            return _compile_with(self._without_cache, kind, text)


_NO_KEY = "per_rule_fsm_hashes"


def _compile_with(
    compiler: xgrammar.GrammarCompiler, kind: str, text: str | xgrammar.Grammar
) -> xgrammar.CompiledGrammar:
    """Compile a text. Raises ValueError and MemoryError."""
    compile_kind: Any = {
        # With unlimited whitespace between tokens, a model could write whitespace for ever.
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
        raise ValueError(_describe_error(error)) from error


def dump_info(info: xgrammar.TokenizerInfo) -> bytes:
    """Serialize the bytes of all tokens for another process."""
    serialized: str = info.serialize_json()
    return serialized.encode()


def load_info(dumped: bytes) -> xgrammar.TokenizerInfo:
    """Load the result of :func:`dump_info`."""
    return xgrammar.TokenizerInfo.deserialize_json(dumped.decode())


class _AddedToken(msgspec.Struct):
    id: int
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    """The fields read from a ``tokenizer.json``."""

    added_tokens: list[_AddedToken] = []


_TOKENIZER_FILE = msgspec.json.Decoder(_TokenizerFile)


def find_control_tokens(info: xgrammar.TokenizerInfo, vocabulary: Vocabulary) -> frozenset[int]:
    """Find tokens without text: the tokenizer's special tokens, tokens without bytes, and tokens
    that end an output."""
    content = Path(vocabulary.tokenizer).read_bytes()
    added = _TOKENIZER_FILE.decode(content).added_tokens
    special = [token.id for token in added if token.special]
    return frozenset([*special, *info.special_token_ids, *info.stop_token_ids])


def count_characters(info: xgrammar.TokenizerInfo) -> TokenCharacters:
    """Count the characters of all tokens."""
    control = frozenset([*info.special_token_ids, *info.stop_token_ids])
    return TokenCharacters(info.decoded_vocab, control)


def dump_compiled(compiled: Compiled) -> bytes:
    """Serialize a compiled grammar without its vocabulary, for another process.

    That process compiles the counted grammar again. This is faster than reading its JSON, because
    the JSON grows with the square of the number of strings.
    """
    free = compiled.free.serialize_json()
    return msgspec.msgpack.encode([free, compiled.counted_text, compiled.gates])


def load_compiled(dumped: bytes, kind: str, compiler: Compiler) -> Compiled:
    """Load the result of :func:`dump_compiled`, with a compiler's vocabulary."""
    dumped_free, text, gates = _TEXTS.decode(dumped)
    free = xgrammar.CompiledGrammar.deserialize_json(dumped_free, compiler.info)
    counted = None if text is None else compiler.compile_counted(kind, text)
    return Compiled(free, counted, text, gates)


def make_matcher(
    compiled: xgrammar.CompiledGrammar, stop_ids: Sequence[int] = ()
) -> xgrammar.GrammarMatcher:
    """Make the state of an empty output that will end with one of ``stop_ids``."""
    return xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_ids) or None)


def fill_mask(state: xgrammar.GrammarMatcher, mask: npt.NDArray[np.int32]) -> None:
    """Write the mask of the allowed next tokens. Releases the interpreter's lock."""
    state.fill_next_token_bitmask(mask[None], 0)


@cache
def get_batch_matcher() -> xgrammar.BatchGrammarMatcher:
    """Return the shared object that fills masks of several outputs on several threads."""
    return xgrammar.BatchGrammarMatcher(max_threads=count_mask_threads())


def accepts_text(compiled: Compiled, text: str | bytes) -> bool:
    """Return whether a text is a complete output."""
    for each in compiled.grammars:
        whole = xgrammar.GrammarMatcher(each, terminate_without_stop_token=True)
        if not whole.accept_string(text) or not whole.is_completed():
            return False
    return True


def _rewrite_json(text: str, change: Callable[[object], object]) -> object:
    """Parse a JSON text and rewrite its schemas for xgrammar. Raises ValueError."""
    try:
        return change(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"it is not a schema: {error}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _describe_error(error: Exception) -> str:
    """Return the first line of a message, without its position in xgrammar's source."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    _, mark, rest = line.partition(".cc:")
    return rest.partition(": ")[2] if mark else line
