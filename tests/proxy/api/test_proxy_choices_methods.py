"""The methods of a choice by probability, on made-up log probabilities."""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest

from pd.core.messages import TokenLogprobs
from pd.proxy.api.choice_scores import OptionLogprobs, choose_best, score_option
from pd.proxy.requests.native import ChoicesMethod


def option(*tokens: tuple[int, float], start: int = 9, alone: tuple[float, ...] = ()) -> Any:
    """An option of (token, log probability), and its log probabilities without the prompt."""
    conditional = [TokenLogprobs(token, logprob) for token, logprob in tokens]
    first = [TokenLogprobs(0, None)] if alone or len(tokens) == 1 else []
    return OptionLogprobs(start, conditional, [*first, *(TokenLogprobs(0, x) for x in alone)])


def test_token_length_normalized_is_the_mean() -> None:
    options = [option((1, -1.0)), option((2, -2.0), (3, -0.25), (4, -0.25)), option((5, -0.9))]
    assert [score_option("token_length_normalized", o) for o in options] == pytest.approx(
        [-1.0, -2.5 / 3, -0.9]
    )
    assert choose_best("token_length_normalized", options) == 1


def test_greedy_token_looks_at_the_first_token_only_where_it_decides() -> None:
    options = [option((1, -0.5), (2, -9.0)), option((3, -0.6), (4, -0.1))]
    assert choose_best("token_length_normalized", options) == 1
    assert choose_best("greedy_token", options) == 0
    assert [score_option("greedy_token", o) for o in options] == [-0.5, -0.6]


def test_greedy_token_goes_on_among_options_with_the_same_tokens() -> None:
    options = [
        option((1, -0.5), (2, -0.3), (3, -4.0)),
        option((4, -0.7), (5, 0.0)),
        option((1, -0.5), (2, -0.3), (6, -3.0)),
        option((1, -0.5), (7, -2.0), (6, 0.0)),
    ]
    assert choose_best("greedy_token", options) == 2


def test_greedy_token_knows_equal_tokens_though_they_were_rounded_differently() -> None:
    options = [option((1, -0.5 + 1e-7), (2, -3.0)), option((1, -0.5), (3, -1.0))]
    assert choose_best("greedy_token", options) == 1
    # The same token in another place is another token.
    elsewhere = option((1, -0.5), (3, -1.0), start=8)
    assert choose_best("greedy_token", [options[0], elsewhere]) == 0


@pytest.mark.parametrize(("next_token", "chosen"), [(-0.4, 0), (-0.2, 1)])
def test_greedy_token_compares_an_option_that_ended_by_its_mean(
    next_token: float, chosen: int
) -> None:
    assert (
        choose_best("greedy_token", [option((1, -0.3)), option((1, -0.3), (2, next_token))])
        == chosen
    )


def test_unconditional_likelihood_is_what_the_prompt_adds() -> None:
    common = option((1, -0.2), (2, -0.2), alone=(-0.1,))
    rare = option((3, -3.0), (4, -0.1), alone=(-8.0,))
    single = option((5, -1.0))
    options = [common, rare, single]
    scores = [score_option("unconditional_likelihood", o) for o in options]
    assert scores == pytest.approx([-0.15, 2.45, -1.0])
    assert choose_best("token_length_normalized", options) == 0
    assert choose_best("unconditional_likelihood", options) == 1


@pytest.mark.parametrize("method", get_args(ChoicesMethod))
def test_the_first_of_equal_options_is_chosen(method: Any) -> None:
    same = option((1, -1.0), (2, -1.0), alone=(-1.0,))
    assert choose_best(method, [option((3, -5.0), (2, -1.0), alone=(-1.0,)), same, same]) == 1


def greedy_by_sorting(options: list[Any]) -> int:
    """The same choice by another road: the largest of all padded lists, compared as lists. That is
    the same as long as equal tokens have equal log probabilities, and different ones do not."""
    longest = max(len(o.conditional) for o in options)
    padded = [
        [e.logprob for e in o.conditional] + [o.mean] * (longest - len(o.conditional))
        for o in options
    ]
    return padded.index(max(padded))


def test_greedy_token_equals_the_comparison_of_padded_lists() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    known: dict[tuple[int, ...], float] = {}
    for _ in range(300):
        options = []
        for _ in range(rng.randint(1, 8)):
            tokens = tuple(rng.randrange(3) for _ in range(rng.randint(1, 5)))
            heads = [tokens[: n + 1] for n in range(len(tokens))]
            values = [known.setdefault(head, -rng.random() * 5) for head in heads]
            options.append(option(*zip(tokens, values, strict=True)))
        assert choose_best("greedy_token", options) == greedy_by_sorting(options)
