"""The time of steps: fitted to what was measured, published, and used to choose slices."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from prefill_bench import PrefillBench
from requests_for_tests import make_request

from pd.core.step_cost import KNEES, StepCost, StepShape, chunk_pairs, graph_rows
from pd.engine.draft_tree import make_chain
from pd.scheduling.combined import CombinedScheduler
from pd.scheduling.cost_model import CostModel
from pd.scheduling.slices import PromptSlices
from pd.scheduling.step import Work
from pd.speculative.draft import Draft, DraftedTokens

# About an 8B model on a large GPU, in seconds.
DEVICE = StepCost(
    base=5e-3, mixed=2e-3, middle=1.5e-5, rest=2.4e-5, pair=6e-10, context=2e-8, stream=2e-5
)


def random_shape(rng: random.Random) -> StepShape:
    streams = rng.choice([0, 1, 8, 40, 120])
    tokens = rng.choice([0, 0, 20, 300, 1000, 8000]) if streams else rng.choice([50, 500, 8000])
    pairs = chunk_pairs(rng.randrange(20_000), tokens)
    return StepShape(tokens, pairs, streams, streams * rng.randrange(100, 8000))


def watch(
    model: CostModel, device: StepCost, rng: random.Random, steps: int, noise: float = 0.05
) -> None:
    for _ in range(steps):
        shape = random_shape(rng)
        model.observe_step(shape, device.predict_seconds(shape) * rng.uniform(1 - noise, 1 + noise))


def worst_error(model: CostModel, device: StepCost, rng: random.Random) -> float:
    shapes = [random_shape(rng) for _ in range(200)]
    return max(abs(model.cost.predict_seconds(s) / device.predict_seconds(s) - 1) for s in shapes)


def test_the_fit_predicts_steps_that_it_has_not_seen(seed: int) -> None:
    rng, model = random.Random(seed), CostModel()
    watch(model, DEVICE, rng, 1000)
    assert worst_error(model, DEVICE, rng) < 0.05


def test_a_first_fit_to_few_kinds_of_steps_foretells_longer_ones() -> None:
    """The kernels of a short chunk take the host longer to launch than the GPU to compute."""
    model = CostModel()
    for tokens, streams, seconds in (
        (0, 1, 6.06e-3),
        (0, 8, 6.1e-3),
        (16, 0, 25e-3),
        (64, 0, 25.3e-3),
        (256, 0, 26e-3),
    ):
        shape = StepShape(tokens, chunk_pairs(0, tokens), streams, streams * 17)
        model.add_measurement(shape, seconds, 8)
        model.fit(first=True)
        assert model.cost.predict_seconds(shape) == pytest.approx(seconds, rel=0.05)
    assert 26e-3 < model.cost.predict_seconds(StepShape(512, chunk_pairs(0, 512))) < 35e-3


def test_time_that_is_ascribed_to_the_step_after_changes_little(seed: int) -> None:
    """A host that looks late finds one step long and the next one short."""
    rng, model = random.Random(seed), CostModel()
    watch(model, DEVICE, rng, 1000)
    shape = StepShape(900, chunk_pairs(9000, 900), 8, 8 * 2000)
    taken = DEVICE.predict_seconds(shape)
    for _ in range(300):
        late = rng.choice([0.0, 0.0, 0.95])
        model.observe_step(shape, taken * (1 + late))
        model.observe_step(shape, taken * (1 - late))
    assert model.cost.predict_seconds(shape) == pytest.approx(taken, rel=0.25)


def test_a_fit_that_is_far_off_is_corrected_within_seconds(seed: int) -> None:
    rng, model = random.Random(seed), CostModel()
    watch(model, StepCost(*(c / 10 for c in DEVICE.coefficients)), rng, 1000)
    shape = StepShape(900, chunk_pairs(9000, 900), 8, 8 * 2000)
    for _ in range(100):
        model.observe_step(shape, DEVICE.predict_seconds(shape) * rng.uniform(0.95, 1.05))
    assert model.cost.predict_seconds(shape) == pytest.approx(
        DEVICE.predict_seconds(shape), rel=0.5
    )


def test_the_fit_follows_a_device_that_becomes_slower(seed: int) -> None:
    rng, model = random.Random(seed), CostModel()
    watch(model, DEVICE, rng, 1000)
    slower = StepCost(*(2 * c for c in DEVICE.coefficients))
    watch(model, slower, rng, 3000)
    assert worst_error(model, slower, rng) < 0.2


def test_what_the_last_steps_do_not_tell_stays_known(seed: int) -> None:
    """Hours of decode steps make no difference to what a prompt is expected to take."""
    rng, model = random.Random(seed), CostModel()
    watch(model, DEVICE, rng, 1000)
    prompt = StepShape(8000, chunk_pairs(0, 8000))
    before = model.cost.predict_seconds(prompt)
    for _ in range(30_000):
        streams = rng.randrange(8, 64)
        shape = StepShape(streams=streams, context=streams * rng.randrange(100, 2000))
        model.observe_step(shape, DEVICE.predict_seconds(shape) * rng.uniform(0.95, 1.05))
    assert model.cost.predict_seconds(prompt) == pytest.approx(before, rel=0.2)
    # As if they had been many more: the weight of what is not observed vanishes.
    for feature in (1, 3, 4, 5, 6):
        model._matrix[feature] *= 1e-60
        model._matrix[:, feature] *= 1e-60
        model._target[feature] *= 1e-60
    watch_decoding = StepShape(streams=8, context=8 * 500)
    for _ in range(1000):
        model.observe_step(
            watch_decoding, DEVICE.predict_seconds(watch_decoding) * rng.uniform(0.95, 1.05)
        )
    assert model.cost.predict_seconds(prompt) == pytest.approx(before, rel=0.3)


def test_one_slow_step_is_not_most_of_them(seed: int) -> None:
    rng, model = random.Random(seed), CostModel()
    watch(model, DEVICE, rng, 1023)
    model._recent.clear()
    kept = model._matrix.copy()
    shape = StepShape(streams=8, context=4000)
    model.observe_step(shape, 6 * DEVICE.predict_seconds(shape))
    assert model._matrix[0, 0] > 0.9 * kept[0, 0]


def test_a_step_that_compiled_a_kernel_hardly_changes_the_fit(seed: int) -> None:
    rng, model = random.Random(seed), CostModel()
    watch(model, DEVICE, rng, 1000)
    shape = StepShape(streams=8, context=4000)
    error = model.observe_step(shape, 1000 * DEVICE.predict_seconds(shape))
    assert error > 100
    watch(model, DEVICE, rng, 64)
    assert worst_error(model, DEVICE, rng) < 0.2


@pytest.mark.parametrize("seconds", [0.0, 1e-300, 1e300, math.inf])
def test_times_that_cannot_be_leave_a_fit_that_can_be_published(seed: int, seconds: float) -> None:
    rng, model = random.Random(seed), CostModel()
    for _ in range(3):
        model.observe_step(random_shape(rng), seconds)
        model.fit()
    watch(model, DEVICE, rng, 1000)
    sent = msgspec.msgpack.encode(model.cost)
    assert msgspec.msgpack.decode(sent, type=StepCost) == model.cost


def test_a_published_cost_is_numbers_within_bounds() -> None:
    sent = msgspec.msgpack.encode(DEVICE)
    assert msgspec.msgpack.decode(sent, type=StepCost) == DEVICE
    for graphs in (-1, 1 << 21, "1", 513, 100):
        sent = msgspec.msgpack.encode(msgspec.structs.asdict(DEVICE) | {"graphs": graphs})
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(sent, type=StepCost)
    fields = msgspec.structs.asdict(DEVICE)
    for wrong in (-1.0, math.nan, math.inf, 1e4, "1"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(fields | {"pair": wrong}), type=StepCost)


def test_a_chunk_fills_the_graph_in_which_it_is_replayed(seed: int) -> None:
    """Rows of padding take as long as others, so they are prompt tokens instead."""
    device = msgspec.structs.replace(DEVICE, graphs=1024, pair=0.0)
    rng, model = random.Random(seed), CostModel(graphs=1024)
    watch(model, device, rng, 1000)
    assert worst_error(model, device, rng) < 0.05
    beside = StepShape(streams=40, context=40 * 3000)
    for limit in (0.016, 0.018, 0.02, 0.022):
        tokens = device.find_largest_chunk(limit, 0, beside, 8192)
        rows = tokens + beside.streams
        assert rows == graph_rows(rows) < 1024
        assert (
            device.predict_seconds(beside._replace(tokens=tokens, pairs=chunk_pairs(0, tokens)))
            <= limit
        )


@pytest.mark.parametrize("start", [0, 5000])
@pytest.mark.parametrize("streams", [1, 60])
def test_the_largest_chunk_is_the_largest(start: int, streams: int) -> None:
    beside = StepShape(streams=streams, context=streams * 3000)

    def seconds(tokens: int) -> float:
        return DEVICE.predict_seconds(
            beside._replace(tokens=tokens, pairs=chunk_pairs(start, tokens))
        )

    found = DEVICE.find_largest_chunk(0.02, start, beside, 8192)
    assert seconds(found) <= 0.02 < seconds(found + 1)
    assert DEVICE.find_largest_chunk(10.0, start, beside, 8192) == 8192
    assert DEVICE.find_largest_chunk(1e-3, start, beside, 8192) == 0


def test_a_prompt_takes_as_long_as_its_chunks() -> None:
    beside = StepShape(streams=4, context=4000)
    expected = 0.0
    for start in range(1000, 5000, 500):
        pairs = chunk_pairs(start, 500)
        expected += DEVICE.predict_seconds(beside._replace(tokens=500, pairs=pairs))
    found = DEVICE.prefill_seconds(1000, 4000, 500, beside)
    assert found == pytest.approx(expected, rel=1e-6)
    assert DEVICE.prefill_seconds(1000, 0, 500, beside) == 0.0


def slices(chunk: int = 8192) -> PromptSlices:
    model = CostModel()
    model.cost = DEVICE
    return PromptSlices(model, chunk, pool_tokens=1 << 20)


def test_a_slice_keeps_the_objective_beside_answers() -> None:
    chosen = slices()
    chosen.wanted_itl = 0.02
    sizes = []
    for streams in (1, 20, 60, 100):
        decoding = StepShape(streams=streams, context=streams * 3000)
        tokens = chosen.choose_tokens(decoding, start=2000)
        step = decoding._replace(tokens=tokens, pairs=chunk_pairs(2000, tokens))
        assert DEVICE.predict_seconds(step) <= 0.02
        sizes.append(tokens)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > KNEES[0]


def test_without_answers_a_step_is_for_prompts_alone() -> None:
    assert slices().choose_tokens(StepShape()) == 8192


def test_prompts_get_on_beside_answers_that_miss_the_objective_anyway() -> None:
    chosen = slices()
    chosen.wanted_itl = 1e-3
    decoding = StepShape(streams=100, context=300_000)
    tokens = chosen.choose_tokens(decoding)
    least = DEVICE.predict_seconds(decoding._replace(tokens=64, pairs=chunk_pairs(0, 64)))
    step = DEVICE.predict_seconds(decoding._replace(tokens=tokens, pairs=chunk_pairs(0, tokens)))
    assert tokens > 200
    assert 1.2 * least < step <= 1.25 * least, "several times as fast, for hardly any time more"
    assert slices(chunk=32).choose_tokens(StepShape(streams=100, context=300_000)) == 32
    assert slices(chunk=128).choose_tokens(StepShape(streams=500, context=300_000)) == 64


@pytest.mark.parametrize("streams", [1, 20, 60])
def test_a_few_prompt_tokens_are_computed_in_steps_hardly_longer_than_without(streams: int) -> None:
    chosen = slices()
    chosen.wanted_itl = 0.02
    decoding = StepShape(streams=streams, context=streams * 2000)

    def seconds(tokens: int) -> float:
        return DEVICE.predict_seconds(
            decoding._replace(tokens=tokens, pairs=chunk_pairs(0, tokens))
        )

    gentle, usual = chosen.choose_tokens(decoding, queued=512), chosen.choose_tokens(decoding)
    assert 64 <= gentle < usual
    assert seconds(gentle) <= 1.1 * seconds(64)
    assert math.ceil(512 / gentle) * seconds(gentle) <= 4 * 0.02
    most = gentle * int(4 * 0.02 / (1.1 * seconds(64)))
    assert chosen.choose_tokens(decoding, queued=most) == gentle
    assert chosen.choose_tokens(decoding, queued=most + 1) == usual


def test_the_end_of_a_long_prompt_is_not_a_few_tokens() -> None:
    bench = PrefillBench(pages=4096)
    scheduler = combined(bench)
    decode: Any = scheduler.decode
    answer = make_request(range(20_000, 22_000)).sequence
    answer.sampling = SimpleNamespace()
    decode.plan_step = lambda: [Work(answer, 1999, 2000)]
    bench.add(range(8000))
    sizes = []
    while sum(sizes) < 8000:
        _, chunk = scheduler.plan_step()
        sizes.append(chunk.stop - chunk.start)
    assert min(sizes[:-1]) > 300, sizes
    bench.add(range(30_000, 30_400))
    (_, chunk) = scheduler.plan_step()
    assert 64 <= chunk.stop - chunk.start < 300


def test_prompts_get_on_where_answers_join_in_every_step() -> None:
    chosen = slices()
    chosen.wanted_itl = 0.02
    decoding = StepShape(streams=20, context=40_000)
    usual = chosen.choose_tokens(decoding)
    found = []
    for _ in range(10):
        found.append(chosen.choose_tokens(decoding, joins=True))
        chosen.usual_tokens(decoding, 0, None)  # a heartbeat reports it meanwhile
    assert [tokens == usual for tokens in found] == 2 * [False, False, False, False, True]
    assert min(found) >= 64


def test_without_an_objective_it_follows_from_the_models_speed() -> None:
    assert slices().itl == pytest.approx(3 * DEVICE.predict_seconds(StepShape(0, 0, 32, 32 * 2048)))


def combined(bench: PrefillBench, receiving: Any = None, sending: Any = None) -> CombinedScheduler:
    """A scheduler of an elastic node that keeps 20 ms a token, with nothing to decode."""
    config = SimpleNamespace(chunked_prefill_size=8192, max_running_requests=256)
    costs = CostModel()
    costs.cost = DEVICE
    core: Any = SimpleNamespace(costs=costs, memory=bench.memory, config=config)
    decode: Any = SimpleNamespace(plan_step=list, running=[], needs_memory=False)
    made = CombinedScheduler(core, bench.scheduler, decode, sending, receiving)
    assert made.slices is not None
    made.slices.wanted_itl = 0.02
    return made


@pytest.mark.parametrize(("max_tokens", "is_sliced"), [(1, False), (2, True)])
def test_a_step_behind_a_prompts_last_chunk_keeps_the_pace_of_its_answer(
    max_tokens: int, is_sliced: bool
) -> None:
    """The second token waits for the step that is planned ahead."""
    bench = PrefillBench(pages=4096)
    scheduler = combined(bench)
    bench.add(range(100), params={"max_tokens": max_tokens})
    (last_chunk,) = scheduler.plan_step()
    assert last_chunk.stop == 100
    bench.add(range(1000, 9000))
    (ahead,) = scheduler.plan_step()
    assert (ahead.stop < 1000) == is_sliced


@pytest.mark.parametrize(
    ("expected_in", "least", "most"),
    [(None, 0.035, 0.04), (0.05, 0.018, 0.02), (0.03, 0.009, 0.01), (-1.0, 0.018, 0.02)],
)
def test_a_step_before_an_answer_from_another_node_keeps_its_pace(
    expected_in: float | None, least: float, most: float
) -> None:
    """A step is twice as long as the objective while an answer may come at any time; it is as
    long as the objective if the answer is expected before such a long step is over, or long
    overdue, and shorter if it is expected in this step, for it waits for its rest and then for one
    of its own."""
    bench = PrefillBench(pages=4096)
    awaited = make_request(range(3000))

    def expected(seconds: float, late: float = math.inf) -> list[Any]:
        comes = expected_in is not None and -late <= expected_in < seconds
        return [awaited] if comes else []

    receiving: Any = SimpleNamespace(awaits_kv=True, iter_expected=expected)
    scheduler = combined(bench, receiving)
    bench.add(range(9000, 18000))
    (work,) = scheduler.plan_step()
    step = DEVICE.predict_seconds(StepShape(work.stop, chunk_pairs(0, work.stop)))
    beside = StepShape(streams=1, context=3000)
    if expected_in is not None:
        step = DEVICE.predict_seconds(
            beside._replace(tokens=work.stop, pairs=chunk_pairs(0, work.stop))
        )
    assert least < step <= most


def test_the_first_step_of_an_answer_from_another_node_is_short() -> None:
    receiving: Any = SimpleNamespace(awaits_kv=False, iter_expected=lambda *_: [])
    taken = []
    for produced, incoming, follows in (
        (1, True, None),
        (1, True, object()),
        (1, False, None),
        (2, True, None),
    ):
        bench = PrefillBench(pages=4096)
        scheduler = combined(bench, receiving)
        request = make_request(range(1000))
        request.incoming = SimpleNamespace() if incoming else None
        sequence = SimpleNamespace(request=request, num_output_tokens=produced, is_decoding=True)
        work = SimpleNamespace(
            sequence=sequence, start=1000, stop=1001, max_drafted=0, previous=follows
        )
        scheduler.decode = SimpleNamespace(
            plan_step=lambda w=work: [w], running=[], needs_memory=False
        )
        bench.add(range(9000, 18000))
        taken.append(sum(chunk.stop - chunk.start for chunk in scheduler.plan_step()[1:]))
    joining, second, here, later = taken
    assert joining < 0.85 * later
    assert second == here == later


def test_slices_are_shorter_beside_drafts_even_if_these_are_drafted_at_the_launch() -> None:
    taken = []
    drafted = DraftedTokens(torch.zeros(7, dtype=torch.int64))
    for draft, limit in ((None, 0), (Draft(drafted, 0, make_chain(7)), 0), (None, 7)):
        bench = PrefillBench(pages=4096)
        scheduler: Any = combined(bench)
        sequence: Any = SimpleNamespace(request=make_request(range(1000)), is_decoding=True)
        batch = [Work(sequence, 1000, 1001, draft=draft, draft_limit=limit) for _ in range(32)]
        scheduler.decode = SimpleNamespace(
            plan_step=lambda b=batch: b, running=[], needs_memory=False
        )
        bench.add(range(9000, 18000))
        taken.append(sum(work.stop - work.start for work in scheduler.plan_step()[32:]))
    without, ahead, at_launch = taken
    assert at_launch == ahead < without


def test_short_chunks_over_long_contexts_are_not_the_price_of_long_ones(seed: int) -> None:
    """A device whose attention takes twice as long for a pair in short chunks: what a node that
    computes mostly those learns still predicts long ones."""

    def seconds(shape: StepShape) -> float:
        price = 2e-9 if 0 < shape.tokens <= 512 else 1e-9
        return DEVICE.predict_seconds(shape._replace(pairs=0.0)) + price * shape.pairs

    rng = random.Random(seed)
    model = CostModel()
    for _ in range(600):
        tokens = rng.choice([128, 256, 512, 512, 2048, 8192])
        start = rng.randrange(0, 50_000)
        shape = StepShape(tokens, chunk_pairs(start, tokens))
        model.observe_step(shape, seconds(shape))
    model.fit()
    for tokens, start in ((300, 40_000), (8192, 40_000)):
        shape = StepShape(tokens, chunk_pairs(start, tokens))
        assert model.cost.predict_seconds(shape) == pytest.approx(seconds(shape), rel=0.1)


def test_peers_are_told_when_the_step_ends_in_which_a_prompt_is_computed() -> None:
    """A short prompt waits for what its step computes of a long one."""
    told: dict[int, float] = {}

    def tell(request: Any, seconds: float) -> None:
        told[len(request.prompt)] = seconds

    sending: Any = SimpleNamespace(start_sending=lambda request: None, tell_expected=tell)
    bench = PrefillBench(pages=4096)
    scheduler = combined(bench, sending=sending)
    bench.add(range(10_000, 18_500))
    bench.add(range(500))
    works = scheduler.plan_step(begins=lambda: 0.05)
    assert {len(work.sequence.request.prompt) for work in works} == {8500, 500}
    pairs = sum(chunk_pairs(work.start, work.stop - work.start) for work in works)
    ends = 0.05 + DEVICE.predict_seconds(StepShape(2048, pairs))
    assert told[500] == pytest.approx(ends)
    rest = DEVICE.prefill_seconds(2048 - 500, 8500 - (2048 - 500), 8192, StepShape())
    assert told[8500] == pytest.approx(ends + rest)


@pytest.mark.parametrize("first_runs", [False, True])
def test_what_waiting_prompts_share_is_queued_once(first_runs: bool) -> None:
    """A burst on a new system prompt computes that once."""
    bench = PrefillBench(pages=4096, page_size=4)
    scheduler = combined(bench)
    bench.add([*range(128), 900])
    if first_runs:
        scheduler.plan_step()
    for number in range(19):
        bench.add([*range(128), 1000 + number])
    tokens, _ = bench.scheduler.count_uncached()
    assert tokens == (0 if first_runs else 129) + 19
    bench.add(range(500, 600))
    assert bench.scheduler.count_uncached()[0] == tokens + 100
    assert bench.scheduler.count_queued() is None, "too many to be counted with each step"


def test_a_prompt_that_nobody_computed_is_queued_whole_when_it_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that left and asks again, on a node that is never idle."""
    monkeypatch.setattr("pd.scheduling.prefill._ABANDONED_SECONDS", 0.0)
    bench = PrefillBench(pages=4096, page_size=4)
    bench.add(range(100, 200))
    left = bench.add(range(1000, 1800))
    assert bench.scheduler.count_uncached()[0] == 900
    bench.scheduler.remove_request(left)
    bench.add(range(1000, 1800))
    assert bench.scheduler.count_uncached()[0] == 900
