"""`scripts/peer_environment.sh` finds or installs a peer. Without a package index it says so."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "peer_environment.sh"
VARIABLES = {
    "aiperf": "PD_TEST_AIPERF",
    "sglang": "PD_TEST_SGLANG",
    "sglang-programs": "PD_TEST_SGLANG_PROGRAMS",
    "frameworks": "PD_TEST_FRAMEWORKS",
    "llama-index": "PD_TEST_LLAMA_INDEX",
    "lm-eval": "PD_TEST_LM_EVAL",
    "guidellm": "PD_TEST_GUIDELLM",
    "harmony": "PD_TEST_HARMONY",
    "schemathesis": "PD_TEST_SCHEMATHESIS",
}
# Stands for Python: makes an "environment", whose pip does as the variable says.
PYTHON = """#!/bin/sh
mkdir -p "$4/bin" && printf '#!/bin/sh\\nexit $PIP_STATUS\\n' >"$4/bin/python" &&
    chmod +x "$4/bin/python"
"""


def find_peer(
    peer: str, directory: Path, pip_status: int, **variables: str
) -> subprocess.CompletedProcess[str]:
    python = directory.parent / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    command = ["sh", str(SCRIPT), peer, str(directory), str(python)]
    empty = dict.fromkeys(VARIABLES.values(), "")
    env = {**os.environ, **empty, "PIP_STATUS": str(pip_status), **variables}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True)


@pytest.mark.parametrize("peer", VARIABLES)
def test_a_program_that_is_named_is_taken(tmp_path: Path, peer: str) -> None:
    done = find_peer(peer, tmp_path / "env", 1, **{VARIABLES[peer]: "/opt/program"})
    assert done.stdout == "/opt/program\n"
    assert not (tmp_path / "env").exists()


@pytest.mark.parametrize(
    ("peer", "program"),
    [("aiperf", "aiperf"), ("schemathesis", "schemathesis"), ("frameworks", "python")],
)
def test_it_is_installed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peer: str, program: str
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    directory = tmp_path / "env"
    printed = f"{directory}/{peer}/bin/{program}\n"
    assert find_peer(peer, directory, 0).stdout == printed
    # It is there, so we do not install it again.
    assert find_peer(peer, directory, 1).stdout == printed


@pytest.mark.parametrize("peer", VARIABLES)
def test_without_a_package_index_nothing_is_left_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peer: str
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    done = find_peer(peer, tmp_path / "env", 1)
    assert (done.stdout, done.returncode) == ("", 0)
    assert "the tests that need it are skipped" in done.stderr
    assert not (tmp_path / "env" / peer).exists()
