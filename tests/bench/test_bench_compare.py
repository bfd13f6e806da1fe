"""``pd-bench compare``: verdicts follow from pairs, and two trees are measured in turn."""

from __future__ import annotations

import json
import random
import subprocess
from math import comb
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

from pd.bench.load.goodput import Objectives, count_good
from pd.bench.load.measures import summarize_records
from pd.bench.load.records import Record
from pd.bench.paired import CONFIDENCE, Measure, compare_runs, is_better_if_less, median_interval
from pd.cli import bench

if TYPE_CHECKING:
    from pathlib import Path

Row = dict[str, Any]


def runs(name: str, values: list[float], **row: object) -> list[list[Row]]:
    return [[{**row, name: value}] for value in values]


def verdict(name: str, before: list[float], after: list[float], **row: object) -> str:
    (found,) = compare_runs(runs(name, before, **row), runs(name, after, **row))
    return found.verdict


STEADY = [10.0, 10.1, 9.9, 10.0, 10.2, 9.8, 10.0]


@pytest.mark.parametrize(
    ("name", "factor", "expected"),
    [
        ("p50_ms", 1.1, "slower"),
        ("p50_ms", 0.9, "faster"),
        ("tokens_per_s", 1.1, "faster"),
        ("gb_s", 0.9, "slower"),
        ("p50_ms", 1.005, "same"),
        ("p50_ms", 1.0, "equal"),
        ("temperature", 1.1, "changed"),
    ],
)
def test_a_steady_change_has_a_verdict(name: str, factor: float, expected: str) -> None:
    assert verdict(name, STEADY, [factor * value for value in STEADY]) == expected


def test_noise_larger_than_the_change_is_unclear() -> None:
    noisy = [8.0, 12.0, 9.0, 11.5, 8.5, 12.5, 10.0]
    assert verdict("p50_ms", noisy, noisy[::-1]) == "unclear"


def test_pairs_cancel_noise_that_hits_both() -> None:
    """The machine's speed changes by half from pair to pair, the versions differ by 5 %."""
    speed = [1.0, 1.5, 0.8, 1.2, 1.0, 0.9, 1.4]
    assert verdict("p50_ms", [10 * s for s in speed], [10.5 * s for s in speed]) == "slower"


def test_few_pairs_prove_nothing() -> None:
    assert verdict("p50_ms", [10.0] * 4, [20.0] * 4) == "unclear"


def test_a_row_names_the_unit_of_its_numbers() -> None:
    assert verdict("best", STEADY, [2 * v for v in STEADY], unit="us") == "slower"
    assert verdict("best", STEADY, [2 * v for v in STEADY], unit="output tokens/s") == "faster"


@pytest.mark.parametrize("name", ["p99.9_ms", "layer_us", "seconds", "noticed_s", "passes"])
def test_times_and_passes_are_better_if_less(name: str) -> None:
    assert is_better_if_less(Measure((), 0, name)) is True


@pytest.mark.parametrize(
    "name", ["tokens_per_s", "best_gb_s", "tflop_s", "speedup", "hit_rate", "tokens_per_s_per_gpu"]
)
def test_rates_are_better_if_more(name: str) -> None:
    assert is_better_if_less(Measure((), 0, name)) is False


@pytest.mark.parametrize("count", range(1, 40))
def test_intervals_cover_the_median_as_often_as_they_say(count: int) -> None:
    values = [random.random() for _ in range(count)]
    found = median_interval(values)
    if found is None:
        assert count < 5
        return
    low, high = found
    place = sorted(values).index(low)
    assert low <= median(values) <= high
    assert sorted(values)[count - 1 - place] == high
    covered = 1 - 2 * sum(comb(count, i) for i in range(place + 1)) / 2**count
    assert covered >= CONFIDENCE
    # One value further inwards would be too narrow.
    narrower = 1 - 2 * sum(comb(count, i) for i in range(place + 2)) / 2**count
    assert narrower < CONFIDENCE


