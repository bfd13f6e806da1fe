"""Sampling parameters are checked for all values."""

from __future__ import annotations

from typing import Any

import pytest

from pd.core.errors import InvalidRequestError
from pd.core.sampling_params import RANGES, SEED_LIMIT, SamplingParams, sampler_seed

HUGE = 10**4000


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize(
    "value", [HUGE, -HUGE, float("nan"), float("inf")], ids=["huge", "negative", "nan", "inf"]
)
def test_the_error_names_and_shortens_a_value_out_of_range(name: str, value: Any) -> None:
    fields: dict[str, Any] = {"max_tokens": 16, name: value}
    with pytest.raises(InvalidRequestError) as raised:
        SamplingParams(**fields).validate()
    assert raised.value.param == name
    assert len(raised.value.message) < 300


@pytest.mark.parametrize("vocab_size", [1000, None])
@pytest.mark.parametrize("fields", [{"stop_token_ids": (HUGE,)}, {"logit_bias": {HUGE: 1.0}}])
def test_token_ids_are_in_the_vocabulary(fields: dict[str, Any], vocab_size: int | None) -> None:
    with pytest.raises(InvalidRequestError, match="outside the vocabulary of") as raised:
        SamplingParams(max_tokens=16, **fields).validate(vocab_size)
    assert len(raised.value.message) < 300


@pytest.mark.parametrize(
    ("number", "seed"),
    [(0, 0), (7, 7), (SEED_LIMIT - 1, SEED_LIMIT - 1), (-2, SEED_LIMIT - 2), (-SEED_LIMIT, 0)],
)
def test_every_signed_integer_is_a_seed(number: int, seed: int) -> None:
    assert sampler_seed(number) == seed


def test_minus_one_is_no_seed() -> None:
    assert sampler_seed(-1) is None
