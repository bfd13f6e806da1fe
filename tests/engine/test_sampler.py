"""What each sampling parameter does to the token that is chosen."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from pd.core.sampling_params import SamplingParams
from pd.engine.device_copy import HostCopy
from pd.engine.draft_tree import DraftTree
from pd.engine.penalties import Penalties
from pd.engine.sampler import Sampler
from pd.engine.sampling_state import Draw, SamplingState
from pd.engine.step_outcome import StepOutcome

torch.set_num_threads(1)
VOCAB = 50
NO_PROMPT = np.array([], np.int32)
# Ten tokens of falling probability, then forty that are never drawn.
LOGITS = torch.cat((torch.linspace(2, -2, 10), torch.full((40,), -80.0)))


def state(
    prompt: list[int] | None = None, output: list[int] | None = None, **params: Any
) -> SamplingState:
    params = {"max_tokens": 10_000, **params}
    made = SamplingState(
        SamplingParams(**params), np.array(prompt or [0], np.int32), (VOCAB - 1,), VOCAB
    )
    for token in output or []:
        made.observe_token(token)
    return made


def draw(
    logits: torch.Tensor, count: int, *, output: list[int] | None = None, **params: Any
) -> list[int]:
    """Tokens of ``count`` requests alike but for their seeds."""
    sampler = Sampler(len(logits), "cpu")
    states = [state(seed=seed, output=output, **params) for seed in range(count)]
    return [s.token_id for s in sampler.sample_tokens(logits.expand(count, -1), states)]


def greedy(logits: torch.Tensor, made: SamplingState) -> int:
    return Sampler(VOCAB, "cpu").sample_tokens(logits[None], [made])[0].token_id


def assert_distributed(tokens: list[int], logits: torch.Tensor) -> None:
    """Chi-square of drawn tokens against softmax; p = 0.001 for up to nine degrees of freedom."""
    probabilities = torch.softmax(logits.double(), -1).numpy()
    counts = np.bincount(tokens, minlength=len(logits))
    likely = probabilities > 1e-12
    assert counts[~likely].sum() == 0
    expected = probabilities[likely] * len(tokens)
    assert ((counts[likely] - expected) ** 2 / expected).sum() < 27.9


class TestDistribution:
    def test_is_softmax_of_the_logits(self) -> None:
        assert_distributed(draw(LOGITS, 20_000), LOGITS)

    def test_over_the_positions_of_one_request(self) -> None:
        sampler, made, tokens = Sampler(VOCAB, "cpu"), state(seed=5), []
        for _ in range(3000):
            tokens.append(sampler.sample_tokens(LOGITS[None], [made])[0].token_id)
            made.observe_token(tokens[-1])
        assert_distributed(tokens, LOGITS)

    @pytest.mark.parametrize("temperature", [0.5, 2.0])
    def test_temperature_divides_the_logits(self, temperature: float) -> None:
        assert_distributed(draw(LOGITS, 20_000, temperature=temperature), LOGITS / temperature)

    def test_top_k_keeps_the_likeliest(self) -> None:
        expected = LOGITS.masked_fill(torch.arange(VOCAB) >= 3, float("-inf"))
        assert_distributed(draw(LOGITS, 20_000, top_k=3), expected)

    def test_top_p_keeps_the_smallest_set_with_that_mass(self) -> None:
        mass = torch.softmax(LOGITS, -1).cumsum(-1)
        assert float(mass[3]) < 0.85 < float(mass[4])
        expected = LOGITS.masked_fill(torch.arange(VOCAB) >= 5, float("-inf"))
        assert_distributed(draw(LOGITS, 20_000, top_p=0.85), expected)

    def test_top_p_counts_the_mass_that_top_k_kept(self) -> None:
        mass = torch.softmax(LOGITS[:4], -1).cumsum(-1)
        assert float(mass[1]) < 0.8 < float(mass[2])
        expected = LOGITS.masked_fill(torch.arange(VOCAB) >= 3, float("-inf"))
        assert_distributed(draw(LOGITS, 20_000, top_k=4, top_p=0.8), expected)

    def test_top_p_keeps_one_token_at_least(self) -> None:
        assert set(draw(LOGITS, 200, top_p=1e-6)) == {0}

    def test_min_p_is_a_fraction_of_the_likeliest(self) -> None:
        ratio = torch.softmax(LOGITS, -1) / torch.softmax(LOGITS, -1)[0]
        expected = LOGITS.masked_fill(ratio < 0.2, float("-inf"))
        assert 1 < int(torch.isfinite(expected).sum()) < 10
        assert_distributed(draw(LOGITS, 20_000, min_p=0.2), expected)

    def test_filters_see_logits_divided_by_the_temperature(self) -> None:
        scaled = LOGITS / 0.5
        ratio = torch.exp(scaled - scaled[0])
        expected = scaled.masked_fill(ratio < 0.1, float("-inf"))
        assert_distributed(draw(LOGITS, 20_000, min_p=0.1, temperature=0.5), expected)

    def test_filters_see_adjusted_logits(self) -> None:
        """Top-k counts tokens after the bias, so a banned one takes no place."""
        tokens = draw(LOGITS, 500, top_k=2, logit_bias={0: -100.0})
        assert set(tokens) == {1, 2}


class TestGreedy:
    def test_temperature_zero_takes_the_likeliest(self) -> None:
        assert draw(LOGITS.flip(0), 3, temperature=0.0) == [VOCAB - 1] * 3

    def test_a_tiny_temperature_does_not_overflow(self) -> None:
        assert draw(LOGITS * 1e3, 3, temperature=1e-300) == [0] * 3

    def test_logit_bias(self) -> None:
        assert greedy(LOGITS, state(temperature=0.0, logit_bias={0: -1.0, 7: 10.0})) == 7

    def test_presence_penalty_counts_a_token_once(self) -> None:
        logits = torch.tensor([2.0, 1.3] + [-9.0] * 48)
        for output, expected in (([], 0), ([0], 0), ([0, 0, 0], 0)):
            made = state(temperature=0.0, presence_penalty=0.6, output=output)
            assert greedy(logits, made) == expected
        assert greedy(logits, state(temperature=0.0, presence_penalty=0.8, output=[0])) == 1

    def test_frequency_penalty_counts_every_occurrence(self) -> None:
        logits = torch.tensor([2.0, 1.3] + [-9.0] * 48)
        assert greedy(logits, state(temperature=0.0, frequency_penalty=0.3, output=[0] * 2)) == 0
        assert greedy(logits, state(temperature=0.0, frequency_penalty=0.3, output=[0] * 3)) == 1

    def test_frequency_and_presence_ignore_the_prompt(self) -> None:
        logits = torch.tensor([2.0, 1.9] + [-9.0] * 48)
        made = state(prompt=[0] * 9, temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0)
        assert greedy(logits, made) == 0

    def test_repetition_penalty_divides_positive_and_multiplies_negative_logits(self) -> None:
        positive = torch.tensor([2.0, 1.5] + [-9.0] * 48)
        negative = torch.tensor([-1.0, -1.5] + [-9.0] * 48)
        for logits in (positive, negative):
            assert greedy(logits, state(temperature=0.0, repetition_penalty=1.2, output=[0])) == 0
            assert greedy(logits, state(temperature=0.0, repetition_penalty=1.6, output=[0])) == 1

    def test_repetition_penalty_counts_the_prompt(self) -> None:
        logits = torch.tensor([2.0, 1.5] + [-9.0] * 48)
        assert greedy(logits, state(prompt=[3, 0], temperature=0.0, repetition_penalty=1.6)) == 1

    def test_penalties_come_in_vllms_order(self) -> None:
        """Repetition first, then frequency and presence: 4 / 2 - 0.5 * 2 - 0.5 = 0.5."""
        logits = torch.tensor([4.0, 0.49, 0.51] + [-9.0] * 47)
        penalties = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.5}
        sampler, made = Sampler(VOCAB, "cpu"), state(temperature=0.0, output=[0, 0], **penalties)
        assert sampler.sample_tokens(logits[None], [made])[0].token_id == 2
        without = logits.index_fill(0, torch.tensor([2]), -9.0)
        assert sampler.sample_tokens(without[None], [made])[0].token_id == 0

    def test_many_output_tokens_are_remembered(self) -> None:
        made = state(temperature=0.0, presence_penalty=2.0, output=list(range(VOCAB - 1)) * 9)
        assert greedy(torch.zeros(VOCAB), made) == VOCAB - 1

    def test_min_tokens_masks_every_ending(self) -> None:
        logits = torch.arange(VOCAB).float()  # the likeliest is the end of sequence
        made = state(temperature=0.0, min_tokens=2, stop_token_ids=(VOCAB - 2,))
        for expected in (VOCAB - 3, VOCAB - 3, VOCAB - 1):
            token = greedy(logits, made)
            assert token == expected
            made.observe_token(token)

    def test_min_tokens_counts_a_token_once_that_is_observed_before_the_launch(self) -> None:
        """As beside a row with rules, for which the step before is accounted for meanwhile."""
        logits = torch.linspace(0, 1, VOCAB)[None]
        sampler, made = Sampler(VOCAB, "cpu"), state(temperature=0.0, min_tokens=3)
        made.observe_token(3)
        known = torch.tensor([4])
        prepared = sampler.prepare_draws([Draw(made, follows=0)], known)
        made.observe_token(4)
        assert sampler.launch_draws(logits, prepared).read_tokens()[0].token_id == VOCAB - 2
        made.observe_token(VOCAB - 2)
        prepared = sampler.prepare_draws([Draw(made)])
        assert sampler.launch_draws(logits, prepared).read_tokens()[0].token_id == VOCAB - 1

    def test_min_tokens_leaves_an_ignored_end_of_sequence(self) -> None:
        made = state(temperature=0.0, min_tokens=2, ignore_eos=True)
        assert greedy(torch.arange(VOCAB).float(), made) == VOCAB - 1


MIXTURE: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_k": 40, "temperature": 0.7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_p": 0.999, "temperature": 3.0},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"logit_bias": {3: 2.0}, "min_tokens": 100},
    {"temperature": 0.0, "presence_penalty": 1.0, "logprobs": True, "top_logprobs": 3},
]


class TestIndependence:
    def test_a_row_does_not_depend_on_its_batch(self) -> None:
        size = 3000
        logits = torch.randn(40, size, generator=torch.Generator().manual_seed(0)) * 3
        states = [
            SamplingState(
                SamplingParams(max_tokens=200, seed=i, **MIXTURE[i % len(MIXTURE)]),
                np.arange(i, dtype=np.int32),
                (7,),
                size,
            )
            for i in range(40)
        ]
        for i, made in enumerate(states):
            for token in range(i):
                made.observe_token(token * 3)
        sampler = Sampler(size, "cpu")
        before = logits.clone()
        together = sampler.sample_tokens(logits, states)
        assert torch.equal(logits, before)
        for i in range(40):
            assert sampler.sample_tokens(logits[i : i + 1], [states[i]]) == [together[i]]
        order = np.random.default_rng(0).permutation(40)
        shuffled = sampler.sample_tokens(
            logits[torch.from_numpy(order)], [states[i] for i in order]
        )
        assert shuffled == [together[i] for i in order]

    def test_noise_depends_on_the_position_in_prompt_and_output(self) -> None:
        """So a request resumed elsewhere, its output made part of the prompt, goes on alike."""
        found = []
        for cut in range(6):
            tokens = [1, 2, 3, 4, 5, 6]
            made = SamplingState(
                SamplingParams(max_tokens=99, seed=3), np.array(tokens[:cut], np.int32), (), VOCAB
            )
            for token in tokens[cut:]:
                made.observe_token(token)
            found += Sampler(VOCAB, "cpu").sample_tokens(torch.zeros(1, VOCAB), [made])
        assert found == found[:1] * 6

    def test_choices_draw_different_noise(self) -> None:
        first = state(seed=9)
        states = [first.fork_state(index) for index in range(20)]
        tokens = Sampler(VOCAB, "cpu").sample_tokens(torch.zeros(20, VOCAB), states)
        assert len({t.token_id for t in tokens}) > 10
        alone = Sampler(VOCAB, "cpu").sample_tokens(torch.zeros(1, VOCAB), [first])
        assert tokens[0] == alone[0]


class TestLogprobs:
    def test_are_of_the_raw_logits(self) -> None:
        made = state(temperature=0.0, logprobs=True, top_logprobs=2, logit_bias={4: 50.0}, top_k=1)
        (sampled,) = Sampler(VOCAB, "cpu").sample_tokens(LOGITS[None], [made])
        expected = torch.log_softmax(LOGITS, -1)
        assert sampled.token_id == 4
        assert sampled.logprobs is not None
        assert sampled.logprobs.token_id == 4
        assert sampled.logprobs.logprob == pytest.approx(float(expected[4]), abs=1e-6)
        assert sampled.logprobs.top_ids == [0, 1]
        assert sampled.logprobs.top_logprobs == pytest.approx(expected[:2].tolist(), abs=1e-6)

    def test_only_for_those_who_ask_and_as_many_as_they_ask(self) -> None:
        counts = [None, 0, 5, 1]
        states = [
            state(seed=i, logprobs=count is not None, top_logprobs=count or 0)
            for i, count in enumerate(counts)
        ]
        found = Sampler(VOCAB, "cpu").sample_tokens(LOGITS.expand(4, -1), states)
        lengths = [None if s.logprobs is None else len(s.logprobs.top_ids) for s in found]
        assert lengths == counts

    def test_named_tokens_follow_the_likeliest(self) -> None:
        named = ((7, 49), (), (3,))
        states = [state(logprobs=True, top_logprobs=2, logprob_token_ids=ids) for ids in named]
        found = Sampler(VOCAB, "cpu").sample_tokens(LOGITS.expand(3, -1), states)
        expected = torch.log_softmax(LOGITS, -1)
        for ids, sampled in zip(named, found, strict=True):
            assert sampled.logprobs is not None
            assert sampled.logprobs.top_ids == [0, 1, *ids]
            wanted = expected[[0, 1, *ids]].tolist()
            assert sampled.logprobs.top_logprobs == pytest.approx(wanted, abs=1e-6)

    def test_of_prompt_tokens(self) -> None:
        logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
        targets = np.array([4, 0, 49], np.int32)
        found = Sampler(VOCAB, "cpu").compute_prompt_logprobs(logits, targets, 2).read_logprobs()
        expected = torch.log_softmax(logits, -1)
        for i, entry in enumerate(found):
            assert entry.token_id == targets[i]
            assert entry.logprob == pytest.approx(float(expected[i, targets[i]]), abs=1e-6)
            assert entry.top_ids == expected[i].topk(2).indices.tolist()


class TestBrokenLogits:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_p": 0.9}, {"logprobs": True}])
    def test_fail_their_own_row_only(self, value: float, params: dict[str, Any]) -> None:
        logits = LOGITS.repeat(3, 1)
        # A single -inf is a token that is never drawn; when there is nothing else, all is lost.
        logits[1, slice(None) if value == float("-inf") else 17] = value
        states = [state(seed=i, **params) for i in range(3)]
        found = Sampler(VOCAB, "cpu").sample_tokens(logits, states)
        assert found[1].token_id == -1
        assert "not finite" in str(found[1].error)
        clean = Sampler(VOCAB, "cpu").sample_tokens(LOGITS.repeat(3, 1), states)
        assert [found[0], found[2]] == [clean[0], clean[2]]


class TestEnding:
    def test_end_of_sequence_of_the_model(self) -> None:
        made = state(max_tokens=5)
        assert made.observe_token(3) is None
        finish = made.observe_token(VOCAB - 1)
        assert finish is not None
        assert (finish.type, finish.matched) == ("stop", VOCAB - 1)

    def test_stop_token_ids_count_even_if_end_of_sequence_is_ignored(self) -> None:
        made = state(ignore_eos=True, stop_token_ids=(8,))
        assert made.observe_token(VOCAB - 1) is None
        finish = made.observe_token(8)
        assert finish is not None and finish.matched == 8

    def test_length(self) -> None:
        made = state(max_tokens=2)
        assert made.observe_token(1) is None
        finish = made.observe_token(1)
        assert finish is not None
        assert (finish.type, finish.matched) == ("length", None)
        assert made.num_output_tokens == 2

    def test_a_stop_at_the_last_token_is_a_stop(self) -> None:
        finish = state(max_tokens=1).observe_token(VOCAB - 1)
        assert finish is not None and finish.type == "stop"

    def test_ids_outside_the_vocabulary_do_no_harm(self) -> None:
        made = SamplingState(
            SamplingParams(max_tokens=9, min_tokens=5), NO_PROMPT, (VOCAB + 5,), VOCAB
        )
        assert Sampler(VOCAB, "cpu").sample_tokens(LOGITS[None], [made])[0].token_id < 10

    def test_a_fork_starts_over(self) -> None:
        made = state(output=[1, 2], presence_penalty=1.0)
        forked = made.fork_state(1)
        assert (forked.num_output_tokens, forked.uncounted) == (0, [])
        assert made.uncounted == [1, 2]
        assert forked.seed != made.seed

    def test_forks_share_what_is_known_of_the_prompt(self) -> None:
        """A prompt may have as many different tokens as the vocabulary, and 64 choices."""
        made = state(prompt=[3, 1, 3], repetition_penalty=2.0)
        assert made.prompt_ids.tolist() == [1, 3]
        assert all(made.fork_state(index).prompt_ids is made.prompt_ids for index in range(3))


@dataclass
class Penalized:
    """A choice of the test below. ``unobserved``: row of the last step that sampled its last token,
    which the host does not have yet. ``unread``: tokens that came out of a draft in that step,
    which the host does not have either."""

    state: SamplingState
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    unobserved: int | None = None
    unread: list[int] = field(default_factory=list)

    def adjusted(self, logits: torch.Tensor, drafted: list[int]) -> torch.Tensor:
        """The logits of one row, token by token."""
        params, output, result = self.state.params, self.output + drafted, logits.clone()
        for token, value in enumerate(logits):
            count = output.count(token)
            if count or (token in self.prompt and params.repetition_penalty != 1.0):
                strength = params.repetition_penalty
                value = value / strength if value > 0 else value * strength
            result[token] = value - params.frequency_penalty * count
            result[token] -= params.presence_penalty * (count > 0)
        return result


class TestPenaltiesOnTheDevice:
    """The table that counts tokens, against counts that are made afresh for each step."""

    def test_whatever_runs_beside_and_in_whatever_order(self, seed: int) -> None:
        """Choices come and go, skip steps, are drafted for, and go on before the host has their
        last token, or knows how many of their drafted tokens were accepted."""
        rng, vocab = random.Random(seed), 24
        torch.manual_seed(seed)
        table = Penalties(vocab, torch.device("cpu"))
        live: list[Penalized] = []
        known = torch.zeros(0, dtype=torch.int64)
        for _ in range(120):
            while len(live) < 40 and rng.random() < 0.6:
                prompt = [rng.randrange(vocab) for _ in range(rng.randrange(6))]
                params = SamplingParams(
                    max_tokens=999,
                    repetition_penalty=rng.choice((1.0, 1.3)),
                    frequency_penalty=rng.choice((0.0, 0.7)),
                    presence_penalty=rng.choice((0.4, -0.3)),
                )
                made = SamplingState(params, np.array(prompt, np.int32), (), vocab)
                live.append(Penalized(made, prompt))
            draws, expected, drafts = list[Draw](), [], list[int]()
            # Works of the step before that had drafts, which the host has not read.
            drafted = [each for each in live if each.unread]
            out = [each.unread + [-1] * (5 - len(each.unread)) for each in drafted]
            counts = torch.tensor([len(each.unread) - 1 for each in drafted], dtype=torch.int64)
            tokens = torch.tensor(out, dtype=torch.int64).reshape(-1, 5)
            outcome = StepOutcome(counts, counts, tokens, HostCopy([counts]))
            running: list[tuple[Penalized, int]] = []
            logits = torch.randn(4 * len(live), vocab)
            for each in rng.sample(live, rng.randrange(len(live) + 1)):
                running.append((each, len(expected)))
                size = 3 if each.unobserved is None and rng.random() < 0.3 else 0
                # A tree of guesses, and the guessed tokens before each row.
                parents = [rng.randrange(-1, index) for index in range(size)]
                before: list[list[int]] = [[]]
                for parent in parents:
                    before.append([*before[parent + 1], rng.randrange(vocab)])
                first = len(drafts)
                drafts += [tokens[-1] for tokens in before[1:]]
                # All rows, or only the last of a chain.
                drawn = size if rng.random() < 0.2 and not each.unread else 0
                tree = DraftTree(np.array(parents, np.int32))
                if each.unread:
                    most, work = rng.randrange(len(each.unread), 6) - 1, drafted.index(each)
                    unread = Draw(each.state, None, tree, first, unread=max(1, most), work=work)
                    draws.append(unread)
                elif drawn:
                    before = [drafts[first:]]
                    draws.append(Draw(each.state, None, None, first, drawn))
                else:
                    draws.append(Draw(each.state, each.unobserved, tree, first))
                for tokens in before:
                    expected.append(each.adjusted(logits[len(expected)], tokens))
            logits = logits[: len(expected)].clone()
            step = table.prepare_rows(
                draws, known, torch.tensor(drafts, dtype=torch.int64), outcome
            )
            if step is not None:
                table.apply_rows(logits, step)
                assert torch.allclose(logits, torch.stack(expected), atol=1e-6), f"seed {seed}"
            # The host learns the tokens of the step before.
            for each in live:
                if each.unobserved is not None:
                    each.state.observe_token(each.output[-1])
                    each.unobserved = None
                for token in each.unread:
                    each.state.observe_token(token)
                if each.unread and any(each is one for one, _ in running):
                    each.state.counted_ahead = 0
                each.unread = []
            known = torch.randint(vocab, (len(expected),))
            for each, row in running:
                if rng.random() < 0.3:
                    each.unread = [rng.randrange(vocab) for _ in range(rng.randint(1, 5))]
                    each.output += each.unread
                    continue
                each.output.append(int(known[row]))
                if rng.random() < 0.5:
                    each.unobserved = row
                else:
                    each.state.observe_token(each.output[-1])
            live = [each for each in live if rng.random() > 0.05]

    def test_rows_of_choices_that_are_no_more_are_used_again(self) -> None:
        table = Penalties(8, torch.device("cpu"))
        for _ in range(100):
            some = [state(presence_penalty=1.0) for _ in range(3)]
            step = table.prepare_rows([Draw(each) for each in some], None, None)
            assert step is not None
            table.apply_rows(torch.zeros(3, 8), step)
        # Three are alive while three others are prepared.
        assert len(table._counts) <= 8


def test_rows_of_any_step_are_drawn_by_their_own_parameters(seed: int) -> None:
    """Whichever rows the steps before had."""
    rng, sampler = random.Random(seed), Sampler(VOCAB, "cpu")
    states = [
        state(
            seed=number,
            temperature=rng.choice([0.0, 0.5, 2.0]),
            top_k=rng.choice([0, 3]),
            top_p=rng.choice([1.0, 0.6]),
            min_p=rng.choice([0.0, 0.3]),
        )
        for number in range(6)
    ]
    rows, tree = states[:3], DraftTree(np.array([-1, 0], np.int32))
    for _ in range(60):
        if rng.random() < 0.4:
            rows = rng.sample(states, rng.randint(0, len(states)))
        draws = [Draw(each, tree=tree if rng.random() < 0.1 else None) for each in rows]
        logits = torch.randn(sum(each.num_rows for each in draws), VOCAB)
        found = sampler.launch_draws(logits, sampler.prepare_draws(draws)).read_tokens()
        fresh = Sampler(VOCAB, "cpu")
        assert found == fresh.launch_draws(logits, fresh.prepare_draws(draws)).read_tokens()
        for each in rows:
            each.observe_token(rng.randrange(VOCAB - 1))
