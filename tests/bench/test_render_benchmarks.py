"""What is said of a result file has its numbers from there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import render_benchmarks

if TYPE_CHECKING:
    from pathlib import Path

ROWS = [{"layout": "split", "ttft_p50_ms": 44.26}, {"layout": "unified", "ttft_p50_ms": 21.7}]


def findings(tmp_path: Path, text: str) -> str:
    page = tmp_path / "found.md"
    page.write_text(text)
    return render_benchmarks.findings(page, ROWS)


def test_fields_become_the_numbers_of_their_rows(tmp_path: Path) -> None:
    text = "The p50 is {split[ttft_p50_ms]:.1f} ms, with two nodes {unified[ttft_p50_ms]:.0f} ms.\n"
    assert findings(tmp_path, text) == "The p50 is 44.3 ms, with two nodes 22 ms."


def test_a_number_that_is_no_field_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"44\.3 must be a field"):
        findings(tmp_path, "It takes 44.3 ms.")
    with pytest.raises(KeyError):
        findings(tmp_path, "It takes {two[ttft_p50_ms]} ms.")


def test_null_is_an_empty_cell_of_a_column_of_numbers() -> None:
    rows = [{"batch": 32, "verify_ratio": 1.25}, {"batch": 64, "verify_ratio": None}]
    assert render_benchmarks.table(rows).splitlines() == [
        "| batch | verify ratio |",
        "|---:|---:|",
        "| 32 | 1.25 |",
        "| 64 |  |",
    ]


def test_a_result_without_a_page_has_only_its_table(tmp_path: Path) -> None:
    assert render_benchmarks.findings(tmp_path / "none.md", ROWS) == ""


def test_every_result_file_is_on_one_page_which_the_summary_links() -> None:
    pages = render_benchmarks.render()
    summary = pages[render_benchmarks.DOCS / "benchmarks.md"]
    for path in render_benchmarks.RESULTS.glob("*.json"):
        (page,) = [page for page, text in pages.items() if f"\n## {path.stem}\n" in text]
        assert f"(benchmarks/{page.name}#{path.stem})" in summary


def test_a_result_file_without_a_topic_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unheard_of.json").write_text("{}")
    monkeypatch.setattr(render_benchmarks, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match=r"unheard_of\.json: belongs to no topic"):
        render_benchmarks.render()
