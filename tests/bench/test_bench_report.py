"""``pd-bench report``: one page about runs and sweeps that needs nothing from elsewhere."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lacking import skip_or_fail
from matplotlib.image import imread

from pd.bench.load.measures import summarize_records
from pd.bench.load.records import Record, write_records
from pd.bench.page.charts import charts_of
from pd.bench.page.runs import read_run
from pd.bench.report import without_absolute_paths
from pd.cli import bench

HOSTILE = "<script>alert('$x^2$')</script>"


def make_run(
    directory: Path, *, seed: int = 0, complaints: tuple[str, ...] = (), **fields: object
) -> Path:
    """Results of twenty requests, one of which failed."""
    rng = random.Random(seed)
    records = []
    for number in range(20):
        sent = number * 0.1
        first = sent + rng.uniform(0.02, 0.3)
        times = [first + 0.01 * i for i in range(5)]
        stages = {"queue": 0.001, "prefill": first - sent, "transfer": 0.004, "decode": 0.04}
        records.append(
            Record(
                session=number,
                status="error" if number == 7 else "ok",
                error_kind="http 500" if number == 7 else None,
                prompt_tokens=100,
                cached_tokens=40,
                output_tokens=5,
                due=sent,
                sent=sent,
                first=times[0],
                second=times[1],
                last=times[-1],
                end=times[-1],
                times=times,
                stages=stages,
            )
        )
    directory.mkdir()
    write_records(directory / "requests.jsonl", records)
    summary = {
        "command": f"pd-bench serve --url X {HOSTILE}",
        "commit": "abc",
        "date": "2026-01-02",
        "machine": {"cpu": HOSTILE},
        "complaints": list(complaints),
        "measures": summarize_records(records),
        "server": {"transfers": {"tcp": {"count": 3.0, "gigabytes_per_s": 1.25}}},
        **fields,
    }
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def make_sweep(file: Path) -> Path:
    rows: list[dict[str, Any]] = [
        {"deployment": "split", "rate": rate, "repeat": repeat, "share": share}
        for rate, share in ((1.0, 1.0), (2.0, 0.95), (4.0, 0.4))
        for repeat in range(2)
    ]
    rows.append({"deployment": "split", "highest_rate": 2.0})
    file.write_text(json.dumps({"command": "pd-bench sweep", "results": rows}))
    return file


def report(tmp_path: Path, *results: str, **flags: str) -> str:
    output = tmp_path / "report.html"
    more = [word for name, value in flags.items() for word in (f"--{name}", value)]
    assert bench(["report", *results, "--output", str(output), *more]) == 0
    return output.read_text()


def test_a_page_has_tables_charts_and_where_they_come_from(tmp_path: Path) -> None:
    split, unified = make_run(tmp_path / "a", seed=1), make_run(tmp_path / "b", seed=2)
    sweep = make_sweep(tmp_path / "sweep.json")
    charts = tmp_path / "png"
    page = report(tmp_path, f"split={split}", f"unified={unified}", str(sweep), png=str(charts))
    for text in ("split, ttft", "unified, itl", "tcp gigabytes per s", "1.25", "abc, 2026-01-02"):
        assert text in page
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert [t for t in titles if t.startswith("Stages")] == [
        "Stages of requests: split",
        "Stages of requests: unified",
    ]
    drawn = {"Latencies", "Throughput against latency", "Goodput against rate", "Transfer rates"}
    assert drawn <= set(titles)
    assert "highest rates: split: 2 requests/s" in page
    pictures = sorted(charts.iterdir())
    assert len(pictures) == page.count("<picture>") == 7
    for picture in pictures:
        assert imread(picture).std() > 0.01, "nothing was drawn"


def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / HOSTILE.replace("/", "_"))
    page = report(tmp_path, str(run), title=HOSTILE)
    assert "<script" not in page
    linked = re.findall(r"(?:src|srcset|href)\s*=\s*\"([^\"]*)", page)
    assert linked
    assert all(link.startswith("data:image/svg+xml;base64,") for link in linked)
    assert "@import" not in page
    assert "url(" not in page


def test_a_void_run_is_called_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd.bench.page.charts.charts_of", lambda *_: [])
    run = make_run(tmp_path / "a", complaints=("requests were sent 40 ms late",))
    assert "a is void: requests were sent 40 ms late" in report(tmp_path, str(run))


@pytest.mark.full
def test_a_part_of_a_run_is_called_void(tmp_path: Path) -> None:
    part = make_run(tmp_path / "a", interrupted=True, complaints=("late",))
    silent = make_run(
        tmp_path / "b", interrupted=True, notes={"records_missing_from": ["far/0", "far/1"]}
    )
    whole = make_run(tmp_path / "c", interrupted=False, notes={"model": "m"})
    page = report(tmp_path, str(part), str(silent), str(whole))
    assert "a is void: late; it was ended before its time" in page
    assert "b is void: records of load process far/0, far/1 are missing" in page
    assert "c is void" not in page


def test_a_run_in_which_nothing_was_answered_has_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    (run / "requests.jsonl").write_text("")
    summary = json.loads((run / "summary.json").read_text())
    summary["measures"] = summarize_records([])
    (run / "summary.json").write_text(json.dumps(summary))
    assert "a, ttft" in report(tmp_path, str(run))


def test_names_that_paths_cannot_have_are_names(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path / "sweep.json")
    run = make_run(tmp_path / "a")
    (run / "requests.jsonl").write_text("")
    report(tmp_path, f"../x/y={run}", str(sweep), png=str(tmp_path / "png"))
    assert all(file.parent == tmp_path / "png" for file in (tmp_path / "png").iterdir())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("missing", "cannot read missing: No such file"),
        ("empty", "summary.json: No such file"),
        ("text.json", "text.json is not JSON"),
        ("list.json", "list.json must hold an object of JSON"),
        ("radix.json", "radix.json is of no sweep: its 'results' must name deployments"),
    ],
)
def test_what_is_no_result_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("text.json").write_text("{")
    Path("list.json").write_text("[]")
    Path("radix.json").write_text('{"results": [{"name": "a"}]}')
    assert bench(["report", given, "--output", "x.html"]) == 2
    assert message in capsys.readouterr().err


def test_two_runs_of_one_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(make_run(tmp_path / "a"))
    assert bench(["report", run, run, "--output", str(tmp_path / "x.html")]) == 2
    assert "two runs are called a; give them names: NAME=PATH" in capsys.readouterr().err


@pytest.mark.full
def test_charts_are_drawn_in_both_themes(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a"), "a")
    for chart in charts_of([run], []):
        light, dark = chart.draw_svg("light"), chart.draw_svg("dark")
        assert "#ffffff" in light
        assert "#12181f" in dark
        assert "mathdefault" not in light


@pytest.mark.full
@pytest.mark.parametrize(("theme", "back"), [("light", (255, 255, 255)), ("dark", (18, 24, 31))])
def test_a_browser_without_a_network_shows_it(
    tmp_path: Path, theme: str, back: tuple[int, int, int]
) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        skip_or_fail("there is no chromium (Debian's package)")
    report(tmp_path, str(make_run(tmp_path / "a")), str(make_sweep(tmp_path / "sweep.json")))
    shot = tmp_path / "shot.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,3000"]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}"]
    if theme == "dark":
        flags.append("--blink-settings=preferredColorScheme=0")
    page = (tmp_path / "report.html").as_uri()
    done = subprocess.run(
        [chromium, *flags, f"--screenshot={shot}", page],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert shot.is_file(), done.stderr
    pixels = (imread(shot)[:, :, :3] * 255).round().astype(int)
    assert tuple(pixels[5, 5]) == back
    # Charts have lines of the first colour, wherever they are.
    blue = np.abs(pixels - np.array([0x2F, 0x6F, 0xDE])).sum(axis=2) < 12
    assert blue.sum() > 200


@pytest.mark.parametrize(
    ("command", "written"),
    [
        ("pd-bench engine --output /tmp/o/x.json", "pd-bench engine --output x.json"),
        ("python b.py --version now=/tmp/trees/new", "python b.py --version now=new"),
        (f"pd-bench radix --output {Path.cwd()}/out/x.json", "pd-bench radix --output out/x.json"),
        ("pd-bench serve --url http://h:1/v1/x --endpoint /generate", None),
    ],
)
def test_result_files_name_no_path_of_the_machine(command: str, written: str | None) -> None:
    assert without_absolute_paths(command) == (written or command)
