"""The programs of ``examples/offline`` run, and also under vLLM's names of the modules."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pd
from pd.offline.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd import LLM

EXAMPLES = Path(__file__).parents[2] / "examples" / "offline"
# What each prints, in this order.
SHOWN = {
    "generate": ["What does the prefill node do?\n  The", "What is the KV cache?\n  The"],
    "chat": ["What is the KV cache?\n  The KV cache holds", "What is a unified node?\n  A unified"],
    "chat_with_tools": ['calls {"name": "count_pages"', "returns 'A ", "the model answers"],
    "structured_outputs": ["choice ", "regex ", "json ", "grammar ", "read: role=<Role."],
    "prefix_caching": [" 0 of them cached", " of them cached, "],
}
# `make test` runs these.
SHORT = ("chat",)


def assert_shown(name: str, printed: str) -> None:
    """Assert that the parts of the example's output came in their order."""
    at = 0
    for part in SHOWN[name]:
        found = printed.find(part, at)
        assert found >= 0, f"no {part!r} in {printed[at:]!r}"
        at = found + len(part)


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SHOWN.keys()
    assert len(SHOWN) >= 5


@pytest.fixture
def shared_llm(llm: LLM) -> Callable[..., LLM]:
    """A class whose only object is the model of the other tests. It checks the arguments."""

    def make(model: str, **arguments: Any) -> LLM:
        read_settings("LLM", model, arguments)
        llm.reset_prefix_cache()
        return llm

    return make


@pytest.mark.parametrize(
    "name",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in SHOWN],
)
def test_an_example_needs_only_other_imports_for_vllm(
    name: str,
    shared_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    vllm, sampling = types.ModuleType("vllm"), types.ModuleType("vllm.sampling_params")
    vllm.LLM, vllm.SamplingParams = shared_llm, pd.SamplingParams  # type: ignore[attr-defined]
    sampling.StructuredOutputsParams = pd.StructuredOutputsParams  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)
    monkeypatch.setattr(sys, "argv", [name])
    source = (EXAMPLES / f"{name}.py").read_text()
    changed = source.replace(
        "from pd import LLM, SamplingParams, StructuredOutputsParams",
        "from vllm import LLM, SamplingParams\n"
        "from vllm.sampling_params import StructuredOutputsParams",
    ).replace("from pd import LLM, SamplingParams", "from vllm import LLM, SamplingParams")
    assert "import pd" not in changed
    assert "from pd" not in changed
    # The examples find the small model relative to themselves.
    program = tmp_path / "examples" / "offline" / f"{name}.py"
    program.parent.mkdir(parents=True)
    (tmp_path / "pd").symlink_to(EXAMPLES.parents[1] / "pd")
    program.write_text(changed)
    runpy.run_path(str(program), run_name="__main__")
    assert_shown(name, capsys.readouterr().out)


def test_programs_of_the_documentation_print_what_it_shows(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Shared:
        """Lends the model of the other tests, and leaves it open."""

        def __init__(self, model: Path) -> None: ...

        def __enter__(self) -> LLM:
            return llm

        def __exit__(self, *exc: object) -> None: ...

    monkeypatch.setattr(pd, "LLM", Shared, raising=False)
    monkeypatch.setattr(pd, "Engine", Shared, raising=False)
    text = (EXAMPLES.parents[1] / "docs" / "offline.md").read_text()
    first, _, program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(first, "offline.md", "exec"), {})
    printed = capsys.readouterr().out
    assert f"$ python batch.py\n{printed}" in text
    exec(compile(program, "offline.md", "exec"), {})
    assert "We use it as the baseline." in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("name", SHOWN)
def test_an_example_runs_as_it_is(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parents[1])},
    )
    assert ended.returncode == 0, ended.stderr
    assert_shown(name, ended.stdout)
