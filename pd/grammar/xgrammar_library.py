"""xgrammar (mlc-ai/xgrammar), which compiles grammars and knows which tokens may come next."""

# xgrammar has no types.
# mypy: disable-error-code="no-any-unimported, no-untyped-call"

from __future__ import annotations

import json
import os
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import xgrammar

from pd.grammar.json_schemas import prepare, prepare_tags

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.grammar.child import Vocabulary


# Masks of parts of grammars that a compiler remembers, since schemas have many parts in common.
CACHE_BYTES = 64 << 20
# With so many, the masks of a large batch are ready long before the end of its forward pass.
_MASK_THREADS = 8


def tokenizer_info(vocabulary: Vocabulary) -> xgrammar.TokenizerInfo:
    """The bytes of all tokens."""
    # NOTE: a process that only compiles has a stand-in.
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=vocabulary.tokenizer)
    return xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocabulary.size, stop_token_ids=vocabulary.stop_ids
    )


class Compiler:
    """Compiles on the thread that asks; several may."""

    def __init__(self, info: xgrammar.TokenizerInfo) -> None:
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=1, cache_enabled=True, cache_limit_bytes=CACHE_BYTES
        )

    def compile(self, kind: str, text: str) -> xgrammar.CompiledGrammar:
        """Compile a grammar.

        Raises:
            ValueError: it is none.
            MemoryError: there is not enough.
        """
        compiler: Any = self._compiler
        if kind in ("json_schema", "structural_tag"):
            text = _prepared(text, prepare if kind == "json_schema" else prepare_tags)
        compile_kind = {
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
    """What :func:`dump_info` returned."""
    return xgrammar.TokenizerInfo.deserialize_json(dumped.decode())


def dump_compiled(compiled: xgrammar.CompiledGrammar) -> bytes:
    """A compiled grammar without its vocabulary, for another process."""
    serialized: str = compiled.serialize_json()
    return serialized.encode()


def load_compiled(compiled: bytes, info: xgrammar.TokenizerInfo) -> xgrammar.CompiledGrammar:
    """What :func:`dump_compiled` returned, for use with a vocabulary."""
    return xgrammar.CompiledGrammar.deserialize_json(compiled.decode(), info)


def matcher(compiled: xgrammar.CompiledGrammar, stop_ids: Sequence[int]) -> xgrammar.GrammarMatcher:
    """The state of an output that is empty so far and ends with one of ``stop_ids``."""
    return xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_ids) or None)


@cache
def batch_matcher() -> xgrammar.BatchGrammarMatcher:
    """Fills masks of several outputs on several threads, half of the processors at most."""
    available = getattr(os, "sched_getaffinity", None)
    cores = len(available(0)) if available else os.cpu_count() or 1
    return xgrammar.BatchGrammarMatcher(max_threads=max(1, min(_MASK_THREADS, cores // 2)))


def _prepared(text: str, change: Callable[[object], object]) -> str:
    """A text with its schemas as xgrammar needs them. Raises ValueError."""
    try:
        return json.dumps(change(json.loads(text)))
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
