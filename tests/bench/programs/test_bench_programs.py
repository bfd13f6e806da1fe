"""`pd-bench programs` on real processes: its counts are those of the nodes, and add up."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pd.bench.programs import command, optimum, runner
from pd.bench.programs.layouts import ProgramLayout, start_layout
from pd.bench.programs.optimum import replay_requests
from pd.bench.programs.workloads import WORKLOADS, make_workload
from pd.cli import bench
from pd.core.errors import SetupError
from pd.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    from pd.bench.programs.layouts import RunningLayout

AMPLE = 16384
PAGE = Path(__file__).resolve().parents[3] / "docs" / "programs.md"


def run_bench(tmp_path: Path, *flags: object) -> list[dict[str, Any]]:
    output = tmp_path / "programs.json"
    sizes = ("--programs", 3, "--concurrency", 3, "--kv-cache-tokens", AMPLE)
    assert bench(["programs", *map(str, (*sizes, *flags)), "--output", str(output)]) == 0
    rows: list[dict[str, Any]] = json.loads(output.read_text())["results"]
    return rows


def read_node_hits(layout: RunningLayout) -> int:
    """Sum the hits that the nodes of a deployment counted themselves."""
    urls = re.findall(r'^pd_proxy_worker_up\{.*url="([^"]+)"\}', read_page(layout.url), re.M)
    pages = [read_page(url) for url in urls]
    return sum(
        int(float(found)) for page in pages for found in re.findall(r'kind="hit"\} (.*)', page)
    )


def read_page(url: str) -> str:
    return httpx.get(f"{url}/metrics", trust_env=False).text


@pytest.mark.parametrize(
    ("layout", "page_size", "names"),
    [
        ("unified", 1, ("endings", "skeleton")),
        ("1p1d", 16, ("endings", "chat-short")),
        pytest.param("unified", 1, WORKLOADS, marks=pytest.mark.full),
        pytest.param("unified", 16, WORKLOADS, marks=pytest.mark.full),
        pytest.param("1p1d", 1, WORKLOADS, marks=pytest.mark.full),
        pytest.param("1p1d", 16, WORKLOADS, marks=pytest.mark.full),
    ],
)
def test_hits_of_an_ample_pool_are_those_of_the_replay(
    layout: str, page_size: int, names: tuple[str, ...], seed: int
) -> None:
    """Requests one after the other have exactly the hits of a replay in their order. Requests at
    the same time have almost those of the best order."""
    settings = ProgramLayout(layout, "cpu", page_size)
    answers_stay = settings.answers_stay
    with start_layout(EMBEDDED_MODEL, settings, AMPLE) as running:
        for name in names:
            workload = make_workload(name, seed, 3)
            alone = runner.run_workload(
                running, workload, runner.Ablation(parallel=False), settings, 1
            )
            replay = replay_requests(alone.requests, page_size, answers_stay=answers_stay)
            assert alone.hit_tokens == replay.hit_tokens > 0, name
            together = runner.run_workload(running, workload, runner.Ablation(), settings, 3)
            assert 0.95 * together.best.hit_tokens <= together.hit_tokens, name
            assert len(together.latencies) == 3
            assert together.page_loss >= 0 if page_size > 1 else together.page_loss == 0
        if layout == "unified":  # a decode node looks prompts up once more
            assert read_node_hits(running) == running.read_tokens()[1]


def test_more_hits_than_the_optimum_end_the_run(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    settings = ProgramLayout("unified", "cpu", 1)
    workload = make_workload("few-shot", seed, 2)
    run = (workload, runner.Ablation(), settings, 2)
    real = runner.replay_best_order

    def forget_one_hit(*args: Any, **kwargs: Any) -> Any:
        replay = real(*args, **kwargs)
        return replace(replay, hit_tokens=replay.hit_tokens - 1)

    def forget_a_request(*args: Any) -> Any:
        return list_requests(*args)[1:]

    list_requests = runner.list_requests
    with start_layout(EMBEDDED_MODEL, settings, AMPLE) as layout:
        with monkeypatch.context() as patch:
            patch.setattr(runner, "replay_best_order", forget_one_hit)
            with pytest.raises(SetupError, match="but the best order gives"):
                runner.run_workload(layout, *run)
        with monkeypatch.context() as patch:
            patch.setattr(runner, "list_requests", forget_a_request)
            with pytest.raises(SetupError, match="but the recorded requests have"):
                runner.run_workload(layout, *run)
        runner.run_workload(layout, *run)


def test_ablations_of_the_program_in_the_documents_and_a_page_about_them(tmp_path: Path) -> None:
    program, page = tmp_path / "mine.py", tmp_path / "page.html"
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    program.write_text(code)
    flags = ("--program", program, "--layout", "unified", "--page-size", 1, 16)
    rows = run_bench(tmp_path, *flags, "--ablation", "full", "all off")
    full, small_pool = (
        next(row for row in rows if row["ablation"] == "full" and (row["pool"] == "ample") == ample)
        for ample in (True, False)
    )
    assert {row["workload"] for row in rows} == {"review"}
    assert full["of_best"] == 1 and full["page_loss"] == 0
    assert small_pool["pool"] < AMPLE and 0 < small_pool["of_best"] <= 1
    (off,) = (row for row in rows if row["ablation"] == "all off")
    assert (off["hit_rate"], off["of_best"]) == (0, 0) and off["best_hit_rate"] > 0
    # One hint computes the rules, and one of each program what its branches share.
    assert (off["requests"], full["requests"]) == (9, 9 + 4)
    (pages,) = (row for row in rows if row["page_size"] == 16)
    assert pages["page_loss"] > 0
    assert bench(["report", str(tmp_path / "programs.json"), "--output", str(page)]) == 0
    text = page.read_text()
    assert "Ablations: programs, unified" in text and "A small pool: programs, unified" in text
    assert text.count("<td>review</td>") == len(rows)


def test_an_interrupted_run_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = command.run_workload

    def run_or_interrupt(layout: Any, workload: Any, *args: Any) -> Any:
        if workload.name == "judge":
            raise KeyboardInterrupt
        return real(layout, workload, *args)

    monkeypatch.setattr(command, "run_workload", run_or_interrupt)
    output = tmp_path / "programs.json"
    flags = ("--programs", "1", "--layout", "unified", "--workload", "few-shot", "judge")
    assert bench(["programs", *flags, "--output", str(output)]) == 130
    report = json.loads(output.read_text())
    assert [row["workload"] for row in report["results"]] == ["few-shot"] * 3
    assert report["note"] == "ended before its time"


@pytest.mark.full
@pytest.mark.parametrize("layout", ["1p1d", "elastic"])
def test_every_ablation_of_a_layout_is_measured(layout: str, tmp_path: Path) -> None:
    flags = ("--workload", "judge", "--layout", layout, "--page-size", 1, "--pool-share", 0)
    rows = run_bench(tmp_path, *flags)
    skipped = {"fcfs"} if layout == "elastic" else set()
    assert {row["ablation"] for row in rows} == runner.ABLATIONS.keys() - skipped
    assert all(0 <= row["of_best"] <= 1 for row in rows)
    hits = {row["ablation"]: row["hit_rate"] for row in rows}
    assert hits["full"] > 0 and hits["no cache"] == hits["all off"] == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--programs", "0"], "must be at least 1"),
        (["--pool-share", "1"], "below 1"),
        (["--program", "none.py"], "there is no such Python file"),
        (["--program", optimum.__file__], "define make_workload"),
    ],
)
def test_invalid_arguments_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(["programs", *flags]) == 2
    assert message in capsys.readouterr().err
