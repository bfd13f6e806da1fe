"""Packages of pd as other releases have it, and processes that run them."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pd

OLD_BUILD = "75580878"
# Not from the directory in which the tests run.
PROGRAM = ("-P", "-m", "pd.cli")
_ADDED = "    of_a_later_release: tuple[int, ...] = (1,)\n"
# Structures that get another field, which they send.
_GROWING = {
    "core/messages.py": ("ProxyHeartbeat", "NodeHeartbeat", "PeerHeartbeat", "Output", "RoleState"),
    "core/node_info.py": ("NodeInfo",),
    "core/node_load.py": ("NodeLoad",),
}


def later_release(directory: Path, version: str) -> dict[str, str]:
    """Write this tree's package with another version, and more fields in what it sends; returns
    the environment of processes that run it."""
    package = shutil.copytree(
        Path(pd.__file__).parent,
        directory / "later" / "pd",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    _change(package / "__init__.py", f'"{pd.__version__}"', f'"{version}"')
    for file, names in _GROWING.items():
        for name in names:
            _grow(package / file, name)
    _change(package / "node/info.py", '"version"', '"of_a_later_release": [1], "version"')
    return {"PYTHONPATH": str(package.parent)}


def old_build(directory: Path) -> dict[str, str] | None:
    """Check out the package of a build that stated no release; returns the environment of
    processes that run it, or None where the history does not reach that far."""
    archive = directory / "old.tar"
    done = subprocess.run(
        ["git", "archive", "--output", str(archive), OLD_BUILD, "pd"],
        cwd=Path(pd.__file__).parents[1],
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        return None
    with tarfile.open(archive) as file:
        file.extractall(directory / "old", filter="data")
    return {"PYTHONPATH": str(directory / "old")}


def _change(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) >= 1, (path, before)
    path.write_text(text.replace(before, after, 1))


def _grow(path: Path, name: str) -> None:
    """Add a field behind the last one of a class."""
    text = path.read_text()
    ends = r"^(?:class |def |[A-Za-z_]+ = )|^    def |^    @"
    found = re.search(rf"^class {name}\(.*?(?={ends})", text, re.M | re.S)
    assert found is not None, name
    body = found.group()
    path.write_text(text.replace(body, body.rstrip() + "\n" + _ADDED + "\n\n", 1))
