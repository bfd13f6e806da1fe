"""Packages that people use with other servers work on pd, unchanged.

Each program of `tests/clients/programs` does what users of its package do, and fails by itself. The
packages need other versions than pd, so `make test-all` makes environments of their own with
`sh scripts/peer_environment.sh PEER .peers`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Served

PROGRAMS = Path(__file__).parent / "programs"
# The variable with the interpreter for each program.
INTERPRETERS = {
    "langchain_chat": "PD_TEST_FRAMEWORKS",
    "litellm_calls": "PD_TEST_FRAMEWORKS",
    "openai_agents": "PD_TEST_FRAMEWORKS",
    "pydantic_ai_agents": "PD_TEST_FRAMEWORKS",
    "llama_index_chat": "PD_TEST_LLAMA_INDEX",
    "lm_eval_tasks": "PD_TEST_LM_EVAL",
    "guidellm_run": "PD_TEST_GUIDELLM",
}
pytestmark = pytest.mark.full


def run_program(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that finds neither pd nor anything of the user's."""
    alone = {"PYTHONPATH": "", "HOME": str(directory), "HF_HUB_OFFLINE": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PD_")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=kept | alone, cwd=directory
    )


@pytest.mark.parametrize("name", INTERPRETERS)
def test_a_package_works_unchanged(name: str, served: Served, tmp_path: Path) -> None:
    python = os.environ.get(INTERPRETERS[name], "")
    if not python:
        pytest.skip(f"{INTERPRETERS[name]} names no interpreter")
    program = str(PROGRAMS / f"{name}.py")
    ended = run_program([python, program, served.url, str(served.model)], tmp_path)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]


# Some of the requests that Schemathesis makes for a path and a seed.
CASES, SEED = "5", os.environ.get("PD_TEST_SEED", "7")
# Paths that would end the deployment of the other tests.
ADMIN = "^/(workers|flush_cache|reset_prefix_cache|abort_request)"


def test_no_generated_request_is_an_internal_error(served: Served, tmp_path: Path) -> None:
    """Schemathesis finds the requests in the server's own description."""
    program = os.environ.get("PD_TEST_SCHEMATHESIS", "")
    if not program:
        pytest.skip("PD_TEST_SCHEMATHESIS names no program")
    command = [program, "run", f"{served.url}/openapi.json", "--url", served.url]
    command += ["--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing"]
    command += ["--max-examples", CASES, "--seed", SEED, "--exclude-path-regex", ADMIN]
    command += ["--suppress-health-check", "all", "--request-timeout", "60", "--no-color"]
    ended = run_program(command, tmp_path)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
