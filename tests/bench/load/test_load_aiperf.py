"""`scripts/aiperf.sh` finds or installs AIPerf, and without a package index says so and goes on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "aiperf.sh"
# Stands for Python: makes an "environment", whose pip does as the variable says.
PYTHON = """#!/bin/sh
mkdir -p "$4/bin" && printf '#!/bin/sh\\nexit $PIP_STATUS\\n' >"$4/bin/python" &&
    chmod +x "$4/bin/python"
"""


def ask(directory: Path, pip_status: int, **variables: str) -> subprocess.CompletedProcess[str]:
    python = directory.parent / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    command = ["sh", str(SCRIPT), str(directory), str(python)]
    env = {**os.environ, "PD_TEST_AIPERF": "", "PIP_STATUS": str(pip_status), **variables}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True)


def test_a_program_that_is_named_is_taken(tmp_path: Path) -> None:
    done = ask(tmp_path / "env", 1, PD_TEST_AIPERF="/opt/aiperf")
    assert done.stdout == "/opt/aiperf\n"
    assert not (tmp_path / "env").exists()


def test_it_is_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    directory = tmp_path / "env"
    assert ask(directory, 0).stdout == f"{directory}/bin/aiperf\n"
    # What is there is not installed again.
    assert ask(directory, 1).stdout == f"{directory}/bin/aiperf\n"


def test_without_a_package_index_nothing_is_left_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    done = ask(tmp_path / "env", 1)
    assert (done.stdout, done.returncode) == ("", 0)
    assert "the test that compares with it is skipped" in done.stderr
    assert not (tmp_path / "env").exists()
