"""DSPy and LangChain run on pd's OpenAI endpoint, with nothing of ours in between.

Both need an environment of their own, which `make test-all` makes with
`sh scripts/peer_environment.sh frameworks .peers`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("PD_TEST_FRAMEWORKS", "")
DIRECTORY = Path(__file__).resolve().parents[2] / "examples" / "frameworks"
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PYTHON, reason="PD_TEST_FRAMEWORKS names no interpreter"),
]
CACHE = "The KV cache holds the keys and values of earlier tokens in every layer"
SAID = {
    "dspy_program": ["name='", "age=33", CACHE],
    "langchain_chain": [CACHE, "12 + 30 = 42", "A unified node does", "name='Anna Berg' age=33"],
}


@pytest.mark.parametrize("name", SAID)
def test_a_program_of_a_framework_runs(name: str, url: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": "", "HOME": str(tmp_path)}
    ended = subprocess.run(
        [PYTHON, str(DIRECTORY / f"{name}.py"), url],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    for text in SAID[name]:
        assert text in ended.stdout
