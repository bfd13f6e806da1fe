"""Whoever reads the output of a process may stop reading: it serves on, and it ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from processes import LAUNCH, Process, free_port, kill_all

from pd.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KINDS = (
    "pipe",
    "terminal",
    pytest.param("named pipe", marks=pytest.mark.full),
    pytest.param("socket", marks=pytest.mark.full),
)
# What a process that ends leaves its output, and much more.
SOON = 60.0
UNIFIED = ("unified", "--model", str(EMBEDDED_MODEL), "--device", "cpu", "--cpu-threads", "1")


class Reader:
    """The two ends of some output, of which nothing is read before :meth:`read`.

    Attributes:
        descriptor: for the process that writes.
        filled: bytes that were in it before.
    """

    def __init__(self, kind: str, directory: Path) -> None:
        self.filled = 0
        self._descriptors: list[int] = []
        if kind == "socket":
            ends = socket.socketpair()
            self._own, self.descriptor = (end.detach() for end in ends)
        elif kind == "terminal":
            self._own, self.descriptor = pty.openpty()
        elif kind == "named pipe":
            path = directory / "pipe"
            os.mkfifo(path)
            self._own = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self.descriptor = os.open(path, os.O_WRONLY)
        else:
            self._own, self.descriptor = os.pipe()

    def fill(self) -> Reader:
        """Leave no room for another byte."""
        os.set_blocking(self.descriptor, False)
        for size in (4096, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    self.filled += os.write(self.descriptor, b"\n" * size)
        os.set_blocking(self.descriptor, True)
        return self

    def read(self, is_enough: Callable[[str], object]) -> str:
        """Everything, until that is enough or no more can come."""
        os.set_blocking(self._own, False)
        found, end = b"", time.monotonic() + SOON
        while time.monotonic() < end and not is_enough(found.decode(errors="replace")):
            select.select([self._own], [], [], 0.1)
            try:
                part = os.read(self._own, 1 << 20)
            except BlockingIOError:
                continue
            except OSError:  # nobody has the terminal any more
                break
            if not part:
                break
            found += part
        return found.decode(errors="replace")[self.filled :].replace("\r\n", "\n")

    def close(self) -> None:
        os.close(self._own)
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


@pytest.fixture
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reader]:
    found = Reader(getattr(request, "param", "pipe"), tmp_path)
    yield found
    found.close()


# ---- processes that serve


def stream(url: str, tokens: int = 40) -> str:
    """The text of one streamed answer."""
    body: dict[str, Any] = {"prompt": "What is the KV cache?", "max_tokens": tokens, "stream": True}
    body["ignore_eos"] = True
    text = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


def check_service(tmp_path: Path, log: Reader, commands: list[list[str]]) -> None:
    """Start nodes and a proxy, which is the last, on a log that is full; have them answer; read the
    log; fill it again, and stop them."""
    log.fill()
    nodes: list[Process] = []
    try:
        for command in commands:
            urls = [part for node in nodes for part in (f"--{node.command[0]}", node.url)]
            more = [*(urls if command[0] == "proxy" else []), "--log-level", "debug"]
            nodes.append(Process(*command, *more, log=tmp_path / "pipe"))
            nodes[-1].ready()
        serve_and_stop(nodes, log)
    finally:
        kill_all(nodes)


def serve_and_stop(nodes: list[Process], log: Reader) -> None:
    url = nodes[-1].url
    for _ in range(3):
        assert stream(url)
    # Somebody reads again.
    text = log.read(lambda text: text.count("listens on") == len(nodes))
    assert text.count("listens on") == len(nodes), text
    log.fill()
    for _ in range(3):
        assert stream(url)
    for node in reversed(nodes):
        node.child.terminate()
        assert node.child.wait(SOON) == 0


@pytest.mark.parametrize("reader", ["named pipe"], indirect=True)
def test_streams_go_on_while_nobody_reads_the_log(tmp_path: Path, reader: Reader) -> None:
    check_service(tmp_path, reader, [[*UNIFIED, "--port", "0"], ["proxy", "--port", "0"]])


@pytest.mark.full
@pytest.mark.parametrize("reader", ["named pipe"], indirect=True)
@pytest.mark.parametrize("tp_size", ["1", "2"])
def test_streams_go_on_with_every_kind_of_process(
    tmp_path: Path, reader: Reader, tp_size: str
) -> None:
    ports = ["--port", "0", "--tp-size", tp_size]
    prefill = ["prefill", *UNIFIED[1:], *ports, "--bootstrap-port", "0"]
    proxy = ["proxy", "--port", "0", "--workers", "2"]
    check_service(tmp_path, reader, [prefill, ["decode", *UNIFIED[1:], *ports], proxy])


@pytest.mark.parametrize("kind", ["pipe", pytest.param("socket", marks=pytest.mark.full)])
def test_a_proxy_serves_and_ends_though_nobody_reads_anything(tmp_path: Path, kind: str) -> None:
    """Not even the ready line."""
    out, err = (Reader(kind, tmp_path).fill() for _ in range(2))
    port = free_port()
    command = [sys.executable, *LAUNCH, "proxy", "--port", str(port)]
    proxy = subprocess.Popen(command, stdout=out.descriptor, stderr=err.descriptor)
    try:
        end = time.monotonic() + SOON
        status = 0
        while status != 200 and time.monotonic() < end:
            with contextlib.suppress(httpx.TransportError):
                status = httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code
            time.sleep(0.05)
        assert status == 200
        proxy.terminate()
        assert proxy.wait(SOON) == 0
    finally:
        proxy.kill()
        proxy.wait()
        out.close()
        err.close()


@pytest.mark.parametrize(
    "command",
    [
        ["proxy", "--no-such-flag"],
        pytest.param(["proxy", "--port", "{taken}"], marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_errors_end_a_process_whether_they_are_read_or_not(
    reader: Reader, command: list[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = [word.format(taken=port) for word in command]
        ended = subprocess.Popen([sys.executable, *LAUNCH, *words], stderr=reader.descriptor)
        assert ended.wait(SOON) in (1, 2)
        text = reader.read(lambda text: "\n" in text)
        assert str(port) in text or "--no-such-flag" in text
        reader.fill()
        ended = subprocess.Popen([sys.executable, *LAUNCH, *words], stderr=reader.descriptor)
        assert ended.wait(SOON) in (1, 2)


# ---- the writer


PREFACE = """
import faulthandler, logging, os, sys, threading, time
from pd.util import output
from pd.util.exit import exit_now
from pd.util.logs import configure_logging
faulthandler.enable()
output.write_without_waiting("stdout", "stderr")
configure_logging(logging.INFO, "here")
logger = logging.getLogger("test")
def tell(word):
    with open(sys.argv[1], "a") as file:
        file.write(f"{word}\\n")
