"""Datasets are drawn from a seed; traces keep what their rows share, whatever the scale."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd.bench.load.arrivals import Arrivals
from pd.bench.load.datasets.spec import NAMES, DatasetSpec, TraceSpec
from pd.bench.load.datasets.synthetic import read_schemas
from pd.bench.load.draw import draw_sessions, draw_warm_up
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from pd.bench.load.workload import Session

BLOCK = 512


def draw(spec: DatasetSpec, seed: int = 1, **settings: Any) -> list[Session]:
    return draw_sessions(spec, settings.pop("arrivals", None), seed=seed, **settings)[0]


def shared(first: list[int], second: list[int]) -> int:
    """Tokens of the common prefix."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def write_trace(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(at: int, length: int, ids: list[int], out: int = 10) -> dict[str, Any]:
    return {"timestamp": at, "input_length": length, "output_length": out, "hash_ids": ids}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("jsonl", "trace")])
def test_same_seed_same_requests(name) -> None:
    spec = DatasetSpec(name, count=5, input_len=20, output_len=8, prefix_len=12, think_time=1.0)
    assert draw(spec, 3) == draw(spec, 3)
    assert draw(spec, 3) != draw(spec, 4)


def test_lengths_are_uniform_in_their_range() -> None:
    spec = DatasetSpec(count=2000, input_len=100, output_len=10, range_ratio=0.5)
    turns = [session.turns[0] for session in draw(spec)]
    lengths = [turn.num_tokens for turn in turns]
    assert all(len(turn.prompt) == turn.num_tokens for turn in turns)
    assert (min(lengths), max(lengths)) == (50, 150)
    assert sum(lengths) / len(lengths) == pytest.approx(100, rel=0.05)
    assert {turn.max_tokens for turn in turns} == set(range(5, 16))


def test_shared_prefixes_are_shared_by_their_group_alone() -> None:
    spec = DatasetSpec("shared-prefix", count=60, num_prefixes=3, prefix_len=40, input_len=20)
    prompts = [session.turns[0].prompt for session in draw(spec)]
    groups = {tuple(prompt[:40]) for prompt in prompts}
    assert len(groups) == 3
    assert len({tuple(prompt[:45]) for prompt in prompts}) == 60


def test_words_of_equal_ids_are_equal_words() -> None:
    spec = DatasetSpec("shared-prefix", count=30, num_prefixes=2, prefix_len=40, as_text=True)
    prompts = [session.turns[0].prompt.split() for session in draw(spec)]
    assert len({tuple(prompt[:40]) for prompt in prompts}) == 2


def test_sessions_have_their_turns_and_times_to_think() -> None:
    spec = DatasetSpec("multi-turn", count=200, turns=4, turn_len=16, input_len=50, think_time=2.0)
    sessions = draw(spec)
    assert {len(session.turns) for session in sessions} == {4}
    assert {session.turns[0].think_time for session in sessions} == {0.0}
    waits = [turn.think_time for session in sessions for turn in session.turns[1:]]
    assert sum(waits) / len(waits) == pytest.approx(2.0, rel=0.2)


def test_what_the_context_does_not_hold_is_refused() -> None:
    spec = DatasetSpec("multi-turn", count=2, input_len=90, turn_len=5, output_len=10, context=140)
    with pytest.raises(UsageError, match=r"a session of 145 tokens does not fit .* of 140"):
        draw(spec)


def test_clients_that_hang_up_are_as_many_as_was_asked() -> None:
    spec = DatasetSpec(count=4000, input_len=1, output_len=1)
    delays = [session.cancel_after for session in draw(spec, cancel_rate=0.25, cancel_delay=2.0)]
    given_up = [delay for delay in delays if delay is not None]
    assert len(given_up) / len(delays) == pytest.approx(0.25, abs=0.03)
    assert 0 <= min(given_up) < max(given_up) <= 2.0
    assert sum(given_up) / len(given_up) == pytest.approx(1.0, rel=0.1)


# ---- traces


