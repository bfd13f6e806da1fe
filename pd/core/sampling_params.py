"""Sampling parameters. The proxy validates them once; nodes get them unchanged."""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec

from pd.core.brief import short_repr
from pd.core.errors import InvalidRequestError
from pd.core.grammar import Grammar

MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 64
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
# Limit on the tokens of all bad words together. Most words have two spellings.
MAX_BAD_TOKENS = 1024
SEED_LIMIT = 1 << 63
# Token ids are int32.
TOKEN_ID_LIMIT = 1 << 31
# A smaller penalty would make logits overflow.
MIN_PENALTY = 0.01
# Smallest and largest value of each numeric parameter.
RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 1 << 31),
    "min_tokens": (0, 1 << 31),
    "temperature": (0.0, 100.0),
    "top_k": (0, 1 << 31),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (MIN_PENALTY, 100.0),
    "seed": (0, SEED_LIMIT - 1),
    "n": (1, MAX_CHOICES),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
}
MAX_LOGIT_BIAS_VALUE = 100.0
# What the limits of these parameters count.
_ENTRIES = {"bad_words": "tokens in all"}
_MIX = 0x9E3779B97F4A7C15


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling of one request. Every parameter acts on token 1 as on later tokens.

    Attributes:
        max_tokens: largest number of output tokens, at least 1.
        min_tokens: we forbid end-of-sequence and stop ids before this many tokens.
        temperature: 0 means greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens with at least this mass, in (0, 1].
        min_p: keep tokens with at least this fraction of the likeliest token's probability.
        presence_penalty: subtracted from logits of tokens already in the output, in [-2, 2].
        frequency_penalty: the same, times the token's count in the output, in [-2, 2].
        repetition_penalty: divides positive logits of tokens in prompt or output, and multiplies
            negative ones; above 0.
        logit_bias: added to the logits of these token ids.
        stop_token_ids: end a choice, in addition to the model's end-of-sequence ids.
        ignore_eos: do not stop at the model's end-of-sequence ids.
        seed: in [0, 2**63), see :func:`sampler_seed`. The proxy draws one if the request has none.
        n: number of choices. Choice i draws its noise from :func:`choice_seed`.
        logprobs: report log probabilities of output tokens.
        top_logprobs: likeliest tokens to report next to each output token, at most 20.
        prompt_logprobs_start: report log probabilities of prompt tokens from this position on;
            None reports none. We can use less of the cache then, because the log probability of a
            prompt token needs the logits of its predecessor.
        grammar: language of the output, or None.
        allowed_token_ids: only these tokens may be drawn; empty for all.
        bad_sequences: sequences of tokens that the output may not contain.
        logprob_token_ids: tokens whose log probabilities to report next to each token, after the
            likeliest ones.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs_start: int | None = None
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    logprob_token_ids: tuple[int, ...] = ()

    @property
    def other_logprobs(self) -> int:
        """Number of other tokens whose log probabilities come with each token's own."""
        return self.top_logprobs + len(self.logprob_token_ids)

    @property
    def limits_tokens(self) -> bool:
        """Whether some tokens may never be drawn, or not after others."""
        return bool(self.allowed_token_ids or self.bad_sequences)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken without noise."""
        return self.temperature == 0.0

    def validate(self, vocab_size: int | None = None) -> None:
        """Check all ranges. Raises InvalidRequestError naming the parameter and its value."""
        for name, (low, high) in RANGES.items():
            value: float = getattr(self, name)
            if name == "min_tokens":
                high = self.max_tokens
            # NaN is not in any range.
            if not low <= value <= high:
                raise InvalidRequestError(
                    f"{name} must be between {low} and {high}, not {short_repr(value)}", param=name
                )
        if self.top_p <= 0.0:
            raise InvalidRequestError(f"top_p must be above 0, not {self.top_p}", param="top_p")
        if self.prompt_logprobs_start is not None and self.prompt_logprobs_start < 0:
            raise InvalidRequestError(
                "logprob_start_len must be at least 0, not "
                f"{short_repr(self.prompt_logprobs_start)}",
                param="logprob_start_len",
            )
        if not all(self.bad_sequences):
            raise InvalidRequestError("bad_words has an empty sequence", param="bad_words")
        self._validate_token_ids(vocab_size)
        if self.grammar is not None:
            self.grammar.validate()

    def _validate_token_ids(self, vocab_size: int | None) -> None:
        limit = vocab_size or TOKEN_ID_LIMIT
        for name, ids, max_entries in (
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            ("logit_bias", self.logit_bias, MAX_LOGIT_BIAS),
            ("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS),
            ("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS),
            ("bad_words", tuple(chain.from_iterable(self.bad_sequences)), MAX_BAD_TOKENS),
        ):
            if len(ids) > max_entries:
                raise InvalidRequestError(
                    f"{name} has {len(ids)} {_ENTRIES.get(name, 'entries')}; at most {max_entries} "
                    "are accepted",
                    param=name,
                )
            for token in ids:
                if not 0 <= token < limit:
                    raise InvalidRequestError(
                        f"{name}: token id {short_repr(token)} is outside the vocabulary of "
                        f"{limit}",
                        param=name,
                    )
        for token, bias in self.logit_bias.items():
            if not -MAX_LOGIT_BIAS_VALUE <= bias <= MAX_LOGIT_BIAS_VALUE:
                raise InvalidRequestError(
                    f"logit_bias of token {token} must be between {-MAX_LOGIT_BIAS_VALUE:g} and "
                    f"{MAX_LOGIT_BIAS_VALUE:g}, not {bias}",
                    param="logit_bias",
                )


class SamplingDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling recommended by a model. Requests may override each value.

    The values mean the same as in :class:`SamplingParams`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __str__(self) -> str:
        """List the values different from the plain defaults, for messages."""
        plain = SamplingDefaults()
        names = self.__struct_fields__
        values = {n: getattr(self, n) for n in names if getattr(self, n) != getattr(plain, n)}
        return ", ".join(f"{name} {value:g}" for name, value in values.items()) or "none"

    def validate(self) -> None:
        """Raise InvalidRequestError naming the value out of range."""
        SamplingParams(max_tokens=1, **self.as_arguments()).validate()

    def as_arguments(self) -> dict[str, Any]:
        """Return keyword arguments for :class:`SamplingParams`."""
        return msgspec.structs.asdict(self)


def sampler_seed(number: int) -> int | None:
    """Map any signed 64-bit integer to a seed. Numbers in range stay as they are.

    Returns None for -1, because clients of vLLM ask for no seed with it.
    """
    return None if number == -1 else number % SEED_LIMIT


def choice_seed(seed: int, index: int) -> int:
    """Derive the seed of choice ``index``. Choice 0 keeps the request's, so n=1 and n>1 agree.

    We mix with the finalizer of splitmix64 (Steele, Lea, Flood, 2014).
    """
    if index == 0:
        return seed
    mask = (1 << 64) - 1
    z = (seed + index * _MIX) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) % SEED_LIMIT
