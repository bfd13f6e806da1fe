"""Limits of tokens, compared with a search of the whole output."""

from __future__ import annotations

import random

import numpy as np

from pd.core.sampling_params import SamplingParams
from pd.engine.draft_tree import DraftTree
from pd.engine.sampling_state import SamplingState
from pd.engine.token_limits import LimitTable, TokenLimits
from pd.engine.token_rules import fill_masks

VOCAB = 70


def read_mask(mask: np.ndarray) -> set[int]:
    return {token for token in range(VOCAB) if mask[token // 32] >> (token % 32) & 1}


def find_allowed(params: SamplingParams, output: list[int]) -> set[int]:
    """Search the output for the beginning of every bad sequence."""
    allowed = set(params.allowed_token_ids or range(VOCAB))
    for *before, last in params.bad_sequences:
        if output[len(output) - len(before) :] == before and len(before) <= len(output):
            allowed.discard(last)
    return allowed


def draw_params(rng: random.Random) -> SamplingParams:
    few = rng.sample(range(VOCAB), 5)
    sequences = tuple(
        tuple(rng.choices(few, k=rng.randint(1, 4))) for _ in range(rng.randint(0, 30))
    )
    allowed = rng.choice(((), tuple(few), (0, 31, 32, 63, 64, 69, *few)))
    return SamplingParams(max_tokens=9, allowed_token_ids=allowed, bad_sequences=sequences)


def make_mask() -> np.ndarray:
    return np.full(-(-VOCAB // 32), -1, np.int32)


def test_masks_are_those_of_a_search(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        params = draw_params(rng)
        rules, output = TokenLimits(LimitTable(params, VOCAB), None), list[int]()
        for _ in range(20):
            mask = make_mask()
            rules.fill_mask(mask)
            allowed = find_allowed(params, output)
            assert read_mask(mask) == allowed
            if not output:
                assert rules.first_mask is not None
                assert read_mask(rules.first_mask) == allowed
            token = rng.choice([*params.allowed_token_ids, *range(VOCAB)][:12])
            assert rules.accept_token(token) == (token in allowed)
            if token in allowed:
                output.append(token)
            if rng.random() < 0.3:
                count = rng.randint(0, len(output))
                rules.roll_back(count)
                del output[len(output) - count :]
        mask = make_mask()
        rules.fork_rules().fill_mask(mask)
        assert read_mask(mask) == find_allowed(params, []), "another choice has no output"


def test_each_guess_of_a_draft_has_the_mask_after_its_path(seed: int) -> None:
    rng = random.Random(seed)
    tree = DraftTree(np.array([-1, -1, 0, 0, 1, 2], np.int32))
    for _ in range(100):
        params = draw_params(rng)
        rules = TokenLimits(LimitTable(params, VOCAB), None)
        guesses = [rng.choice([*find_allowed(params, []), 0]) for _ in range(tree.size)]
        masks = np.stack([make_mask()] * (1 + tree.size))
        fill_masks(rules, masks, tree, guesses)
        assert read_mask(masks[0]) == find_allowed(params, [])
        for guess, path in enumerate(tree.paths):
            tokens = [guesses[each] for each in path]
            is_allowed = all(
                token in find_allowed(params, tokens[:place]) for place, token in enumerate(tokens)
            )
            allowed = find_allowed(params, tokens) if is_allowed else set(range(VOCAB))
            assert read_mask(masks[1 + guess]) == allowed


def test_limits_alone_end_no_output() -> None:
    prompt = np.array([1], np.int32)
    params = SamplingParams(
        max_tokens=9, allowed_token_ids=(3, 69), ignore_eos=True, stop_token_ids=(5,)
    )
    state = SamplingState(params, prompt, (69,), VOCAB)
    assert [state.observe_token(token) for token in (3, 69)] == [None, None]
    assert state.stop_ids.tolist() == [5]
    error = state.make_error("no finite logits")
    assert (error.status, error.param) == (400, "allowed_token_ids")
