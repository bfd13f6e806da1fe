"""`pd-bench radix` runs, measures what it says and reports where it came from."""

import json
import os
from pathlib import Path

import pytest

from pd import cli
from pd.bench import radix
from pd.radix import EVICTION_POLICIES

TRACE = [
    {"input_length": 1100, "hash_ids": [0, 1, 2]},
    {"input_length": 1024, "hash_ids": [3, 4]},
    {"input_length": 1040, "hash_ids": [0, 1, 5]},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TRACE))
    return path


def bench(*flags: str) -> int:
    small = ["--rounds", "1", "--prompt-tokens", "1024", "--leaves", "50"]
    return cli.bench(["radix", *small, *flags])


def test_expands_hash_ids_to_distinct_blocks_and_cuts_the_last(trace: Path) -> None:
    first, second, third = radix.load_prompts(trace)
    assert [len(first), len(second), len(third)] == [1100, 1024, 1040]
    assert first[:1024].tolist() == third[:1024].tolist()
    assert len({*first.tolist(), *second.tolist(), *third.tolist()}) == 1100 + 1024 + 16


def test_expands_ids_of_any_size_and_leaves_torn_lines_out(
    trace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    large = [{**row, "hash_ids": [(1 << 53) - 1 - i for i in row["hash_ids"]]} for row in TRACE]
    small = radix.load_prompts(trace)
    lines = [json.dumps(row) for row in large]
    trace.write_text("\n".join([lines[0], lines[0][:20], *lines[1:], ""]))
    assert [prompt.tolist() for prompt in radix.load_prompts(trace)] == [p.tolist() for p in small]
    assert "1 line is not JSON and skipped, line 2 first" in caplog.text


def test_writes_every_result_with_command_commit_machine_and_date(
    trace: Path, tmp_path: Path
) -> None:
    output = tmp_path / "radix.json"
    bench("--trace", str(trace), "--output", str(output))
    report = json.loads(output.read_text())
    assert {"command", "commit", "machine", "date", "results"} == set(report)
    assert {"cpu", "cores", "python"} <= set(report["machine"])
    replays = [row for row in report["results"] if row["name"].startswith("trace")]
    assert len(replays) == 3 * len(EVICTION_POLICIES)
    assert all(row["hit_rate"] == 1024 / (1100 + 1024 + 1040) for row in replays)


def test_says_why_the_trace_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bench()
    assert "trace replay skipped" in capsys.readouterr().out


@pytest.fixture
def missed_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that the bars are for, and one that cannot be met with the small sizes here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(radix, "describe_machine", lambda: {"cpu": radix.BAR_CPU})
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(radix, "BAR_PROMPT_TOKENS", 1024)
    monkeypatch.setattr(radix, "MATCH_BAR_US", 0.0)
    monkeypatch.setattr(radix, "INSERT_BAR_US", float("inf"))


def test_exit_status_tells_of_a_missed_bar(
    missed_bar: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench() == 1
    shown = capsys.readouterr().out
    assert shown.count("MISSED") == 2
    assert "no bar is judged" not in shown


@pytest.mark.parametrize(
    ("owner", "name", "value", "reason"),
    [
        pytest.param(
            *(
                radix,
                "describe_machine",
                lambda: {"cpu": "Z80"},
                "the bars were set on AMD EPYC, this is Z80",
            ),
            id="another processor",
            marks=pytest.mark.full,
        ),
        pytest.param(
            *(
                os,
                "getloadavg",
                lambda: (1.25, 0, 0),
                "other work runs on this machine (load averag",
            ),
            id="other work",
        ),
        pytest.param(
            radix, "BAR_PROMPT_TOKENS", 16384, "", id="other sizes", marks=pytest.mark.full
        ),
    ],
)
def test_nothing_is_judged_where_the_bars_do_not_hold(
    owner: object,
    name: str,
    value: object,
    reason: str,
    missed_bar: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(owner, name, value)
    assert bench() == 0
    shown = capsys.readouterr().out
    assert "MISSED" not in shown
    assert (f"no bar is judged: {reason}" in shown) == bool(reason)


@pytest.mark.parametrize("flags", [("--rounds", "0"), ("--trace", "/no/such/file")])
def test_refuses_unusable_arguments_by_name(
    flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*flags) == 2
    assert " ".join(flags) in capsys.readouterr().err