"""


class Program:
    """A process that logs to ``reader``, and tells what it has done in a file."""

    def __init__(self, reader: Reader, tmp_path: Path, text: str) -> None:
        self._told = tmp_path / "told"
        self._told.touch()
        source = PREFACE + textwrap.dedent(text)
        self.process = subprocess.Popen(
            [sys.executable, "-c", source, str(self._told)],
            stdin=subprocess.PIPE,
            stdout=reader.descriptor,
            stderr=reader.descriptor,
        )
        os.close(reader.descriptor)  # the output ends with the process

    def wait_for(self, word: str) -> None:
        end = time.monotonic() + SOON
        while word not in self._told.read_text().split():
            assert time.monotonic() < end, word
            time.sleep(0.01)

    def go_on(self) -> None:
        """End the program's ``input()``."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()


@pytest.mark.parametrize("reader", KINDS, indirect=True)
def test_lines_that_nobody_reads_are_dropped_and_counted(reader: Reader, tmp_path: Path) -> None:
    program = Program(
        reader,
        tmp_path,
        """
        for number in range(50_000):
            logger.info("line %06d %s", number, "x" * 50)
        tell("logged")
        input()
        while output.lost_lines() and not output._writers[2].wait_until_written(0.1):
            pass
        logger.info("later")
        print(f"lost {output.lost_lines()}", file=sys.stderr)
        exit_now(0)
        """,
    )
    program.wait_for("logged")
    program.go_on()
    text = reader.read(lambda _: False)
    assert program.process.wait(SOON) == 0
    lines = text.splitlines()
    shown = [int(line.split("line ")[1][:6]) for line in lines if " test: line " in line]
    said = [
        (number, int(found[1]))
        for number, line in enumerate(lines)
        if (found := re.search(r"WARNING \[here\] pd\.util\.logs: (\d+) lines of this log", line))
    ]
    assert len(said) == 1, said
    place, count = said[0]
    assert shown == list(range(50_000 - count))
    assert "here, because nobody read it" in lines[place]
    assert len(shown) == place  # what was dropped would stand here
    assert "later" in lines[place + 1]
    assert lines[-1] == f"lost {count}"


