"""The examples of README.md and the pages about the API work, on real processes."""

from __future__ import annotations

import importlib
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
# Examples of these pages are run.
API_PAGES = ("README.md", "docs/api.md", "docs/errors.md")
EXTENDING = ("docs/extending.md", "docs/extending-transfer.md")
# A word of the examples whose answer is an error: an unknown request, and an empty prompt.
REFUSED = ("my-request", '"prompt": []')


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
@pytest.mark.parametrize("command", [command for name in API_PAGES for command in curls(name)])
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
    assert ("error" in answer) == any(word in command for word in REFUSED), answer
    if "[]" in command:
        assert answer == json.loads(blocks("docs/errors.md", "json")[0])


def test_python(served: Deployment) -> None:
    (code,) = blocks("README.md", "python")
    code = code.replace("http://127.0.0.1:8000", served.proxy.url)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)


def test_batch(served: Deployment, tmp_path: Path) -> None:
    """The line that the documents show is answered as they show it."""
    (command,) = blocks("docs/batch.md")
    command = command.replace("http://127.0.0.1:8000", served.proxy.url)
    request, shown = map(json.loads, blocks("docs/batch.md", "json"))
    (tmp_path / "requests.jsonl").write_text(json.dumps(request))
    arguments = [sys.executable, "-m", "pd.cli", *command.split()[1:]]
    ended = subprocess.run(arguments, cwd=tmp_path, check=True, timeout=60, capture_output=True)
    assert ended.stdout == b"" and b"1 of 1 requests succeeded" in ended.stderr
    answer = json.loads((tmp_path / "answers.jsonl").read_text())
    assert answer.keys() == shown.keys() and answer["custom_id"] == request["custom_id"]
    assert answer["response"].keys() == shown["response"].keys()
    assert answer["response"]["body"]["choices"][0]["message"]["content"]


def pages() -> list[Path]:
    """The documents of every folder that has some."""
    folders = ("docs", "pd", "deploy", "training")
    return [*ROOT.glob("*.md"), *(p for name in folders for p in ROOT.glob(f"{name}/**/*.md"))]


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text()
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert linked | {"index.md"} == {page.name for page in ROOT.glob("docs/*.md")}


def test_links_lead_somewhere() -> None:
    for page in pages():
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            linked = (page.parent / target) if target else page
            assert linked.exists(), f"{page.name}: {target}"
            if anchor:
                titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
                anchors = [re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles]
                assert anchor in anchors, f"{page.name}: {target}#{anchor}"


def test_files_of_the_reading_order_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    files = set(re.findall(r"`((?:pd|tests|scripts|docs|benchmarks)/[\w./]*)`", text))
    assert len(files) > 40
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []


# Stand for whatever the reader calls it.
PLACEHOLDER = re.compile("NAME|squared_relu:")


def resolves(name: str) -> bool:
    """Whether a dotted name is a module of pd or an attribute of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        try:
            for attribute in parts[length:]:
                found = getattr(found, attribute)
        except AttributeError:
            # Fields of a dataclass without a default are no attributes of the class.
            return parts[-1] in getattr(found, "__annotations__", {})
        return True
    return False


def test_files_and_names_in_extending_are_there() -> None:
    text = "\n".join((ROOT / name).read_text() for name in EXTENDING)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    quoted = {name for name in re.findall(r"`([^`\n]+)`", text) if not PLACEHOLDER.search(name)}
    files = {name for name in quoted if re.match(r"(pd|tests|benchmarks)/", name)}
    names = {m[0] for name in quoted if (m := re.match(r"pd(\.\w+)+", name))} - {"pd.transfer"}
    assert len(files) > 30 and len(names) > 10
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []
    assert [name for name in sorted(names) if not resolves(name)] == []


def test_tables_and_tests_in_extending_are_there() -> None:
    """Names in capitals, functions that start with ``test_``, and methods, wherever they are."""
    text = "\n".join((ROOT / name).read_text() for name in EXTENDING)
    code = "\n".join(
        path.read_text() for path in [*ROOT.glob("pd/**/*.py"), *ROOT.glob("tests/**/*.py")]
    )
    tables = set(re.findall(r"^_?[A-Z][A-Z_]+\b", code, re.MULTILINE))
    defined = set(re.findall(r"\bdef (\w+)\(", code))
    classes = set(re.findall(r"\bclass (\w+)", code))
    listed = set(re.findall(r"`(_?[A-Z]{2,}(?:_[A-Z]+)*)`", text))
    owners = re.findall(r"`([A-Z]\w+)\.(\w+)`", text)
    assert listed and owners
    assert listed - {"NAME", "PDL", "KERNELS"} - tables == set()
    assert set(re.findall(r"`(test_\w+)`", text)) - defined == set()
    methods = set(re.findall(r"`(\w+)\([a-z_, ]*\)`", text))
    assert len(methods) > 20
    assert methods - {"make_mlp", "make_attention"} - defined == set()  # these are arguments
    assert {owner for owner, _ in owners} - classes == set()
    assert {name for _, name in owners} - defined == set()


def names_by_file(text: str) -> list[str]:
    """Dotted names: each quoted name of a cell belongs to the last file quoted before it."""
    found = []
    for cell in re.split(r"[|\n]", text):
        module = ""
        for quoted in re.findall(r"`([^`]+)`", cell):
            if re.fullmatch(r"pd/[\w/]+\.py", quoted):
                module = quoted.removesuffix(".py").replace("/", ".")
            elif module:
                found.append(f"{module}.{quoted}")
    return found


def test_names_in_the_tables_of_the_architecture_are_there() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    way = names_by_file(text.partition("## The way of a request")[2].partition("\n\nOn the")[0])
    assert len(way) > 40
    pages = text.partition("| from → to | method | when |")[2].partition("\n\n")[0]
    methods = {name for row in pages.splitlines() for name in re.findall(r"`(\w+)`", row)}
    assert len(methods) > 6
    owners = [f"pd.scheduling.memory.Memory.{name}" for name in sorted(methods)]
    assert [name for name in [*way, *owners] if not resolves(name)] == []


def test_methods_named_in_the_internals_are_there() -> None:
    pages = ("architecture", "threads", "steps")
    text = "\n".join((ROOT / f"docs/{name}.md").read_text() for name in pages)
    code = "\n".join(path.read_text() for path in ROOT.glob("pd/**/*.py"))
    methods = re.findall(r"`([A-Z]\w+)\.(\w+)`", text)
    assert len(methods) > 10
    for owner, name in methods:
        body = re.search(rf"^class {owner}\b.*?(?=^\S|\Z)", code, re.M | re.S)
        assert body and re.search(rf"\b{name}\b", body[0]), f"{owner}.{name}"
