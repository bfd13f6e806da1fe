"""The examples of README.md and docs/api.md do what they are there for, on real processes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from processes import Deployment, deployment

from pd.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
# The name that an example gives to somebody's request.
UNKNOWN_RID = "my-request"


def blocks(name: str, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / name).read_text(), re.M | re.S)
    return [code for of, code in found if of == language]


def curls(name: str) -> list[str]:
    """Every curl command, over as many lines as its quotes or backslashes make it."""
    found = []
    for block in blocks(name):
        lines = block.splitlines()
        while lines:
            command = lines.pop(0)
            while lines and (command.endswith("\\") or command.count("'") % 2):
                command += "\n" + lines.pop(0)
            if command.startswith("curl "):
                found.append(command)
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployment(EMBEDDED_MODEL, tmp_path_factory.mktemp("documents")) as running:
        yield running


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
@pytest.mark.parametrize(
    "command", [c for name in ("README.md", "docs/api.md") for c in curls(name)]
)
def test_curl(command: str, served: Deployment) -> None:
    assert "http://127.0.0.1:8000" in command
    command = command.replace("http://127.0.0.1:8000", served.proxy.url)
    ended = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60
    )
    if '"stream": true' in command:
        assert ended.stdout.rstrip().endswith("data: [DONE]"), ended.stdout
        return
    answer: Any = json.loads(ended.stdout)
    assert ("error" in answer) == (UNKNOWN_RID in command), answer


def test_python(served: Deployment) -> None:
    (code,) = blocks("README.md", "python")
    code = code.replace("http://127.0.0.1:8000", served.proxy.url)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            linked = (page.parent / target) if target else page
            assert linked.exists(), f"{page.name}: {target}"
            if anchor:
                titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
                anchors = [re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles]
                assert anchor in anchors, f"{page.name}: {target}#{anchor}"