@given(
    lengths=st.lists(st.integers(1, 4 * BLOCK), min_size=2, max_size=6),
    common=st.integers(0, 4),
    block=st.sampled_from([1, 16, 128, 512, 1024]),
)
def test_prompts_share_the_blocks_that_their_rows_share(
    tmp_path_factory, lengths, common, block
) -> None:
    blocks = [-(-length // BLOCK) for length in lengths]
    # Ids below 100 are common, in order; the others belong to one row.
    ids = [
        [i if i < common else 100 * (number + 1) + i for i in range(count)]
        for number, count in enumerate(blocks)
    ]
    rows = [row(0, length, own) for length, own in zip(lengths, ids, strict=True)]
    path = write_trace(tmp_path_factory.mktemp("trace") / "t.jsonl", rows)
    scale = TraceSpec(length_scale=f"{block}/{BLOCK}")
    # Two separate blocks begin with the same one of so many ids by chance only.
    spec = DatasetSpec("trace", path=path, trace=scale, vocab_size=1 << 30)
    prompts = [session.turns[0].prompt for session in draw(spec)]
    for prompt, count in zip(prompts, blocks, strict=True):
        assert -(-len(prompt) // block) == count
    for first, second, a, b in zip(prompts, prompts[1:], ids, ids[1:], strict=False):
        expected = shared(a, b) * block
        assert shared(first, second) == min(expected, len(first), len(second))


def test_a_window_and_a_time_scale_of_a_trace(tmp_path) -> None:
    rows = [row(5_000 + 1000 * i, 10, [i]) for i in range(10)]
    path = write_trace(tmp_path / "t.jsonl", rows)
    trace = TraceSpec(window=(2.0, 5.0), time_scale=0.5)
    sessions = draw(DatasetSpec("trace", path=path, trace=trace))
    assert [session.arrival for session in sessions] == [0.0, 0.5, 1.0]


def test_spread_arrivals_stay_within_the_step_of_the_recorders_clock(tmp_path) -> None:
    rows = [row(3000 * (i // 50), 10, [i]) for i in range(500)]
    path = write_trace(tmp_path / "t.jsonl", rows)
    spec = DatasetSpec("trace", path=path, trace=TraceSpec(arrivals="spread"))
    sessions, notes = draw_sessions(spec, None, seed=1)
    assert notes["trace_granularity_ms"] == 3000
    times = [session.arrival for session in sessions]
    assert times == sorted(times)
    for number, at in enumerate(times):
        assert 3 * (number // 50) <= at < 3 * (number // 50) + 3
    assert len(set(times)) == 500


def test_rows_that_do_not_fit_are_dropped_and_counted_or_refused(tmp_path) -> None:
    rows = [row(0, 100, [1]), row(1, 1000, [2, 3]), row(2, 200, [4])]
    path = write_trace(tmp_path / "t.jsonl", rows)
    spec = DatasetSpec("trace", path=path, context=500)
    sessions, notes = draw_sessions(spec, None, seed=1)
    assert [session.turns[0].num_tokens for session in sessions] == [100, 200]
    assert (notes["trace_rows"], notes["trace_rows_too_long"]) == (3, 1)
    strict = DatasetSpec("trace", path=path, context=500, trace=TraceSpec(too_long="error"))
    with pytest.raises(UsageError, match=r"1000 \+ 10 tokens makes 1010; .* context is 500"):
        draw(strict)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("[1]", r"t.jsonl:2 must be a JSON object"),
        (json.dumps(row(-1, 10, [1])), "timestamp must be an integer from 0, not -1"),
        (json.dumps(row(0, 10, [1, 2])), "10 tokens are 1 blocks of 512, and there are 2 hash_ids"),
        (json.dumps(row(0, 10, ["a"])), "hash_ids must be a list of integers"),
        (json.dumps({"timestamp": 0}), "input_length must be an integer from 1, not None"),
    ],
)
def test_rows_that_are_none_are_named(tmp_path, bad, complaint) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(row(0, 10, [1])) + "\n" + bad + "\n")
    with pytest.raises(UsageError, match=complaint):
        draw(DatasetSpec("trace", path=path))


def test_torn_lines_of_a_trace_are_left_out_and_counted_in_one_warning(tmp_path, caplog) -> None:
    path = tmp_path / "t.jsonl"
    lines = [json.dumps(row(i, 10, [i])) for i in range(3)]
    torn = lines[0][:30]
    path.write_text("\n".join([lines[0], torn, "", lines[1], torn + lines[0], lines[2], ""]))
    assert len(draw(DatasetSpec("trace", path=path))) == 3
    (record,) = caplog.records
    assert record.getMessage() == f"{path}: 2 lines are not JSON and skipped, line 2 first"


@pytest.mark.parametrize("scale", ["1/1000", "0", "x", "1/0", "-1"])
def test_scales_that_break_blocks_are_refused(tmp_path, scale) -> None:
    path = write_trace(tmp_path / "t.jsonl", [row(0, 10, [1])])
    with pytest.raises(UsageError, match="--trace-length-scale"):
        draw(DatasetSpec("trace", path=path, trace=TraceSpec(length_scale=scale)))


def test_a_rate_takes_the_place_of_recorded_times(tmp_path) -> None:
    path = write_trace(tmp_path / "t.jsonl", [row(i, 10, [i]) for i in range(4)])
    sessions = draw(DatasetSpec("trace", path=path), arrivals=Arrivals(2.0, float("inf")))
    assert [session.arrival for session in sessions] == [0.5, 1.0, 1.5, 2.0]


# ---- jsonl


def test_lines_of_several_harnesses_are_understood(tmp_path) -> None:
    path = tmp_path / "r.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "a b", "max_tokens": 3},
        {"text": "c", "output_len": 4},
        {"input_ids": [1, 2, 3], "output_tokens": 5},
        {"messages": [{"role": "user", "content": "d"}]},
        {"custom_id": "x", "body": {"prompt": [7], "max_tokens": 6, "top_p": 0.5, "model": "m"}},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    turns = [s.turns[0] for s in draw(DatasetSpec("jsonl", path=path, output_len=9))]
    assert [turn.max_tokens for turn in turns] == [3, 4, 5, 9, 6]
    assert [turn.prompt for turn in turns[:3]] == ["a b", "c", [1, 2, 3]]
    assert turns[4].extra == {"top_p": 0.5}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ({"max_tokens": 3}, "must have one of prompt"),
        ({"prompt": "a", "text": "b"}, "must have one of prompt"),
        ({"prompt": ""}, "prompt must be text or a list of token ids"),
        ({"input_ids": [1, True]}, "input_ids must be text or a list of token ids"),
        ({"messages": ["hello"]}, "messages must be a list of objects"),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens must be a number"),
    ],
)
def test_lines_that_cannot_be_sent_are_named(tmp_path, line, complaint) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(line))
    with pytest.raises(UsageError, match=f"r.jsonl:1.*{complaint}"):
        draw(DatasetSpec("jsonl", path=path))


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_a_request_is_named(tmp_path, text) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"r.jsonl has no requests: all its lines are bl"):
        draw(DatasetSpec("jsonl", path=path))


