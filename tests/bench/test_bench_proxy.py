"""``pd-bench proxy`` measures a real proxy in front of scripted nodes, and floors beside it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from pd.bench.proxy import Streamed, added_beside_texts, added_seconds, find_arrivals, rate_of_all
from pd.bench.proxy_apis import APIS
from pd.bench.proxy_load import random_prose
from pd.bench.serve_client import BenchCompletion
from pd.cli import bench
from pd.embedded import EMBEDDED_MODEL
from pd.proxy.text.tokenized_pieces import PieceEncoder

if TYPE_CHECKING:
    from pathlib import Path

SMALL = [
    "--rounds",
    "1",
    "--streams",
    "3",
    "--tokens",
    "6",
    "--step",
    "5",
    "--requests",
    "10",
    "--workers",
    "2",
]


@pytest.mark.full
def test_every_work_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "proxy.json"
    assert bench(["proxy", *SMALL, "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["results"]
    assert [(row["work"], row["system"]) for row in rows] == [
        ("request", "fastapi"),
        ("stream", "uvicorn"),
        ("stream", "transport"),
        ("request", "pd"),
        ("stream", "pd"),
        ("stream with ids", "pd"),
        ("chat", "pd"),
        ("/generate", "pd"),
        ("/generate, whole", "pd"),
        ("long text", "pd"),
        *(("api", name) for name in APIS),
        ("saturated requests", "pd"),
        ("saturated", "pd"),
        ("saturated requests", "pd"),
        ("saturated", "pd"),
    ]
    assert [row.get("workers") for row in rows[-4:]] == [None, None, 2, 2]
    apis = [row for row in rows if row["work"] == "api"]
    assert all(row["cpu_us_per_request"] > 0 and row["request_ratio"] > 0 for row in apis)
    rows = [row for row in rows if row["work"] != "api"]
    # The system counts processor time in hundredths of a second, and so small a stream takes less.
    assert all(row["cpu_us"] > 0 for row in rows if "request" in row["work"])
    assert all(row["cpu_us"] >= 0 for row in rows)
    for row in rows:
        assert row["cpu_us"] >= 0
        if "added_p50_ms" in row:
            assert 0 < row["added_p50_ms"] <= row["added_p99_ms"] <= row["added_max_ms"]
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + len(apis)


def test_each_api_limits_the_answer_and_has_the_same_text() -> None:
    ollama, anthropic = APIS["Ollama chat"], APIS["Anthropic"]
    assert ollama.make_body(7, stream=True)["options"] == {"temperature": 0, "num_predict": 7}
    assert "num_predict" not in ollama.fields["options"]
    lines = b'{"message": {"content": "a"}}\n{"message": {"content": "b"}, "done": true}\n'
    assert ollama.read_text(lines) == "ab"
    events = b'event: x\ndata: {"delta": {"text": "a"}}\n\nevent: ping\ndata: {"type": "ping"}\n\n'
    assert anthropic.read_text(events) == "a"


def streamed(times: list[float], counts: list[int], sent: list[float], begun: float) -> Streamed:
    answer = BenchCompletion(0.0, times=times, counts=counts)
    return Streamed([answer], ["r"], begun, 0.0, 1.0, 3, sent={"r_0": sent})


def test_tokens_of_one_event_were_sent_one_after_the_other() -> None:
    found = streamed([1.0, 3.0], [1, 2], [0.5, 1.5, 2.75], begun=0.0)
    assert added_seconds(found) == [0.5, 1.5, 0.25]


def test_an_event_that_is_counted_as_one_may_hold_more() -> None:
    sent = [1.0, 2.0, 3.0, 4.0, 5.0]
    first_holds_two = BenchCompletion(0.0, times=[2.1, 3.1, 4.1, 5.1], counts=[1] * 4)
    assert find_arrivals(first_holds_two, sent) == [2.1, 2.1, 3.1, 4.1, 5.1]
    third_holds_two = BenchCompletion(0.0, times=[1.1, 2.1, 4.1, 5.1], counts=[1] * 4)
    assert find_arrivals(third_holds_two, sent) == [1.1, 2.1, 4.1, 4.1, 5.1]
    all_at_once = BenchCompletion(0.0, times=[6.0], counts=[1])
    assert find_arrivals(all_at_once, sent) == [6.0] * 5


def test_tokens_that_were_sent_while_streams_began_do_not_count() -> None:
    assert added_seconds(streamed([9.0, 3.0], [1, 1], [0.5, 2.75], begun=1.0)) == [0.25]
    assert added_seconds(streamed([9.0], [1], [0.5], begun=1.0)) == [8.5]


def test_tokens_that_were_sent_while_a_text_was_under_way_are_told_apart() -> None:
    found = streamed([1.0, 3.0, 5.0], [1, 1, 1], [0.5, 2.5, 4.75], begun=0.0)
    found.text_spans = [(0.6, 2.4), (2.45, 2.6), (4.0, 4.5)]
    assert added_beside_texts(found) == [0.5]


def test_hardly_a_piece_of_a_long_text_is_one_of_another() -> None:
    """Otherwise tokens of pieces that the proxy keeps would be measured."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    encoder = PieceEncoder.from_tokenizer(tokenizer)
    assert encoder is not None
    for seed in range(3):
        text = random_prose(seed, 100_000)
        assert len(text) == 100_000
        assert encoder.encode(text, "", 1 << 20, add_special_tokens=True) is not None
    assert encoder.found == 0


def test_a_saturated_proxy_is_judged_while_all_streams_run() -> None:
    early = BenchCompletion(0.0, times=[1.0, 2.0, 3.0], counts=[1] * 3, characters=[4] * 3)
    late = BenchCompletion(0.0, times=[1.5, 9.0], counts=[1] * 2, characters=[16, 4])
    found = Streamed([early, late], ["early", "late"], 1.5, 0.0, 10.0, 8)
    # From 1.5 until 3.0: 20 characters of 32.
    assert rate_of_all(found) == pytest.approx(5 / 1.5)
    found.begun_at = 4.0
    assert rate_of_all(found) == 0.8


def test_only_what_is_asked_for_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "proxy.json"
    assert bench(["proxy", *SMALL, "--work", "saturated", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["results"]
    assert [(row["work"], row.get("workers")) for row in rows] == [
        ("saturated requests", None),
        ("saturated", None),
        ("saturated requests", 2),
        ("saturated", 2),
    ]


@pytest.mark.parametrize(
    "flag", ["--streams", "--tokens", "--requests", "--rounds", "--step", "--workers", "--clients"]
)
def test_nothing_to_measure_is_an_error(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["proxy", flag, "0"]) == 2
    assert "must be above 0" in capsys.readouterr().err
