"""Fixtures of the tests of batches."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from batch_helpers import Scripted, ScriptedServer

from pd import cli
from pd.batch import attempts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def serve() -> Iterator[Callable[..., ScriptedServer]]:
    """Starts scripted servers, which stop with the test."""
    with ExitStack() as stack:

        def start(
            script: Callable[..., Scripted] = lambda body, times: Scripted(),
        ) -> ScriptedServer:
            server = ScriptedServer(script)
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture
def batch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    """Runs the command in this process, with short pauses; returns exit status and standard error,
    which no API key and no traceback is in."""
    monkeypatch.setattr(attempts, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setenv("PD_API_KEY", "a-secret")

    def launch(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        try:
            status = cli.launch(["batch", *map(str, arguments)])
        except SystemExit as error:
            status = int(error.code or 0)
        text = capsys.readouterr().err
        assert "a-secret" not in text and "Traceback" not in text
        return status, text

    return launch