ENDS = {
    "leave": ("exit_now(3)", 3),
    "exit": ("sys.exit(3)", 3),
    "text": ("sys.exit('a last word')", 1),
    "exception": ("raise RuntimeError('unexpected')", 1),
    "abort": ("os.abort()", -6),
    "thread": ("threading.Timer(0.1, exit_now, (3,)).start(); time.sleep(60)", 3),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("reader", KINDS, indirect=True)
def test_a_process_ends_though_nobody_reads(
    request: pytest.FixtureRequest, reader: Reader, tmp_path: Path, end: str
) -> None:
    kind = request.node.callspec.params["reader"]
    if end == "abort" and kind in ("socket", "terminal"):
        pytest.skip("the report of a crash waits for other readers than those of pipes")
    reader.fill()
    statement, status = ENDS[end]
    program = Program(reader, tmp_path, f"logger.info('x' * 100)\nprint('y' * 100)\n{statement}")
    assert program.process.wait(SOON) == status


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_last_words_of_a_process_are_there_to_be_read(
    reader: Reader, tmp_path: Path, end: str, slow: bool
) -> None:
    """Whoever reads slowly has two seconds."""
    if slow and end == "abort":
        pytest.skip("a crash waits for nobody")
    statement, status = ENDS[end]
    if slow:
        reader.fill()
    program = Program(
        reader,
        tmp_path,
        f"logger.error('a last line')\nprint('printed')\ntell('logged')\n{statement}",
    )
    if slow:
        program.wait_for("logged")
    text = reader.read(lambda _: False)
    assert program.process.wait(SOON) == status
    if end != "abort":
        assert "a last line" in text and "printed" in text
    expected = {"exception": "RuntimeError: unexpected", "abort": "Fatal Python error: Aborted"}
    assert expected.get(end, "") in text
    assert end != "text" or "a last word" in text


def test_a_forked_process_has_a_thread_of_its_own(reader: Reader, tmp_path: Path) -> None:
    """It is forked while the pipe is full, and what waits belongs to its parent alone."""
    reader.fill()
    program = Program(
        reader,
        tmp_path,
        """
        logger.info("before")
        children = []
        def log(): 
            while not stop.is_set():
                logger.info("beside")
                time.sleep(0.001)
        stop = threading.Event()
        threading.Thread(target=log, daemon=True).start()
        for number in range(20):
            pid = os.fork()
            if not pid:
                logger.info("child %d", number)
                print(f"printed by child {number}", file=sys.stderr)
                tell(f"child{number}")
                output.wait_for_output(60)
                os._exit(0)
            children.append(pid)
        stop.set()
        tell("forked")
        for child in children:
            assert os.waitpid(child, 0)[1] == 0
        logger.info("after")
        output.wait_for_output(60)
        """,
    )
    program.wait_for("forked")
    for number in range(20):
        program.wait_for(f"child{number}")
    text = reader.read(lambda _: False)
    assert program.process.wait(SOON) == 0
    for number in range(20):
        assert len(re.findall(rf"test: child {number}\n", text)) == 1
        assert len(re.findall(rf"printed by child {number}\n", text)) == 1
    assert len(re.findall("before|after", text)) == 2


def test_libraries_and_reports_of_crashes_do_not_wait_for_a_pipe(
    reader: Reader, tmp_path: Path
) -> None:
    """They write to the descriptor themselves, and so do processes that they start."""
    reader.fill()
    program = Program(
        reader,
        tmp_path,
        """
        import ctypes, subprocess
        libc = ctypes.CDLL(None)
        for descriptor in (1, 2):
            libc.write(descriptor, b"x" * 100_000, 100_000)
        subprocess.run(["sh", "-c", "printf %100000d 0 >&2; printf %100000d 0"])
        faulthandler.dump_traceback(all_threads=True)
        tell("done")
        """,
    )
    program.wait_for("done")
    assert program.process.wait(SOON) == 0


def test_the_other_end_of_a_shared_pipe_goes_on_waiting(reader: Reader, tmp_path: Path) -> None:
    """Only this process must not wait: a shell has the same pipe."""
    shared = os.dup(reader.descriptor)
    program = Program(reader, tmp_path, "tell('started'); input(); exit_now(0)")
    program.wait_for("started")
    assert os.get_blocking(shared)
    assert not fcntl.fcntl(shared, fcntl.F_GETFL) & os.O_NONBLOCK
    os.close(shared)
    program.go_on()
    assert program.process.wait(SOON) == 0


def test_many_threads_write_whole_lines(reader: Reader, tmp_path: Path) -> None:
    program = Program(
        reader,
        tmp_path,
        """
        def log(name):
            for number in range(300):
                logger.info("%s %d %s", name, number, "x" * 200)
        threads = [threading.Thread(target=log, args=(f"t{n}",)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        output.wait_for_output(60)
        """,
    )
    lines = reader.read(lambda _: False).splitlines()
    assert program.process.wait(SOON) == 0
    for name in range(8):
        found = [line for line in lines if f" t{name} " in line]
        assert [int(line.split()[-2]) for line in found] == list(range(300))
        assert all(line.endswith("x" * 200) for line in found)


def test_a_reader_that_has_left_stops_nothing(reader: Reader, tmp_path: Path) -> None:
    program = Program(
        reader,
        tmp_path,
        """
        tell("started")
        input()
        for number in range(100):
            logger.info("line %d", number)
            output.wait_for_output(10)
        assert output.lost_lines() == 100
        tell("done")
        exit_now(0)
        """,
    )
    program.wait_for("started")
    os.close(reader._own)
    program.go_on()
    program.wait_for("done")
    assert program.process.wait(SOON) == 0
    reader._own = os.open(os.devnull, os.O_RDONLY)


def test_signal_handlers_may_log(reader: Reader, tmp_path: Path) -> None:
    """They interrupt the thread that is just logging."""
    program = Program(
        reader,
        tmp_path,
        """
        import signal
        signal.signal(signal.SIGALRM, lambda *_: print("handled", file=sys.stderr))
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        for number in range(20_000):
            print("line", file=sys.stderr)
        signal.setitimer(signal.ITIMER_REAL, 0)
        tell("done")
        output.wait_for_output(60)
        """,
    )
    text = ""

    def read() -> None:
        nonlocal text
        text = reader.read(lambda _: False)

    reading = threading.Thread(target=read)
    reading.start()
    program.wait_for("done")
    assert program.process.wait(SOON) == 0
    reading.join(SOON)
    assert text.count("line") + text.count("handled") > 20_000
