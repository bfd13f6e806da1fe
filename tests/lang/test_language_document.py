"""The programs of docs/language.md run in the order of the page, and print what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pd.lang as pl

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "language.md"
URL = "http://127.0.0.1:8000"


def test_the_tutorial_runs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= len(re.findall(r"^### \d+\. ", text, re.MULTILINE)) == 10
    names: dict[str, Any] = {}
    try:
        for block in blocks:
            exec(block.replace(URL, url), names)
    finally:
        pl.set_default_backend(None)
    printed = capsys.readouterr().out
    for said in re.findall(r"print\(.*\) +# (.*?)(?: …|, …)?$", text, re.MULTILINE):
        assert said in printed


def test_the_reference_names_every_word() -> None:
    text = PAGE.read_text()
    words = set(pl.__all__) - {"user_begin", "user_end", "system_begin", "system_end"}
    words -= {"assistant_begin", "assistant_end"}
    assert [word for word in sorted(words) if word not in text] == []
