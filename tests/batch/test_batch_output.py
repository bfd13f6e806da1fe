"""The output of a batch can be gone on with, whatever happened to the run before."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import pytest
from batch_helpers import read_results
from hypothesis import given, settings
from hypothesis import strategies as st

from pd.batch.output import open_output
from pd.batch.requests import id_digest
from pd.core.errors import SetupError, UsageError

if TYPE_CHECKING:
    from pathlib import Path


def result(custom_id: str, status: int = 200, body: Any = None) -> bytes:
    response = {"status_code": status, "request_id": "r", "body": body or {}}
    line = {"id": "batch_req_1", "custom_id": custom_id, "response": response, "error": None}
    return json.dumps(line, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


LOST = (
    b'{"id":"batch_req_2","custom_id":"lost","response":null,'
    b'"error":{"code":"connection_lost","message":"m"}}\n'
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.text(max_size=5), st.sampled_from([200, 400, 404, 429, 500])), max_size=6
    ),
    st.data(),
)
def test_after_any_cut_the_whole_lines_count(
    tmp_path_factory: pytest.TempPathFactory, written: list[tuple[str, int]], data: st.DataObject
) -> None:
    lines = [result(custom_id, status) for custom_id, status in written]
    content = b"".join(lines)
    cut = content[: data.draw(st.integers(0, len(content)))]
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    path.write_bytes(cut)
    output = open_output(path)
    output.append_line(result("another"))
    output.close()
    whole = written[: _whole(lines, cut)]
    final = {
        custom_id: status for custom_id, status in reversed(whole) if status in (200, 400, 404)
    }
    assert output.done == {id_digest(i): status == 200 for i, status in final.items()}
    kept = [json.loads(line)["custom_id"] for line in path.read_bytes().split(b"\n")[:-1]]
    assert sorted(kept) == sorted([*final, "another"])


def _whole(lines: list[bytes], cut: bytes) -> int:
    """The number of lines that are there; a line without its line end is whole, too."""
    number = size = 0
    while number < len(lines) and size + len(lines[number]) - 1 <= len(cut):
        size += len(lines[number])
        number += 1
    return number


def test_a_file_is_replaced_only_if_lines_have_to_go(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(result("a") + result("b", 400) + b"\n" + result("c")[:20])
    before = path.stat().st_ino
    open_output(path).close()
    assert path.stat().st_ino == before
    assert path.read_bytes() == result("a") + result("b", 400) + b"\n"


def test_a_replaced_file_keeps_its_mode_and_the_link_to_it(tmp_path: Path) -> None:
    path, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    path.write_bytes(LOST + result("a", 503) + result("b"))
    path.chmod(0o640)
    link.symlink_to(path)
    open_output(link).close()
    assert list(read_results(path)) == ["b"]
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link.jsonl", "out.jsonl"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_replaced_file_never_has_more_rights_than_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, umask: int
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(result("a", 503) + result("b"))
    path.chmod(mode)
    seen = []
    replace = os.replace

    def replaced(new: str, old: Path) -> None:
        seen.append(os.stat(new).st_mode & 0o777)
        replace(new, old)

    made = tempfile.mkstemp

    def make(*args: Any, **more: Any) -> tuple[int, str]:
        fd, name = made(*args, **more)
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        return fd, name

    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(tempfile, "mkstemp", make)
    before = os.umask(umask)
    try:
        open_output(path).close()
    finally:
        os.umask(before)
    assert seen == [mode]
    assert path.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o027])
def test_a_new_file_has_the_rights_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        open_output(tmp_path / "out.jsonl").close()
    finally:
        os.umask(before)
    assert (tmp_path / "out.jsonl").stat().st_mode & 0o777 == 0o666 & ~umask


PLANTED = ("link to a file", "link to nothing", "folder", "pipe", "file of a killed run")


@pytest.mark.parametrize("kind", PLANTED)
def test_whatever_stands_next_to_the_file_is_left_alone(tmp_path: Path, kind: str) -> None:
    """Others can write to the folder, and know the name of the output."""
    path, secret = tmp_path / "out.jsonl", tmp_path / "secret"
    path.write_bytes(result("a", 503) + result("b"))
    path.chmod(0o644)
    secret.write_text("a secret")
    secret.chmod(0o600)
    names = [f"{before}out.jsonl{after}" for before in (".", "") for after in (".new", ".tmp", "~")]
    planted = [tmp_path / name for name in [*names, ".out.jsonl.part", "out.jsonl.bak"]]
    for place in planted:
        if kind == "link to a file":
            place.symlink_to(secret)
        elif kind == "link to nothing":
            place.symlink_to(tmp_path / f"made-{place.name}")
        elif kind == "folder":
            place.mkdir()
        elif kind == "pipe":
            os.mkfifo(place)
        else:
            place.write_bytes(result("c"))
    before = {place: place.lstat() for place in [*planted, secret]}
    for _ in range(2):
        open_output(path).close()
        path.write_bytes(result("a", 503) + path.read_bytes())
    assert secret.read_text() == "a secret" and secret.stat().st_mode & 0o777 == 0o600
    for place, then in before.items():
        now = place.lstat()
        assert (now.st_ino, now.st_mode, now.st_size) == (then.st_ino, then.st_mode, then.st_size)
    assert sorted(tmp_path.iterdir()) == sorted([*planted, secret, path])


@pytest.mark.parametrize("failing", ["os.fsync", "os.replace", "os.fchmod", "fcntl.flock"])
def test_nothing_stays_of_a_replacement_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(result("a", 503) + result("b"))
    content = path.read_bytes()
    monkeypatch.setattr("pd.batch.output._open_locked", lambda path, name: os.open(path, os.O_RDWR))

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(failing, fail)
    with pytest.raises(SetupError, match=r"cannot write .*No space left"):
        open_output(path)
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]
    assert path.read_bytes() == content


def test_a_killed_run_does_not_block_the_next(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(result("a", 503) + result("b"))
    program = (
        "import os, sys; from pathlib import Path; from pd.batch.output import open_output\n"
        "os.replace = lambda *_: os.kill(os.getpid(), 9)\n"
        "open_output(Path(sys.argv[1]))\n"
    )
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", program, str(path)]).returncode == -9
    open_output(path).close()
    assert list(read_results(path)) == ["b"]
    left = [file for file in tmp_path.iterdir() if file != path]
    assert len(left) == 2


@pytest.mark.parametrize("content", [b"hello", b'{"id":"x"}\n', result("a") + b"{}\n", b"\xff\n"])
def test_a_file_that_is_none_of_a_batch_is_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"line \d is not an answer of a batch"):
        open_output(path)
    assert path.read_bytes() == content


def test_two_runs_cannot_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(LOST + result("a"))
    first = open_output(path)  # has replaced it
    with pytest.raises(SetupError, match="another run writes"):
        open_output(path)
    first.append_line(result("b"))
    first.close()
    assert list(read_results(path)) == ["a", "b"]
    open_output(path).close()


def test_a_line_that_does_not_fit_on_the_disk_is_not_there_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    output = open_output(path)
    output.append_line(result("a"))
    write = os.write

    def full(fd: int, data: Any) -> int:
        if len(data) < 50:
            raise OSError(28, "No space left on device")
        return write(fd, data[:50])

    with monkeypatch.context() as patch, pytest.raises(SetupError, match="No space left"):
        patch.setattr(os, "write", full)
        output.append_line(result("b"))
    output.append_line(result("c"))
    output.close()
    assert list(read_results(path)) == ["a", "c"]


@pytest.mark.parametrize("name", ["", "nowhere/out.jsonl"])
def test_a_place_where_nothing_can_be_written_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=f"cannot write {tmp_path}"):
        open_output(tmp_path / name)
