"""We refuse to start with a library that lacks a name on which limits rely."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from packaging.requirements import Requirement

from pd.core.errors import SetupError
from pd.net.connections import GuardedServer
from pd.net.guarded_protocol import GuardedProtocol, _Flow
from pd.proxy.http.typed_routes import TypedRoute
from pd.util import libraries
from pd.util.libraries import PROXY_LIBRARIES, RELIANCES, Reliance, check_libraries

NAMES = [(reliance, name) for reliance in RELIANCES for name in reliance.names]


class Emptied:
    """A class or module that lacks one of its names."""

    def __init__(self, patch: pytest.MonkeyPatch, reliance: Reliance) -> None:
        self._patch = patch
        path, _, last = reliance.where.rpartition(".")
        is_class = last[:1].isupper()
        self.module: Any = importlib.import_module(path if is_class else reliance.where)
        self._class = getattr(self.module, last) if is_class else None

    def remove(self, name: str) -> None:
        if self._class is None:
            self._patch.delattr(self.module, name)
            return
        bases = self._class.__mro__[:-1]
        copies: Any = {}
        for base in reversed(bases):
            made = vars(base).get("__init__")
            members = {k: v for k, v in vars(base).items() if k not in (name, "__dict__")}
            members.pop("__weakref__", None)
            if isinstance(made, FunctionType) and name in made.__code__.co_names:
                names = tuple("gone" if n == name else n for n in made.__code__.co_names)
                code = made.__code__.replace(co_names=names)
                members["__init__"] = FunctionType(code, made.__globals__)
            copies[base] = type(base.__name__, (), members | {"__module__": base.__module__})
        joined = type(self._class.__name__, tuple(copies[base] for base in bases), {})
        joined.__module__ = "a test"
        self._patch.setattr(self.module, self._class.__name__, joined)


def test_the_installed_releases_have_all_names() -> None:
    check_libraries(PROXY_LIBRARIES)


@pytest.mark.parametrize(
    ("reliance", "name"), NAMES, ids=[f"{r.where.rpartition('.')[2]}.{n}" for r, n in NAMES]
)
def test_a_release_without_a_name_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, reliance: Reliance, name: str
) -> None:
    Emptied(monkeypatch, reliance).remove(name)
    with pytest.raises(SetupError) as refused:
        check_libraries(PROXY_LIBRARIES)
    message = refused.value.message
    last = reliance.where.rpartition(".")[2]
    assert message.startswith(f"{reliance.library} ")
    assert f" has no {last}.{name}, on which limits" in message
    assert f"pip install '{reliance.library}" in message
    assert "\n" not in message


@pytest.mark.parametrize("reliance", RELIANCES, ids=[r.where for r in RELIANCES])
def test_a_release_without_a_class_or_module_is_refused(
    monkeypatch: pytest.MonkeyPatch, reliance: Reliance
) -> None:
    path, _, last = reliance.where.rpartition(".")
    module = path if last[:1].isupper() else reliance.where
    if module == path:
        monkeypatch.delattr(importlib.import_module(path), last)
        with pytest.raises(SetupError, match=f"has no {reliance.where}, "):
            check_libraries(PROXY_LIBRARIES)
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]  # it is gone
    with pytest.raises(SetupError, match=f"has no {module}, "):
        check_libraries(PROXY_LIBRARIES)


@pytest.mark.parametrize("ours", [GuardedProtocol, _Flow, GuardedServer, TypedRoute])
def test_every_overridden_name_is_checked(ours: type) -> None:
    library = ours.__mro__[1].__module__.partition(".")[0]
    theirs = {name for base in ours.__mro__[1:] for name in vars(base)}
    overridden = {name for name in vars(ours) if name in theirs and not name.startswith("__")}
    checked = {name for r in RELIANCES if r.library in (library, "starlette") for name in r.names}
    assert overridden <= checked


def test_the_four_libraries_have_upper_bounds() -> None:
    """The installed releases, with which these tests pass, are within the bounds."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    wanted = [Requirement(line) for line in tomllib.loads(text)["project"]["dependencies"]]
    bounds = {requirement.name: requirement.specifier for requirement in wanted}
    for library in PROXY_LIBRARIES:
        assert {"<", ">="} == {bound.operator for bound in bounds[library]}
        assert libraries.importlib.metadata.version(library) in bounds[library]


@pytest.mark.parametrize(
    ("command", "where", "name"),
    [
        ("proxy", "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol", "_start_asgi_task"),
        ("unified", "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol", "on_body"),
        pytest.param(
            "proxy", "uvicorn.protocols.http.flow_control", "FlowControl", marks=pytest.mark.full
        ),
        pytest.param("proxy", "fastapi.routing", "APIRoute", marks=pytest.mark.full),
    ],
)
def test_a_command_ends_with_one_line(command: str, where: str, name: str) -> None:
    module, _, attribute = where.partition(":")
    owner = f"importlib.import_module({module!r})" + (f".{attribute}" if attribute else "")
    flags = ["--model", "/tmp"] if command == "unified" else []
    code = (
        f"import importlib, sys; delattr({owner}, {name!r}); from pd.cli import launch; "
        f"sys.exit(launch({[command, '--port', '0', *flags]!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1, line
    assert f"{name}, on which limits of this server rely" in line
