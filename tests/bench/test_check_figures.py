"""A wrong or unexplained figure in prose is found. That there is none ``make check`` says."""

from __future__ import annotations

import check_figures
import pytest


@pytest.fixture
def texts() -> dict[str, str]:
    paths = check_figures.files()
    return {str(p.relative_to(check_figures.ROOT)): check_figures.prose(p) for p in paths}


def test_a_figure_that_differs_is_found(texts: dict[str, str]) -> None:
    page = "docs/transfer-backends.md"
    texts[page] = texts[page].replace("227 GB/s", "327 GB/s")
    found = list(check_figures.problems(texts, check_figures.quotes()))
    assert "does not say what was measured" in found[0] and "227 GB/s" in found[0]
    assert "quotes '327 GB/s'" in found[1]


@pytest.mark.parametrize("figure", ["9.5 GB/s", "12 %", "1,147 ms", "3 to 5 µs"])
def test_a_figure_from_nowhere_is_found(figure: str) -> None:
    (found,) = check_figures.problems({"docs/new.md": f"It takes {figure} of it."}, [])
    assert f"docs/new.md quotes '{figure}'" in found


def test_code_is_no_prose() -> None:
    comments = list(check_figures._comments('x = "99 %"  # 5 ms\n"""7 GB/s"""\n'))
    assert comments == [" 5 ms", '"""7 GB/s"""']


def test_a_limit_that_nobody_states_any_more_is_found(texts: dict[str, str]) -> None:
    page = "docs/harness.md"
    texts[page] = texts[page].replace("multiples of 3000 ms", "multiples of three seconds")
    (found,) = check_figures.problems(texts, check_figures.quotes())
    assert "docs/harness.md does not say 'multiples of 3000 ms' any more" in found
