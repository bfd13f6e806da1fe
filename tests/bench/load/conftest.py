"""Scripted servers in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = Path(__file__).with_name("scripted_server.py")


@dataclass
class Scripted:
    """A running scripted server and what it logged."""

    url: str
    log: Path

    def sent(self) -> dict[str, list[tuple[float, int]]]:
        """By measured request: when each event was sent, and its tokens."""
        found: dict[str, list[tuple[float, int]]] = {}
        for name, at, count, _ in self._lines():
            if name.startswith("bench-") and "-warm-up-" not in name:
                found.setdefault(name, []).append((at, count))
        return found

    def prompts(self) -> dict[str, list[Any]]:
        """By session and turn, such as "3-0": its prompt."""
        lines = [(name, prompt) for name, _, _, prompt in self._lines() if prompt is not None]
        return {name.split("-", 2)[2]: prompt for name, prompt in lines if "bench-" in name}

    def prompts_of_all_runs(self) -> list[list[Any]]:
        return [prompt for _, _, _, prompt in self._lines() if prompt is not None]

    def _lines(self) -> list[Any]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[..., Scripted]]:
    """Starts servers, see `scripted_server.Settings`."""
    processes = []

    def start(**settings: Any) -> Scripted:
        log = tmp_path / f"server-{len(processes)}.log"
        command = [sys.executable, str(PROGRAM), str(log), json.dumps(settings)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return Scripted(f"http://127.0.0.1:{int(process.stdout.readline())}", log)

    yield start
    for process in processes:
        process.kill()
        process.wait()