def test_rows_are_matched_by_what_they_are_of() -> None:
    """Texts, and integers that never differ, tell rows apart; numbers that do are measured."""
    before = [[{"work": "a", "batch": 1, "count": 7 + i, "p50_ms": 1.0}] * 2 for i in range(5)]
    after = [[{"work": "a", "batch": 1, "count": 9 - i, "p50_ms": 2.0}] * 2 for i in range(5)]
    found = compare_runs(before, after)
    assert [(each.measure.occurrence, each.measure.name) for each in found] == [
        (0, "count"),
        (0, "p50_ms"),
        (1, "count"),
        (1, "p50_ms"),
    ]
    assert found[1].measure.row == (("work", "a"), ("batch", 1))
    assert [each.verdict for each in found] == ["changed", "slower"] * 2


def test_a_measure_that_a_run_lacks_is_left_out() -> None:
    before = [[{"work": "a", "p50_ms": 1.0, "p99_ms": 2.0}]] * 5
    after = [*before[:4], [{"work": "a", "p50_ms": 1.0, "p99_ms": None}]]
    assert [each.measure.name for each in compare_runs(before, after)] == ["p50_ms"]


@pytest.mark.parametrize(
    ("name", "before", "after", "expected"),
    [
        ("failed", [0.0] * 7, [100.0] * 7, "slower"),
        ("failed", [0.0] * 6 + [3.0], [100.0] * 7, "slower"),
        ("failed", [100.0] * 7, [0.0] * 7, "faster"),
        ("hits", [0.0] * 7, [100.0] * 7, "faster"),
        ("failed", [0.0] * 7, [0.0] * 6 + [1.0], "unclear"),
        ("failed", [0.0] * 7, [0.0] * 7, "equal"),
        ("failed", [0.0] * 4, [100.0] * 4, "unclear"),
    ],
)
def test_something_where_there_was_nothing_is_infinitely_more(
    name: str, before: list[float], after: list[float], expected: str
) -> None:
    assert verdict(name, before, after) == expected


def test_nothing_twice_is_as_much() -> None:
    (found,) = compare_runs(runs("errors", [0.0] * 5), runs("errors", [0.0] * 4 + [1.0]))
    assert (found.ratio, found.low, found.high) == (1.0, 1.0, float("inf"))


# ---- the command


def write(path: Path, value: float, name: str = "p50_ms") -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"results": [{"work": "w", name: value}]}))


def test_directories_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, value in enumerate(STEADY):
        write(tmp_path / "a" / f"{number}.json", value)
        write(tmp_path / "b" / f"{number}.json", 1.2 * value)
    command = ["compare", str(tmp_path / "a"), str(tmp_path / "b")]
    assert bench(command) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "slower"
    assert bench([*command, "--fail-on-slower"]) == 1
    assert bench([*command, "--fail-on-slower", "--margin", "0.3"]) == 0


def test_failures_where_there_were_none_fail_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(7):
        for name, failed in (("a", 0), ("b", 2000 + number)):
            write(tmp_path / name / f"{number}.json", failed, "failed")
    command = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--fail-on-slower"]
    assert bench(command) == 1
    assert capsys.readouterr().out.splitlines()[1].split()[-5:] == [
        "inf", "inf", "…", "inf", "slower",
    ]  # fmt: skip