def lines_of(sessions: list[Session]) -> list[int]:
    """Which lines, from 0, of a file whose prompts are their numbers."""
    return [int(session.turns[0].prompt[0]) for session in sessions]


def test_a_warm_up_asks_lines_that_the_run_does_not_measure(tmp_path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(
        "".join(json.dumps({"input_ids": [n], "timestamp": n}) + "\n" for n in range(8))
    )
    spec = DatasetSpec("jsonl", path=path, count=5)
    assert lines_of(draw(spec)) == [0, 1, 2, 3, 4]
    sessions, notes = draw_warm_up(spec, 3, seed=1, measured=5)
    assert (lines_of(sessions), notes) == ([5, 6, 7], {})
    sessions, notes = draw_warm_up(spec, 4, seed=1, measured=5)
    assert lines_of(sessions) == [4, 5, 6, 7]
    assert notes == {"warm_up_lines_that_are_measured": 1}
    sessions, notes = draw_warm_up(spec, 20, seed=1, measured=8)
    assert (lines_of(sessions), notes) == (list(range(8)), {"warm_up_lines_that_are_measured": 8})


def test_a_warm_up_has_prompts_of_another_seed() -> None:
    spec = DatasetSpec(count=5, input_len=20)
    sessions, notes = draw_warm_up(spec, 3, seed=1, measured=5)
    assert (len(sessions), notes) == (3, {})
    measured = [session.turns[0].prompt for session in draw(spec, 1)]
    assert all(session.turns[0].prompt not in measured for session in sessions)


def test_files_of_schemas_that_are_none_are_named(tmp_path) -> None:
    path = tmp_path / "schemas.jsonl"
    with pytest.raises(UsageError, match=r"schemas.jsonl cannot be read"):
        read_schemas(path)
    path.write_text("")
    with pytest.raises(UsageError, match=r"schemas.jsonl has no schema"):
        read_schemas(path)
    path.write_text('{"type": "object"}\n[]\n')
    with pytest.raises(UsageError, match=r"schemas.jsonl:2 must be a JSON object"):
        read_schemas(path)


def test_lines_with_timestamps_arrive_then(tmp_path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "timestamp": t}) + "\n" for t in (900, 400)))
    assert [s.arrival for s in draw(DatasetSpec("jsonl", path=path))] == [0.0, 0.5]
