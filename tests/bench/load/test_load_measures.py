"""Measures, goodput and other harnesses' files against records made by hand."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from pd import cli
from pd.bench.load.aiperf import aiperf_summary, read_aiperf_records, write_aiperf_records
from pd.bench.load.client_checks import ClientLimits, client_complaints, client_facts
from pd.bench.load.client_load import ProcessLoad
from pd.bench.load.exports import bench_details, bench_keys
from pd.bench.load.goodput import Objectives, count_good
from pd.bench.load.measure import LoadResult
from pd.bench.load.measures import summarize_records
from pd.bench.load.processes import Run
from pd.bench.load.records import Record, read_records, second_token_time, write_records
from pd.bench.load.results import write_bench_file
from pd.bench.load.server_metrics import metrics_between, parse_metrics, read_metrics
from pd.core.errors import UsageError


def record(
    sent: float = 0.0, *, after: list[float], tokens: list[int] | None = None, **fields: Any
) -> Record:
    """A whole answer whose events came so long after it was sent."""
    times, tokens = [sent + each for each in after], tokens or [1] * len(after)
    made = Record(
        session=0,
        sent=sent,
        due=sent,
        first=times[0],
        second=second_token_time(times, tokens),
        last=times[-1],
        end=times[-1],
        times=times,
        tokens=tokens,
        output_tokens=sum(tokens),
        planned_prompt_tokens=100,
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def failed(sent: float, kind: str = "http 429") -> Record:
    return Record(session=1, sent=sent, status="error", error_kind=kind, error="x", end=sent + 0.5)


FIRST = record(0.0, after=[0.1, 0.2, 0.4], prompt_tokens=120, cached_tokens=60)
SECOND = record(1.0, after=[0.3, 0.9], tokens=[2, 2], prompt_tokens=80, cached_tokens=0)


def test_latencies_of_records() -> None:
    found = summarize_records([FIRST, SECOND, failed(1.5)])
    assert found["ttft_ms"]["mean"] == pytest.approx(200)
    assert found["ttft_ms"]["max"] == pytest.approx(300)
    # The second token of SECOND came with its first one.
    assert found["second_token_ms"]["mean"] == pytest.approx((100 + 0) / 2)
    # Every gap between events: 0.1 and 0.2, and 0.6.
    assert (found["itl_ms"]["count"], found["itl_ms"]["p50"]) == (3, pytest.approx(200))
    # (0.4 - 0.1) / 2 and (0.9 - 0.3) / 3.
    assert found["tpot_ms"]["mean"] == pytest.approx((150 + 200) / 2)
    assert found["e2e_ms"]["max"] == pytest.approx(900)
    assert found["tokens_per_event"] == pytest.approx(7 / 5)
    assert found["cached_share"] == pytest.approx(60 / 200)


def test_throughput_counts_whole_answers_until_the_last_byte() -> None:
    found = summarize_records([FIRST, SECOND, failed(1.6)], gpus=2)
    assert found["duration_s"] == pytest.approx(2.1)
    assert found["requests_per_s"] == pytest.approx(2 / 2.1, rel=1e-5)
    assert found["output_tokens_per_s"] == pytest.approx(7 / 2.1, rel=1e-5)
    assert found["tokens_per_s_per_gpu"] == pytest.approx(207 / 2.1 / 2, rel=1e-4)
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, {"http 429": 1})


def test_percentiles_are_those_of_their_names() -> None:
    found = summarize_records([record(after=[n / 1000]) for n in range(1, 1002)])["ttft_ms"]
    assert [found[name] for name in ("p50", "p90", "p99", "p99.9")] == pytest.approx(
        [501, 901, 991, 1000]
    )


def test_nothing_is_nothing_not_zero() -> None:
    found = summarize_records([failed(0.0)])
    assert found["ttft_ms"] == {"count": 0, **dict.fromkeys(list(found["ttft_ms"])[1:])}
    assert found["cached_share"] is None
    assert found["completed"] == 0


def test_stages_are_distributions() -> None:
    found = summarize_records(
        [record(after=[0.1], stages={"prefill": s, "queue": 0.0}) for s in (1, 3)]
    )
    assert found["stages_ms"]["prefill"]["mean"] == pytest.approx(2000)


# ---- goodput


def test_a_long_prompt_has_more_time_than_a_short_one() -> None:
    objectives = Objectives.parse("ttft:1s+40us")
    assert objectives.ttft_limit(30_000) == pytest.approx(2.2)
    slow = {"after": [1.5]}
    assert objectives.find_missed(record(**slow, prompt_tokens=30_000)) == []
    assert objectives.find_missed(record(**slow, prompt_tokens=100)) == ["ttft"]


@pytest.mark.parametrize(
    ("text", "missed"),
    [
        ("ttft:99", ["ttft"]),
        ("ttft:101", []),
        ("tpot:149", ["tpot"]),
        ("tpot:151", []),
        ("itl:199", ["itl"]),
        ("itl:201ms", []),
        ("e2el:399 ttft:1s", ["e2el"]),
        ("e2el:.5s,itl:1000us", ["itl"]),
    ],
)
def test_objectives_limit_what_they_name(text, missed) -> None:
    assert Objectives.parse(text).find_missed(FIRST) == missed


def test_errors_are_not_good_and_clients_that_left_do_not_count() -> None:
    gone = record(after=[0.1], status="cancelled")
    found = count_good([FIRST, failed(0), gone], Objectives.parse("ttft:200"))
    assert (found.good, found.counted, found.missed) == (1, 2, {"error": 1})
    assert found.share == 0.5


@pytest.mark.parametrize(
    ("answer", "missed"),
    [
        # A server counted three tokens and sent no text, so no time is known.
        (
            record(after=[0.1], first=None, last=None, times=[], output_tokens=3),
            "ttft tpot itl e2el",
        ),
        # Another harness knows the first and the last time only.
        (record(after=[0.1], last=0.2, output_tokens=3), "itl"),
        (record(after=[0.1], tokens=[3]), ""),
        (record(after=[0.1]), ""),
        (record(after=[0.1, 0.2]), ""),
    ],
)
def test_an_objective_is_missed_if_its_time_is_unknown_though_there_was_one(answer, missed) -> None:
    objectives = Objectives.parse("ttft:1s tpot:1s itl:1s e2el:1s")
    assert objectives.find_missed(answer) == missed.split()


@pytest.mark.parametrize("text", ["", "ttft", "ttft:x", "tpot:1+2", "speed:3", "ttft:1h", "itl:-1"])
def test_objectives_that_are_none_are_refused(text) -> None:
    with pytest.raises(UsageError, match="--goodput"):
        Objectives.parse(text)


# ---- the client


def test_a_client_that_was_late_or_busy_voids_the_run() -> None:
    run = Run(records=[record(after=[0.1], lag=0.05)], loads=[ProcessLoad("local/0", 0.9, 0, 0, 0)])
    complaints = client_complaints(client_facts(run), ClientLimits(lag=0.01, cpu_share=0.8))
    assert len(complaints) == 2
    assert "send_lag_p99_ms is 50, the limit is 10" in complaints[0]
    assert "cpu_share is 0.9, the limit is 0.8" in complaints[1]
    assert client_complaints(client_facts(run), ClientLimits(lag=0.1, cpu_share=1.0)) == []


def test_the_worst_process_and_the_most_uncertain_clock_count() -> None:
    loads = [ProcessLoad("a/0", 0.2, 0.0, 0.001, 0.2), ProcessLoad("b/0", 0.1, 0.0, 0.03, 0.1)]
    run = Run(records=[record(after=[0.1])], loads=loads, clock_errors={"a/0": 0.0, "b/0": 0.02})
    facts = client_facts(run)
    assert (facts["cpu_share"], facts["loop_lag_p99_ms"], facts["clock_error_ms"]) == (0.2, 30, 20)
    assert len(client_complaints(facts, ClientLimits())) == 2


# ---- files


def test_records_survive_their_file(tmp_path) -> None:
    path = tmp_path / "requests.jsonl"
    write_records(path, [FIRST, SECOND, failed(2.0)])
    assert summarize_records(read_records(path)) == summarize_records([FIRST, SECOND, failed(2.0)])
    path.write_text('{"session": 1, "speed": 3}\n')
    with pytest.raises(UsageError, match=r"requests.jsonl:1 is no record"):
        read_records(path)


# All keys of the two harnesses' files for a text model, without what only their own flags add
# (probes, metadata, --cache-report) or their own server's metrics.
# vllm/benchmarks/serve.py at commit 009e6d4a1cd6ba3fb2a9fc00f4ec06f5297232a1.
VLLM_KEYS = """date endpoint_type backend label model_id tokenizer_id num_prompts request_rate
burstiness max_concurrency duration completed failed total_input_tokens total_output_tokens
request_throughput request_goodput output_throughput total_token_throughput max_output_tokens_per_s
max_concurrent_requests rtfx mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms
median_tpot_ms std_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms mean_e2el_ms
median_e2el_ms std_e2el_ms p99_e2el_ms"""
# With --max-concurrency.
VLLM_QUEUE_KEYS = """mean_client_queue_time_ms median_client_queue_time_ms std_client_queue_time_ms
p99_client_queue_time_ms"""
# python/sglang/benchmark/serving.py at commit 00f9ec472ffef82714c0407b842ccb5bd254d130.
SGLANG_KEYS = """tag backend dataset_name request_rate max_concurrency sharegpt_output_len
random_input_len random_output_len random_range_ratio server_info duration completed
total_input_tokens total_input_text_tokens total_input_vision_tokens total_output_tokens
total_output_tokens_retokenized request_throughput input_throughput output_throughput
total_throughput mean_e2e_latency_ms median_e2e_latency_ms std_e2e_latency_ms p90_e2e_latency_ms
p95_e2e_latency_ms p99_e2e_latency_ms mean_ttft_ms median_ttft_ms std_ttft_ms p90_ttft_ms
p95_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p90_tpot_ms p95_tpot_ms
p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p90_itl_ms p95_itl_ms p99_itl_ms concurrency
accept_length max_output_tokens_per_s max_concurrent_requests"""
# An older version of SGLang's benchmark wrote these.
SGLANG_OLDER_KEYS = "max_itl_ms"
DETAILS = """input_lens output_lens ttfts itls latencies start_times queue_times generated_texts
errors"""


def test_the_file_has_the_keys_of_vllm_and_sglang(tmp_path) -> None:
    path, result = tmp_path / "bench.json", LoadResult(0.0, [FIRST], {}, None, {})
    wanted = {*VLLM_KEYS.split(), *SGLANG_KEYS.split(), *SGLANG_OLDER_KEYS.split()}
    write_bench_file(path, result, {}, detailed=False)
    keys = json.loads(path.read_text()).keys()
    assert keys >= wanted
    assert keys.isdisjoint(DETAILS.split())
    write_bench_file(path, result, {"max_concurrency": 2}, detailed=True)
    wanted |= {*VLLM_QUEUE_KEYS.split(), *DETAILS.split()}
    assert json.loads(path.read_text()).keys() >= wanted


def test_the_values_of_vllms_and_sglangs_keys() -> None:
    waited = dataclasses.replace(SECOND, scheduled=0.2, due=1.0, text="an answer")
    records = [FIRST, waited, failed(1.5)]
    goodput = count_good(records, Objectives.parse("ttft:200"))
    keys = bench_keys(records, {"max_concurrency": 1}, goodput)
    assert keys["mean_client_queue_time_ms"] == pytest.approx(400)
    assert keys["total_output_tokens_retokenized"] == 7
    assert keys["mean_ttft_ms"] == pytest.approx(200)
    assert keys["request_goodput"] == pytest.approx(1 / keys["duration"])
    assert keys["total_token_throughput"] == pytest.approx(207 / keys["duration"])
    # Three tokens came in the first second of the run and four in the next.
    assert keys["max_output_tokens_per_s"] == 4
    # As there, requests that failed do not run.
    assert keys["max_concurrent_requests"] == 1
    details = bench_details(records)
    assert details.keys() == set(DETAILS.split())
    assert details["generated_texts"] == ["", "an answer", ""]
    assert details["queue_times"] == pytest.approx([0, 0.8, 0])
    assert {len(values) for values in details.values()} == {3}
    json.dumps(keys | details, allow_nan=False)


def test_a_request_without_an_end_does_not_run_until_the_end_of_the_load() -> None:
    unanswered = Record(session=2, sent=0.05, status="error", error_kind="timeout")
    beside = record(0.1, after=[0.2])
    keys = bench_keys([unanswered, FIRST, beside, SECOND], {}, None)
    assert keys["max_concurrent_requests"] == 2


def test_aiperfs_files_both_ways(tmp_path) -> None:
    path = tmp_path / "profile_export.jsonl"
    gone = record(2.0, after=[0.1], status="cancelled")
    named = dataclasses.replace(FIRST, request_id="bench-1-0-0")
    records = [named, SECOND, failed(1.5), gone]
    write_aiperf_records(path, records, 1_700_000_000.0)
    first = json.loads(path.read_text().splitlines()[0])
    assert first["metadata"]["request_start_ns"] == pytest.approx(1_700_000_000 * 10**9, abs=1000)
    assert first["metrics"]["time_to_first_token"]["value"] == pytest.approx(100)
    assert first["metrics"]["inter_chunk_latency"]["value"] == pytest.approx([100, 200])
    assert first["metrics"]["inter_token_latency"]["value"] == pytest.approx(150)
    start, read = read_aiperf_records(path)
    assert start == pytest.approx(1_700_000_000)
    there, here = summarize_records(read), summarize_records(records)
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert there[name]["mean"] == pytest.approx(here[name]["mean"], rel=1e-3), name
    assert [r.status for r in read] == ["ok", "ok", "error", "cancelled"]
    assert [r.request_id for r in read] == ["bench-1-0-0", "", "", ""]
    # The second token of SECOND came with its first one.
    assert [r.second_token for r in read[:2]] == [pytest.approx(0.1), 0.0]
    assert aiperf_summary(records, None)["time_to_first_token"]["p50"] == pytest.approx(200)


def test_aiperfs_records_are_evaluated_as_a_run(tmp_path, capsys) -> None:
    path = tmp_path / "profile_export.jsonl"
    write_aiperf_records(path, [FIRST, SECOND], 5.0)
    out = tmp_path / "out"
    flags = ["--import-aiperf", str(path), "--output-dir", str(out), "--goodput", "ttft:200"]
    assert cli.bench(["serve", *flags]) == 0
    found = json.loads((out / "summary.json").read_text())
    assert found["measures"]["goodput"]["share"] == 0.5
    assert found["notes"] == {"imported_from": str(path)}
    path.write_text('{"metadata": {}}\n')
    assert cli.bench(["serve", *flags]) == 2
    assert "profile_export.jsonl:1 is no record of AIPerf's" in capsys.readouterr().err
    write_aiperf_records(path, [FIRST], 5.0)
    path.write_text(path.read_text().replace('"turn_index": 0', '"turn_index": [1]'))
    assert cli.bench(["serve", *flags]) == 2
    assert "has a value of a wrong type" in capsys.readouterr().err


def test_aiperfs_records_without_gaps_have_a_second_token_and_miss_the_itl(
    tmp_path, capsys
) -> None:
    path, out = tmp_path / "profile_export.jsonl", tmp_path / "out"
    write_aiperf_records(path, [FIRST, FIRST], 5.0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    del rows[0]["metrics"]["inter_chunk_latency"]
    for name in ("inter_chunk_latency", "time_to_first_token", "time_to_second_token"):
        del rows[1]["metrics"][name]  # not streamed
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--import-aiperf", str(path), "--output-dir", str(out), "--goodput", "itl:1s,e2el:1s"]
    assert cli.bench(["serve", *flags]) == 0
    found = json.loads((out / "summary.json").read_text())
    measures = found["measures"]
    assert measures["goodput"]["missed"] == {"itl": 2}
    assert found["notes"]["answers_without_gaps"] == 2
    assert (measures["itl_ms"]["count"], measures["e2e_ms"]["count"]) == (0, 2)
    assert measures["second_token_ms"]["mean"] == pytest.approx(100, rel=1e-3)
    assert measures["tpot_ms"]["mean"] == pytest.approx(150, rel=1e-3)


def test_metrics_of_the_proxy_between_two_readings() -> None:
    def reading(count: int, total: float, tokens: int) -> dict[tuple[str, str], float]:
        return parse_metrics(
            f'pd_proxy_stage_seconds_count{{stage="prefill"}} {count}\n'
            f'pd_proxy_stage_seconds_sum{{stage="prefill"}} {total}\n'
            f"pd_proxy_output_tokens_total {tokens}\n# TYPE x\nother_total 3\n"
        )

    found = metrics_between(reading(10, 5.0, 100), reading(14, 6.0, 150))
    assert found == {"output_tokens": 50, "stages_mean_ms": {"prefill": 250}}
    assert metrics_between({}, {}) == {}


def test_transfers_are_of_all_nodes_that_the_proxy_names() -> None:
    def pages(num_bytes: float, wire: float, count: int) -> dict[str, str]:
        """Both ends tell the same."""
        node = (
            f'pd_transfer_bytes_total{{backend="nixl-tcp"}} {num_bytes}\n'
            f'pd_transfer_wire_seconds_sum{{backend="nixl-tcp"}} {wire}\n'
            f'pd_transfer_wire_seconds_count{{backend="nixl-tcp"}} {count}\n'
            f'pd_transfer_wire_seconds_bucket{{backend="nixl-tcp",le="1.0"}} {count}\n'
        )
        names = ("http://p:1", "http://d:2")
        up = [f'pd_proxy_worker_up{{role="x",url="{name}"}} 1.0\n' for name in names]
        return {"http://proxy": "".join(up)} | dict.fromkeys(names, node)

    asked: list[str] = []

    def reading(found: dict[str, str]) -> dict[tuple[str, str], float]:
        def fetch(url: str, **_: object) -> tuple[int, str]:
            asked.append(url.removesuffix("/metrics"))
            text = found.get(asked[-1])
            return (404, "") if text is None else (200, text)

        return read_metrics(fetch, "http://proxy")

    before, after = pages(1e9, 1.0, 2), pages(4e9, 2.5, 6)
    assert metrics_between(reading(before), reading(after)) == {
        "transfers": {
            "nixl-tcp": {
                "count": 4,
                "gigabytes": 3,
                "gigabytes_per_s": 2,
                "wire_mean_ms": 375,
            }
        }
    }
    del after["http://p:1"]  # a node that cannot be reached: half of the truth is none
    asked.clear()
    assert metrics_between(reading(before), reading(after)) == {}
    assert asked[-1] == "http://p:1", "after one that may be slow to fail no other is asked"
    assert metrics_between(reading(after), reading(before)) == {}, "nor is what was before"
    assert metrics_between({}, reading({})) == {}
