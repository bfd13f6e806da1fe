"""The contracts of pyproject.toml notice imports that they forbid.

A contract that matches nothing is always kept. So we copy pd, plant an import that breaks each
contract, and let import-linter check the copy against the real contracts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SETTINGS = REPOSITORY / "pyproject.toml"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}\n"
LATER = "def planted():\n    {}\n"


class Planted(NamedTuple):
    """An import that a contract forbids.

    Attributes:
        package: gets a new module ``planted`` with the import.
        imported: the module or external package that the import names.
        template: source of the new module.
    """

    contract: str
    package: str
    imported: str
    template: str = "{}\n"


PLANTED = [
    Planted("Imports run downwards", "pd.core", "pd.engine.engine"),
    Planted("Imports run downwards", "pd.scheduling", "pd.node.node", FOR_TYPES),
    Planted("Imports run downwards", "pd.node", "pd.commands.parser", LATER),
    Planted("Imports run downwards", "pd.decode_node", "pd.prefill_node.sending"),
    Planted(
        "Proxies, deployments, batches and programs start without torch", "pd.batch", "torch", LATER
    ),
    Planted(
        "Proxies, deployments, batches and programs start without torch", "pd.proxy", "torch.nn"
    ),
    Planted("Programs with an offline model start without torch", "pd.offline", "torch", LATER),
    Planted("Proxies import only the core and the prefix cache", "pd.proxy", "pd.engine.engine"),
    Planted("Rooms of the proxy import downwards", "pd.proxy.http", "pd.proxy.api.service", LATER),
    Planted(
        "Rooms of the proxy import downwards", "pd.proxy.text", "pd.proxy.requests.chat", FOR_TYPES
    ),
    Planted(
        "Programs import only the core and the proxy's text", "pd.lang", "pd.proxy.api.service"
    ),
    Planted("Transfers import only the core and kernels", "pd.transfer", "pd.scheduling.core"),
    Planted(
        "Deployments, batches, the registry and the prefix cache import at most the core",
        "pd.cluster",
        "pd.batch.results",
        FOR_TYPES,
    ),
    Planted("The load generator imports only the core", "pd.bench.load", "pd.bench.serve", LATER),
    Planted("The load generator imports only the core", "pd.bench.load", "pd.cli"),
    Planted(
        "Only the engine and drafters reach for kernels, and only the engine for models",
        "pd.scheduling",
        "pd.kernels.sampling",
    ),
    Planted("Drafters do not reach for models", "pd.speculative", "pd.models.loader"),
    Planted("Nodes leave drafts to the scheduler", "pd.node", "pd.speculative.choice"),
    Planted(
        "The ends of hand-offs leave grammars to the scheduler",
        "pd.decode_node",
        "pd.grammar.grammars",
    ),
]


def check_imports(root: Path) -> str:
    """Check the package in this directory against our contracts, and return the report."""
    command = (
        "from importlinter.cli import lint_imports_command; lint_imports_command(prog_name='lint')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", command, "--no-cache", "--no-logo", str(SETTINGS)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not ended.stderr, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a copy of pd that has all planted imports."""
    root = tmp_path_factory.mktemp("planted")
    for source in (REPOSITORY / "pd").rglob("*.py"):
        target = root / source.relative_to(REPOSITORY)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    for number, planted in enumerate(PLANTED):
        module = root.joinpath(*planted.package.split("."), f"planted_{number}.py")
        module.write_text(planted.template.format(f"import {planted.imported}"))
    (root / "pd" / "unplaced").mkdir()
    (root / "pd" / "unplaced" / "__init__.py").write_text("")
    return root


@pytest.fixture(scope="module")
def report(copy: Path) -> str:
    return check_imports(copy)


@pytest.fixture(scope="module")
def sections(report: str) -> dict[str, str]:
    """The part of the report about each broken contract."""
    parts = re.split(r"^(.+)\n---+\n", report.partition("Broken contracts")[2], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_pd_keeps_all_contracts() -> None:
    assert re.search(r"Contracts: \d+ kept, 0 broken", check_imports(REPOSITORY))


def test_a_violation_of_every_contract_is_planted() -> None:
    contracts = tomllib.loads(SETTINGS.read_text())["tool"]["importlinter"]["contracts"]
    assert {contract["name"] for contract in contracts} == {each.contract for each in PLANTED}


@pytest.mark.parametrize("number", range(len(PLANTED)))
def test_a_planted_violation_is_found(number: int, sections: dict[str, str]) -> None:
    planted = PLANTED[number]
    # import-linter does not look into external packages.
    imported = "torch" if planted.imported.startswith("torch.") else planted.imported
    found = f"{planted.package}.planted_{number} -> {imported} (l."
    assert found in sections[planted.contract]


def test_a_package_without_a_layer_is_found(sections: dict[str, str]) -> None:
    assert "- pd.unplaced" in sections["Imports run downwards"]