def test_two_files_have_ratios_and_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a.json", 2.0)
    write(tmp_path / "b.json", 3.0)
    assert bench(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    out = capsys.readouterr().out
    assert "1.500" in out
    assert "unclear" in out
    assert "1 pairs prove nothing; give 5 or more" in out


def loaded(
    directory: Path,
    ttft: float,
    *,
    valid: bool = True,
    dataset: str = "random",
    **fields: object,
) -> Path:
    """The directory of a run under load: two answers, and a failed request."""
    times = [ttft, ttft + 0.01, ttft + 0.04]
    answer = Record(
        session=0, first=times[0], second=times[1], last=times[2], end=times[2], times=times,
        output_tokens=3, prompt_tokens=100, cached_tokens=10, stages={"queue": 0.001},
    )  # fmt: skip
    records = [answer, answer, Record(session=1, status="error", end=0.1)]
    goodput = count_good(records, Objectives.parse("ttft:1s"))
    directory.mkdir(parents=True)
    found = {
        "valid": valid,
        "settings": {"dataset": {"name": dataset}},
        "measures": summarize_records(records, goodput, gpus=2),
        **fields,
    }
    (directory / "summary.json").write_text(json.dumps(found))
    (directory / "bench.json").write_text("{}")
    return directory


def test_runs_under_load_are_compared_by_their_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(5):
        loaded(tmp_path / "a" / str(number), 0.1)
        loaded(tmp_path / "b" / str(number), 0.2)
    assert bench(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert {line[0] for line in lines} == {"random"}
    found = {line[1]: line[-1] for line in lines}
    assert found["ttft_p50_ms"] == "slower"
    assert found["output_tokens_per_s_per_gpu"] == "slower"
    assert found["stage_queue_p99_ms"] == found["failed"] == found["goodput_share"] == "equal"
    assert "changed" not in found.values(), "each measure says which way is better"


def test_two_runs_under_load_by_their_directory_or_their_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = loaded(tmp_path / "one", 0.1), loaded(tmp_path / "other", 0.2)
    assert bench(["compare", str(one), str(other / "summary.json")]) == 0
    assert "2.000" in capsys.readouterr().out
    trace = loaded(tmp_path / "trace", 0.1, dataset="trace")
    assert bench(["compare", str(one), str(trace)]) == 2
    assert "they are of different benchmarks" in capsys.readouterr().err
    void = loaded(tmp_path / "void", 0.1, valid=False)
    assert bench(["compare", str(one), str(void)]) == 2
    assert "the client limited this run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"interrupted": True}, "is of a part of a run: it was ended before its time"),
        (
            {"interrupted": True, "notes": {"records_missing_from": ["a/0", "b/1"]}},
            "is of a part of a run: records of load process a/0, b/1 are missing",
        ),
    ],
)
def test_a_part_of_a_run_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], message: str
) -> None:
    one = loaded(tmp_path / "one", 0.1, interrupted=False, notes={"model": "m"})
    part = loaded(tmp_path / "part", 0.1, **fields)
    assert bench(["compare", str(one), str(part)]) == 2
    assert f"{part / 'summary.json'} {message}" in capsys.readouterr().err
    assert bench(["compare", str(one), str(one)]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give BEFORE and AFTER, or --against; 0 names were given"),
        (["missing.json", "missing.json"], "cannot read missing.json: No such file"),
        (["--against", "HEAD"], "--against needs a benchmark after --"),
        (["--against", "no-such-commit", "--", "radix"], "--against no-such-commit: "),
        (["a", "b", "--margin", "2"], "--margin must be at least 0 and below 1, not 2"),
        (["--against", "HEAD", "--pairs", "0", "--", "radix"], "--pairs must be at least 1, not 0"),
    ],
)
def test_errors_say_what_to_do(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_results_are_not_kept_beside_those_of_an_earlier_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All result files of a directory make pairs."""
    write(tmp_path / "before" / "007.json", 1.0)
    measured = ["--", "radix", "--rounds", "1", "--leaves", "100"]
    command = ["compare", "--against", "HEAD", "--pairs", "1", "--keep"]
    assert bench([*command, str(tmp_path), *measured]) == 2
    error = capsys.readouterr().err
    assert f"--keep {tmp_path}: the directory is not empty, it has before" in error
    file = tmp_path / "before" / "007.json"
    assert bench([*command, str(file), *measured]) == 2
    assert f"--keep {file}: Not a directory" in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": 5}', '{"results": [1]}'])
def test_files_that_are_no_results_are_named(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    assert bench(["compare", str(file), str(file)]) == 2
    assert str(file) in capsys.readouterr().err


def test_the_other_commit_and_this_tree_run_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    command = ["compare", "--against", "HEAD", "--pairs", "2", "--keep", str(kept), "--"]
    assert bench([*command, "radix", "--rounds", "1", "--leaves", "100"]) == 0
    captured = capsys.readouterr()
    order = [line.split(": ")[1] for line in captured.err.splitlines()]
    assert order == ["before", "after", "after", "before"]
    assert "match 16384 cached tokens" in captured.out
    assert len(list(kept.glob("*/*.json"))) == 4
    listed = subprocess.run(
        ["git", "worktree", "list"], capture_output=True, text=True, check=True
    ).stdout
    assert "pd-compare-" not in listed
