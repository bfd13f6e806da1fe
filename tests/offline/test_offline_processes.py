"""Programs with an offline model: Ctrl-C, their end, and the processes that they leave."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import python_path, wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "security"))

from listening import listening, other_sockets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = Path(__file__).parent / "offline_program.py"
REPOSITORY = Path(__file__).parents[2]
# A batch ends so fast on a machine that has the time for it.
INTERRUPT_SECONDS = 1.0
END_SECONDS = 15.0


class Program:
    """One function of ``offline_program.py``, as a process."""

    def __init__(self, name: str, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), name],
            stdout=subprocess.PIPE,
            stderr=(directory / "stderr").open("w"),
            text=True,
            env=os.environ | {"PYTHONPATH": python_path(REPOSITORY), "TMPDIR": str(directory)},
        )

    def read_words(self, first: str) -> list[str]:
        """Read the next line, which begins with this, and return the words after it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(first), f"{line!r} instead of {first!r}"
        return line.removeprefix(first).split()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Program]]:
    """Start programs, which end with the test."""
    started: list[Program] = []

    def start_program(name: str) -> Program:
        started.append(Program(name, tmp_path))
        return started[-1]

    yield start_program
    for program in started:
        program.process.kill()
        program.process.wait()
        assert program.process.stdout is not None
        program.process.stdout.close()


def wait_gone(pid: int) -> None:
    """Wait until a process that is not ours has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([descriptor], [], [], END_SECONDS)
        assert ended, f"process {pid} still runs"
    finally:
        os.close(descriptor)


def test_ctrl_c_ends_a_batch_within_a_second_and_close_leaves_nothing(
    start: Callable[[str], Program],
) -> None:
    program = start("interrupt")
    (engine,) = program.read_words("under way")
    for pid in (program.process.pid, int(engine)):
        assert not listening(pid), "an offline model needs no port"
        assert not other_sockets(pid)
    began = time.monotonic()
    program.process.send_signal(signal.SIGINT)
    (run_delay,) = program.read_words("interrupted")
    assert time.monotonic() - began - float(run_delay) < INTERRUPT_SECONDS
    assert program.read_words("answered") == ["16"]
    assert "engine process ended with status -9" in " ".join(program.read_words("lost"))
    assert program.read_words("children") == []
    assert program.read_words("threads") == []
    assert program.read_words("directories") == []
    assert program.process.wait(END_SECONDS) == 0


@pytest.mark.full
@pytest.mark.parametrize("name", ["close", "drop"])
def test_the_engine_ends_with_its_model(name: str, start: Callable[[str], Program]) -> None:
    program = start(name)
    (engine,) = program.read_words("ready")
    assert program.read_words("children") == []
    wait_gone(int(engine))
    assert program.process.wait(END_SECONDS) == 0


@pytest.mark.full
def test_a_fork_of_the_program_does_not_keep_the_engine_from_ending(
    start: Callable[[str], Program],
) -> None:
    program = start("forked")
    assert program.read_words("status") == ["0"]
    assert program.process.wait(END_SECONDS) == 0


@pytest.mark.full
def test_the_engine_ends_with_a_program_that_does_not_close_it(
    start: Callable[[str], Program], tmp_path: Path
) -> None:
    program = start("leave")
    (engine,) = program.read_words("ready")
    assert program.process.wait(END_SECONDS) == 0
    wait_gone(int(engine))
    assert not list(tmp_path.glob("pd-*"))
    assert "Traceback" not in (tmp_path / "stderr").read_text()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_engine_ends_with_a_program_that_is_killed(
    number: signal.Signals, start: Callable[[str], Program], tmp_path: Path
) -> None:
    program = start("wait_forever")
    (engine,) = program.read_words("under way")
    program.process.send_signal(number)
    program.process.wait(END_SECONDS)
    wait_gone(int(engine))
    assert not list(tmp_path.glob("pd-*"))


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_engine_ends_with_a_program_that_is_killed_while_it_loads(
    number: signal.Signals, start: Callable[[str], Program]
) -> None:
    program = start("load")
    program.read_words("loading")
    tasks = Path(f"/proc/{program.process.pid}/task")

    def list_children() -> list[str]:
        return [pid for task in tasks.glob("*/children") for pid in task.read_text().split()]

    wait_until(list_children, END_SECONDS)
    (engine,) = list_children()
    program.process.send_signal(number)
    assert program.process.wait(END_SECONDS) != 0
    wait_gone(int(engine))
