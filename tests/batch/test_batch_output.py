"""The output of a batch can be gone on with, whatever happened to the run before."""

from __future__ import annotations

import json
import os
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
    output.append(result("another"))
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
    first.append(result("b"))
    first.close()
    assert list(read_results(path)) == ["a", "b"]
    open_output(path).close()


def test_a_line_that_does_not_fit_on_the_disk_is_not_there_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    output = open_output(path)
    output.append(result("a"))
    write = os.write

    def full(fd: int, data: Any) -> int:
        if len(data) < 50:
            raise OSError(28, "No space left on device")
        return write(fd, data[:50])

    with monkeypatch.context() as patch, pytest.raises(SetupError, match="No space left"):
        patch.setattr(os, "write", full)
        output.append(result("b"))
    output.append(result("c"))
    output.close()
    assert list(read_results(path)) == ["a", "c"]


@pytest.mark.parametrize("name", ["", "nowhere/out.jsonl"])
def test_a_place_where_nothing_can_be_written_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=f"cannot write {tmp_path}"):
        open_output(tmp_path / name)
