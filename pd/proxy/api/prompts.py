"""From the prompts of a request to checked token ids."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pd.core.brief import short_repr
from pd.core.errors import ContextLengthError, InvalidRequestError
from pd.core.sampling_params import TOKEN_ID_LIMIT
from pd.proxy.routing.limits import TOO_LONG

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from pd.proxy.dispatch.generation import PromptSpec
    from pd.proxy.routing.limits import Limits
    from pd.proxy.text.tokenizer import TextModel

    IntArray = npt.NDArray[np.int32]

# Limit on the tokens of all prompts of a request. A single prompt may fill a longer context.
MAX_REQUEST_TOKENS = 1 << 20
# Limit on the log probabilities of prompt tokens in all answers to a request. The answer to a
# single long prompt may hold more. An entry takes some 25 bytes of JSON, and about four times as
# much before it is written.
MAX_PROMPT_LOGPROBS = 1 << 22
_PART = 1 << 16

NO_TOKENIZER = (
    "this proxy has no tokenizer, so it takes and returns token ids only; start it with "
    "--tokenizer DIR for text"
)


class ModelView(NamedTuple):
    """A model as one request sees it.

    Attributes:
        text: the model's tokenizer, if the proxy has it.
        stream_interval: default for requests that choose none.
        shown: name in answers: the first alias, or the name by which the client asked.
    """

    limits: Limits
    text: TextModel | None
    stream_interval: int
    shown: str

    @property
    def name(self) -> str:
        return self.limits.model

    def require_text(self, param: str) -> TextModel:
        """Return the tokenizer. Raises InvalidRequestError without one."""
        if self.text is None:
            raise InvalidRequestError(NO_TOKENIZER, param=param)
        return self.text

    def encode_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of bad words. Raises InvalidRequestError."""
        return _encode_bad_words(self.require_text("bad_words"), words)


# All prompts of a request have the same words.
@lru_cache(maxsize=64)
def _encode_bad_words(text: TextModel, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Tokenize each word as vLLM does: as it is, and after a space if that changes its first
    token and keeps the number of tokens."""
    spellings = [spelling for word in words for spelling in (word, " " + word.lstrip())]
    encoded = text.encode_texts(spellings, add_special_tokens=False, param="bad_words")
    sequences: dict[tuple[int, ...], None] = {}
    ids = [tuple(each.tolist()) for each in encoded]
    for plain, spaced in zip(ids[::2], ids[1::2], strict=True):
        if plain:
            sequences[plain] = None
        if spaced and len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences[spaced] = None
    return tuple(sequences)


def encode_prompt(
    model: ModelView,
    prompt: str | list[int],
    param: str,
    *,
    namespace: str,
    add_special_tokens: bool = True,
) -> IntArray:
    """Return the token ids of a prompt.

    Args:
        namespace: scope in which tokenized prefixes are reused; comes from the request's
            ``cache_salt`` and ``extra_key``.

    Raises InvalidRequestError for an empty prompt, and for token ids outside the vocabulary.
    """
    (ids,) = encode_prompts(
        model, [prompt], param, namespace=namespace, add_special_tokens=add_special_tokens
    )
    return ids


def encode_prompts(
    model: ModelView,
    prompts: Sequence[str | list[int]],
    param: str,
    *,
    namespace: str,
    add_special_tokens: bool = True,
) -> Iterator[IntArray]:
    """Yield the token ids of each prompt, as :func:`encode_prompt` returns them.

    A wrong prompt raises at its turn, but short texts after it may have been tokenized by then.
    """
    tokenized: Iterator[IntArray] | None = None
    for prompt in prompts:
        if not isinstance(prompt, str):
            yield check_token_ids(prompt, model.limits.vocab_size, param)
            continue
        text = model.require_text(param)
        limit = model.limits.context_length * text.longest_token
        if len(prompt) > limit:
            raise ContextLengthError(
                f"{TOO_LONG}: {param} has {len(prompt)} characters, but "
                f"{model.limits.longest_context}, which have at most {limit}",
                param=param,
            )
        if tokenized is None:
            tokenized = text.encode_texts(
                [prompt for prompt in prompts if isinstance(prompt, str)],
                add_special_tokens=add_special_tokens,
                param=param,
                namespace=namespace,
            )
        ids = next(tokenized)
        if not prompt or not len(ids):
            raise InvalidRequestError(f"{param} is empty; send at least one token", param=param)
        yield ids


def check_token_ids(ids: list[int], vocab_size: int | None, param: str) -> IntArray:
    """Convert a client's token ids to an array. Raises InvalidRequestError for unknown ids.

    We convert long lists in parts, because other threads wait during each part.
    """
    if not ids:
        raise InvalidRequestError(f"{param} is empty; send at least one token", param=param)
    limit = vocab_size or TOKEN_ID_LIMIT
    array = np.empty(len(ids), np.int32)
    for start in range(0, len(ids), _PART):
        part = ids[start : start + _PART]
        if min(part) < 0 or max(part) >= limit:
            wrong = next(i for i in part if not 0 <= i < limit)
            raise InvalidRequestError(
                f"{param} has the token id {short_repr(wrong)}, which is out of vocabulary: the "
                f"model has {limit} tokens",
                param=param,
            )
        array[start : start + len(part)] = part
    return array


class RequestTotals:
    """Limits the tokens of a request's prompts, and the log probabilities of these tokens.

    A prompt counts once. Its log probabilities count once per answer, because each answer repeats
    them.
    """

    def __init__(self) -> None:
        self._tokens = self._logprobs = 0

    def add_prompt(self, spec: PromptSpec, context_length: int) -> None:
        """Add a prompt. Raises InvalidRequestError if the request exceeds a limit."""
        self._tokens += len(spec.token_ids)
        limit = max(MAX_REQUEST_TOKENS, context_length)
        if self._tokens > limit:
            raise InvalidRequestError(
                f"the request's prompts have {self._tokens} tokens or more (at most {limit}); send "
                "smaller batches"
            )
        params = spec.params
        if params.prompt_logprobs_start is None:
            return
        per_token = 1 + params.other_logprobs
        self._logprobs += spec.num_prompt_logprobs * per_token * params.n
        limit = max(MAX_PROMPT_LOGPROBS, context_length * per_token)
        if self._logprobs > limit:
            raise InvalidRequestError(
                f"the answers would hold {self._logprobs} log probabilities of prompt tokens or "
                f"more (at most {limit}); ask for a smaller n, fewer likeliest tokens or fewer "
                "prompts"
            )
