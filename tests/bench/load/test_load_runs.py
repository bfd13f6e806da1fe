"""`pd-bench serve --dataset-name` against servers that log what they sent: counts are right, times
are in order, faults are named, and whatever ends a run leaves its files."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pd import cli
from pd.bench.load.endpoints import Options, Sampling
from pd.bench.load.load_process import local_places
from pd.bench.load.plan import Plan
from pd.bench.load.records import Record, read_records
from pd.bench.load.target import EndpointAddress
from pd.bench.load.workload import Session, Turn

if TYPE_CHECKING:
    from pathlib import Path

# A machine that other tests keep busy makes every client late.
PATIENT = ("--max-client-lag-ms", "100000", "--max-client-cpu", "10")
SECRET = "secret-of-this-test"
SMALL = ("--random-input-len", "12", "--random-output-len", "8")


def bench(
    server: Any, out: Path, *flags: str, status: int = 0
) -> tuple[dict[str, Any], list[Record]]:
    """Summary and records of a run."""
    command = ["serve", "--url", server.url, "--output-dir", str(out), *PATIENT, *flags]
    assert cli.bench(command) == status
    return json.loads((out / "summary.json").read_text()), read_records(out / "requests.jsonl")


def in_log(server: Any, record: Record) -> list[tuple[float, int]]:
    """What the server sent for a record."""
    ending = f"-{record.session}-{record.turn}"
    return next(sent for name, sent in server.sent().items() if name.endswith(ending))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"ids": False}, marks=pytest.mark.full),
        {"ids": False, "running_usage": False, "newline": "\r\n"},
        {"refuses": ["return_token_ids", "continuous_usage_stats", "ignore_eos"]},
    ],
    ids=["ids", "running usage", "usage at the end", "refused fields"],
)
def test_tokens_are_counted_as_the_server_sent_them(scripted, tmp_path, settings) -> None:
    server = scripted(per_event=[1, 3, 2], **settings)
    dataset = ("--dataset-name", "random", "--num-prompts", "30", "--request-rate", "150")
    summary, records = bench(server, tmp_path / "out", *dataset, *SMALL, "--warmup", "2")
    assert len(records) == summary["measures"]["completed"] == 30
    for record in records:
        sent = in_log(server, record)
        assert record.output_tokens == sum(count for _, count in sent) == 8
        assert record.prompt_tokens == 12
        assert len(record.times) == len(sent)
        if record.tokens is not None:
            assert record.tokens == [count for _, count in sent]
        assert record.due <= record.sent < record.first == record.times[0]
        assert record.times == sorted(record.times)
        assert record.second == record.times[1]
    assert summary["measures"]["cached_share"] == 0.5
    refused = summary["notes"].get("fields_the_server_refuses", [])
    assert len(refused) == len(settings.get("refuses", ()))


def test_flags_have_the_names_of_other_harnesses_as_well(scripted, tmp_path) -> None:
    server, out = scripted(), tmp_path / "out"
    flags = ["--num-warmups", "2", "--extra-request-body", '{"top_p": 0.5}']
    command = ["--base-url", server.url, "--dataset-name", "random", *SMALL, "--num-prompts", "3"]
    file = tmp_path / "theirs.json"
    flags += ["--save-result", str(file), "--save-detailed"]
    assert cli.bench(["serve", *command, *flags, *PATIENT, "--output-dir", str(out)]) == 0
    texts = json.loads(file.read_text())["generated_texts"]
    assert len(texts) == 3 and all(texts)
    settings = json.loads((out / "summary.json").read_text())["settings"]
    assert (settings["url"], settings["warmup"]) == (server.url, 2)
    assert settings["sampling"]["extra"] == {"top_p": 0.5}
    assert len(server.prompts_of_all_runs()) >= 5


def test_two_processes_share_one_schedule(scripted, tmp_path) -> None:
    server = scripted()
    flags = ("--num-prompts", "20", "--request-rate", "100", "--arrival", "constant")
    summary, records = bench(
        server, tmp_path / "out", "--dataset-name", "random", *SMALL, *flags, "--processes", "2"
    )
    assert [record.scheduled for record in sorted(records, key=lambda r: r.session)] == (
        pytest.approx([(n + 1) / 100 for n in range(20)])
    )
    assert {(record.session % 2, record.process) for record in records} == {
        (0, "local/0"),
        (1, "local/1"),
    }
    assert summary["client"]["processes"] == 2


@pytest.mark.full
def test_load_processes_on_other_hosts_measure_their_clocks(
    scripted, tmp_path, monkeypatch
) -> None:
    places = [
        dataclasses.replace(place, name=f"{host}/0", shares_clock=False)
        for host, place in zip(("left", "right"), local_places(2), strict=True)
    ]
    monkeypatch.setattr("pd.bench.load.command.local_places", lambda processes: places)
    summary, records = bench(
        scripted(), tmp_path / "out", "--dataset-name", "random", *SMALL, "--num-prompts", "6"
    )
    assert {record.process for record in records} == {"left/0", "right/0"}
    assert 0 < summary["client"]["clock_error_ms"] < 1000


@pytest.mark.full
def test_a_ramp_is_in_the_files_as_vllm_has_it_and_requests_have_the_ids_they_were_sent_with(
    scripted, tmp_path
) -> None:
    server, out = scripted(), tmp_path / "out"
    ramp = ("--ramp-up-start-rps", "50", "--ramp-up-end-rps", "100", "--num-prompts", "5")
    dataset = ("--dataset-name", "random", "--ramp-up-strategy", "linear")
    _, records = bench(server, out, *dataset, *ramp, *SMALL)
    found = json.loads((out / "bench.json").read_text())
    assert found["request_rate"] == "inf"
    assert found["ramp_up_strategy"] == "linear"
    assert (found["ramp_up_start_rps"], found["ramp_up_end_rps"]) == (50, 100)
    lines = (out / "profile_export.jsonl").read_text().splitlines()
    exported = {json.loads(line)["metadata"]["x_request_id"] for line in lines}
    assert exported == {record.request_id for record in records} == set(server.sent())


def test_a_closed_loop_runs_as_many_as_it_may(scripted, tmp_path) -> None:
    flags = ("--num-prompts", "12", "--max-concurrency", "3")
    _, records = bench(scripted(), tmp_path / "out", "--dataset-name", "random", *SMALL, *flags)
    assert len(records) == 12
    for record in records:
        running = [r for r in records if r.sent <= record.sent < (r.end or 0)]
        assert 1 <= len(running) <= 3


@pytest.mark.parametrize(
    ("endpoint", "flags"),
    [
        ("/v1/chat/completions", ()),
        ("/v1/completions", ()),
        ("/generate", ()),
        pytest.param("/v1/completions", ("--prompts-as", "text"), marks=pytest.mark.full),
    ],
)
def test_the_next_turn_has_what_was_really_answered(scripted, tmp_path, endpoint, flags) -> None:
    server = scripted(per_event=[2], refuses=["incremental"])
    _, records = bench(
        server,
        tmp_path / "out",
        "--dataset-name",
        "multi-turn",
        "--turns",
        "3",
        "--turn-input-len",
        "5",
        "--num-prompts",
        "3",
        *SMALL,
        "--endpoint",
        endpoint,
        *flags,
    )
    assert len(records) == 9
    prompts = server.prompts()
    answer: list[Any] = ["w"] * 8 if "chat" in endpoint or flags else list(range(8))
    for session in range(3):
        first, second, third = (prompts[f"{session}-{turn}"] for turn in range(3))
        assert second[: 12 + 8] == first + answer
        assert third[: 25 + 8] == second + answer
        assert [len(first), len(second), len(third)] == [12, 25, 38]
    by_turn = {(record.session, record.turn): record for record in records}
    for session in range(3):
        assert by_turn[session, 1].sent >= by_turn[session, 0].end


@pytest.mark.full
def test_stages_and_cached_tokens_of_generate(scripted, tmp_path) -> None:
    summary, records = bench(
        scripted(),
        tmp_path / "out",
        "--dataset-name",
        "random",
        *SMALL,
        "--num-prompts",
        "4",
        "--endpoint",
        "/generate",
        "--gpus",
        "2",
    )
    assert summary["measures"]["stages_ms"]["prefill"]["mean"] == pytest.approx(2.0)
    assert summary["measures"]["requests_per_s_per_gpu"] > 0
    assert "stages" not in summary["notes"]
    assert {record.text for record in records} == {None}, "texts are kept with --save-detailed only"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("cut", "cut"),
        ("429", "http 429"),
        pytest.param("json", "not a stream", marks=pytest.mark.full),
        pytest.param("garbage", "not http", marks=pytest.mark.full),
        pytest.param("hang up", "no answer", marks=pytest.mark.full),
        pytest.param("error event", "error event", marks=pytest.mark.full),
        pytest.param("bad event", "bad event", marks=pytest.mark.full),
        ("slow", "timeout"),
    ],
)
def test_faults_are_counted_by_kind_and_do_not_end_the_run(scripted, tmp_path, fault, kind) -> None:
    server = scripted(fault=fault, every=4)
    summary, records = bench(
        server,
        tmp_path / "out",
        "--dataset-name",
        "random",
        *SMALL,
        "--num-prompts",
        "8",
        "--request-rate",
        "200",
        "--request-timeout",
        "1",
        "--goodput",
        "ttft:100000",
    )
    assert summary["measures"]["errors"] == {kind: 2}
    assert summary["measures"]["completed"] == 6
    assert summary["measures"]["goodput"]["share"] == 0.75
    assert all(record.error for record in records if record.status == "error")


@pytest.mark.parametrize(
    ("line", "endpoint", "complaint"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "/v1/completions", "messages need"),
        ({"input_ids": [1, 2]}, "/v1/chat/completions", "a chat takes no token ids"),
    ],
)
def test_lines_that_the_endpoint_cannot_take_are_refused_before_the_run(
    scripted, tmp_path, capsys, line, endpoint, complaint
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(line))
    flags = ["--dataset-name", "jsonl", "--dataset-path", str(path), "--endpoint", endpoint]
    assert cli.bench(["serve", "--url", scripted().url, *flags]) == 2
    assert complaint in capsys.readouterr().err


def test_a_warm_up_line_that_the_endpoint_cannot_take_is_refused_as_well(
    scripted, tmp_path, capsys
) -> None:
    path = tmp_path / "r.jsonl"
    lines = [{"prompt": "a"}, {"prompt": "b"}, {"messages": [{"role": "user", "content": "c"}]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--dataset-name", "jsonl", "--dataset-path", str(path), "--num-prompts", "2"]
    assert cli.bench(["serve", "--url", scripted().url, *flags, "--warmup", "1"]) == 2
    assert "messages need" in capsys.readouterr().err


def test_a_run_without_any_answer_is_an_error(scripted, tmp_path, capsys) -> None:
    flags = ["--dataset-name", "random", *SMALL, "--num-prompts", "3"]
    assert cli.bench(["serve", "--url", scripted(fault="429").url, *PATIENT, *flags]) == 1
    assert "no request was answered: {'http 429': 3}" in capsys.readouterr().err


def test_clients_that_hang_up_are_no_errors(scripted, tmp_path) -> None:
    server = scripted(interval=0.05)
    summary, records = bench(
        server,
        tmp_path / "out",
        "--dataset-name",
        "random",
        *SMALL,
        "--num-prompts",
        "20",
        "--cancel-rate",
        "0.5",
        "--cancel-delay",
        "0.2",
    )
    found = summary["measures"]
    assert 0 < found["cancelled"] < 20
    assert (found["failed"], found["completed"]) == (0, 20 - found["cancelled"])
    assert all(r.output_tokens < 8 for r in records if r.status == "cancelled")


def test_a_server_without_schemas_is_told_before_the_run(scripted, tmp_path, capsys) -> None:
    server = scripted(refuses=["response_format"])
    flags = ["--dataset-name", "structured", "--num-prompts", "2", *SMALL]
    assert cli.bench(["serve", "--url", server.url, *flags]) == 2
    assert "the server refuses schemas" in capsys.readouterr().err


@pytest.mark.parametrize("work", ["--dataset-name", "--unloaded"])
@pytest.mark.parametrize("key", [["--api-key", SECRET], [f"--api-key={SECRET}"], []])
def test_a_key_is_sent_and_written_nowhere(scripted, tmp_path, monkeypatch, work, key) -> None:
    server, out, file = scripted(key=SECRET), tmp_path / "out", tmp_path / "out.json"
    flags = {
        "--dataset-name": ["random", *SMALL, "--num-prompts", "2", "--output-dir", str(out)],
        "--unloaded": ["12", "--outputs", "3", "--repeats", "1", "--output", str(file)],
    }[work]
    if not key:
        monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    assert cli.bench(["serve", "--url", server.url, *PATIENT, work, *flags, *key]) == 0
    written = [path for path in tmp_path.rglob("out*") if path.is_file()] + list(out.glob("*"))
    assert written
    assert not any(SECRET in path.read_text() for path in written)


def test_a_client_that_is_late_voids_the_result_loudly(scripted, tmp_path, capsys) -> None:
    flags = ("--dataset-name", "random", *SMALL, "--num-prompts", "4", "--max-client-lag-ms", "0")
    summary, _ = bench(scripted(), tmp_path / "out", *flags, status=3)
    assert summary["valid"] is False
    assert "loop_lag_p99_ms" in summary["complaints"][-1]
    assert "RESULT VOID, the client was the bottleneck" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "bench.json").read_text())["valid"] is False


def test_ctrl_c_writes_what_there_is(scripted, tmp_path) -> None:
    server, out = scripted(interval=0.05), tmp_path / "out"
    flags = ["--dataset-name", "random", "--random-input-len", "8", "--random-output-len", "40"]
    command = ["serve", "--url", server.url, "--output-dir", str(out), *PATIENT, *flags]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pd.bench",
            *command,
            "--num-prompts",
            "1000",
            "--request-rate",
            "5",
        ],
        # A shell starts programs in the background with the signal ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while "bench-" not in server.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    summary = json.loads((out / "summary.json").read_text())
    records = read_records(out / "requests.jsonl")
    assert summary["interrupted"] is True
    assert summary["measures"]["interrupted"] >= 1
    assert 1 <= len(records) < 1000
    assert all(record.status in ("ok", "interrupted") for record in records)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--dataset-name", "poems"], "--dataset-name is one of random, shared-prefix"),
        (["--dataset-name", "trace"], "--dataset-name trace needs --dataset-path"),
        (["--dataset-name", "random", "--goodput", "speed:1"], "--goodput is ttft:MS"),
        (["--dataset-name", "random", "--request-rate", "0"], "--request-rate must be above 0"),
        (["--dataset-name", "random", "--cancel-rate", "2"], "--cancel-rate is a share"),
        (["--dataset-name", "random", "--extra-body", "[]"], "--extra-body must be a JSON object"),
        (["--dataset-name", "random", "--endpoint", "/chat"], "--endpoint is one of"),
        (["--dataset-name", "random", "--unloaded", "8"], "is a run of its own"),
        (["--dataset-name", "random", "--output", "x.json"], "its files to --output-dir DIR"),
        (["--import-aiperf", "x.jsonl", "--output", "x.json"], "its files to --output-dir DIR"),
        (
            ["--dataset-name", "random", "--processes", "4", "--max-concurrency", "3"],
            "needs a place",
        ),
        (["--dataset-name", "random", "--trace-window", "9:3"], "--trace-window is START:END"),
        (["--dataset-name", "random", "--ramp-up-end-rps", "3"], "need --ramp-up-strategy"),
        (["--dataset-name", "random", "--output-dir", "/nowhere/x"], "no directory /nowhere"),
        (["--dataset-name", "random", "--output-dir", "/proc/x"], "cannot write in /proc: "),
        (["--dataset-name", "random", "--output-dir", __file__], "is a file"),
        (["--dataset-name", "random", "--layout", "split"], "give its file with --cluster"),
        (["--cluster", "x.yaml"], "--cluster needs a run under load: give --dataset-name"),
        (["--dataset-name", "random"], "cannot reach http://127.0.0.1:9"),
        (["--dataset-name", "random", "--url", "http://HOST:PORT"], "--url is http://HOST:PORT or"),
        (["--dataset-name", "random", "--url", "http://[::1:8000"], "--url is http://HOST:PORT or"),
        (["--dataset-name", "random", "--url", "http://h:0"], "--url is http://HOST:PORT or"),
        (["--dataset-name", "random", "--url", "http://é..x:9"], "cannot reach http://é..x:9/v1"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(flags, complaint, capsys) -> None:
    assert cli.bench(["serve", "--url", "http://127.0.0.1:9", *flags]) in (1, 2)
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.splitlines()) == 1


def test_a_sweep_writes_every_point_and_the_highest_rate(scripted, tmp_path, capsys) -> None:
    output, out = tmp_path / "sweep.json", tmp_path / "out"
    flags = ["--goodput", "ttft:100000", "--min-rate", "40", "--max-rate", "80", "--repeats", "1"]
    command = [*flags, *SMALL, "--num-prompts", "10", *PATIENT, "--output", str(output)]
    server = scripted()
    files = ["--output-dir", str(out), "--seed", "5"]
    assert cli.bench(["sweep", "--deployment", f"one={server.url}", *command, *files]) == 0
    rows = json.loads(output.read_text())["results"]
    prompts = [tuple(prompt) for prompt in server.prompts_of_all_runs() if len(prompt) == 12]
    assert len(set(prompts)) == len(prompts) == 20, "a prefix cache would have helped"
    assert [row.get("rate") for row in rows] == [40, 80, None]
    assert rows[-1] == {"deployment": "one", "highest_rate": 80, "lowest_rate_that_failed": None}
    for run, (rate, seed) in {"one-40.000-0": (40, 5), "one-80.000-0": (80, 6)}.items():
        settings = json.loads((out / run / "summary.json").read_text())["settings"]
        assert (settings["arrivals"]["rate"], settings["seed"]) == (rate, seed)
        assert json.loads((out / run / "bench.json").read_text())["request_rate"] == rate
    impossible = ["--goodput", "ttft:0.001", *command[2:]]
    assert cli.bench(["sweep", "--deployment", f"one={scripted().url}", *impossible]) == 0
    assert "one: highest rate below 40 requests/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--goodput", "ttft:1"], "--deployment NAME=URL or --cluster FILE is missing"),
        (["--deployment", "a"], "--deployment is NAME=URL"),
        (["--deployment", "a=http://127.0.0.1:9"], "--goodput is missing"),
        (
            ["--deployment", "a=b", "--goodput", "ttft:1", "--request-rate", "3"],
            "leave out --request",
        ),
    ],
)
def test_a_sweep_without_what_it_needs_says_so(flags, complaint, capsys) -> None:
    assert cli.bench(["sweep", *flags]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("lines", [0, 1])
def test_a_load_process_whose_harness_has_gone_sends_nothing(scripted, lines) -> None:
    server = scripted()
    plan = Plan("p", EndpointAddress.parse(server.url, "/v1/completions"), "/v1/completions",
                Sampling(), Options(), None, 5.0, "bench-x")  # fmt: skip
    told = [json.dumps({"plan": dataclasses.asdict(plan)}) + "\n"]
    told.append(json.dumps({"warm_up": Session(0, (Turn([1], 1, 1),)).to_json()}) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "pd.bench.load.worker"],
        input="".join(told[: 1 + lines]), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "ended before it sent its whole plan" in done.stderr
    assert not server.log.read_text()


def test_a_load_process_needs_nothing_of_pd_but_its_core() -> None:
    """So it starts quickly, and on hosts without torch."""
    program = "import sys, pd.bench.load.worker; print(*sorted(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    modules = shown.stdout.split()
    ours = {name for name in modules if name.startswith("pd.")}
    assert "pd.bench.load.worker" in ours
    assert all(name.startswith(("pd.bench", "pd.core", "pd.util")) for name in ours)
    assert not {"torch", "httpx", "numpy"}.intersection(modules)
