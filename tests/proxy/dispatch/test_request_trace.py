"""``--trace-requests``: a trace of what the proxy served."""

from __future__ import annotations

import errno
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from fake_node import wait_until

from pd.bench.load.datasets.trace import read_window
from pd.core.errors import UsageError
from pd.proxy.dispatch import request_trace

if TYPE_CHECKING:
    from pathlib import Path

    from proxy_cluster import Cluster

SHARED = [7] * 512


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if "\n" in line]


def test_rows_tell_lengths_and_what_prompts_share(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    cluster.pair(context_length=2000, pages={"total": 1000, "free": 1000})
    client = cluster.client(text=False, trace_requests=str(path))

    def ask(tokens: list[int], length: int, **fields: Any) -> None:
        sampling = {"max_new_tokens": length, "ignore_eos": True}
        body = {"input_ids": tokens, "sampling_params": sampling | fields.pop("sampling", {})}
        client.post("/generate", json=body | fields).raise_for_status()

    ask([*SHARED, 1, 2, 3], 5)
    ask([*SHARED, 1, 2, 4], 6, sampling={"n": 2})
    ask([*SHARED, 1, 2, 3], 2, cache_salt="another tenant")
    assert client.post("/generate", json={"input_ids": []}).status_code == 400
    wait_until(lambda: len(rows_of(path)) == 3)
    first, second, third = rows_of(path)
    assert set(first) == {"timestamp", "input_length", "output_length", "hash_ids"}
    assert [row["output_length"] for row in (first, second, third)] == [5, 6, 2]
    assert {row["input_length"] for row in (first, second, third)} == {515}
    assert first["hash_ids"][0] == second["hash_ids"][0]
    assert first["hash_ids"][1] != second["hash_ids"][1]
    assert not set(first["hash_ids"]) & set(third["hash_ids"]), "tenants share nothing"
    assert 0 <= first["timestamp"] <= second["timestamp"] < 60_000
    assert all(0 <= number < 1 << 53 for number in first["hash_ids"])
    assert [row.output_length for row in read_window(path, (0, 3600))] == [5, 6, 2]


def test_every_request_has_one_row_whichever_process_served_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    cluster.pair()
    proxy = cluster.proxy(text=False, trace_requests=str(path))

    def ask(length: int) -> None:
        sampling = {"max_new_tokens": 3, "ignore_eos": True}
        body = {"input_ids": [5] * length, "sampling_params": sampling}
        with httpx.Client(base_url=proxy.url, timeout=20) as client:
            client.post("/generate", json=body).raise_for_status()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(1, 41)))
    wait_until(lambda: len(rows_of(path)) == 40)
    rows = rows_of(path)
    assert sorted(row["input_length"] for row in rows) == list(range(1, 41))
    assert {row["output_length"] for row in rows} == {3}


def test_a_disk_that_stands_still_costs_rows_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_trace, "_MOST_TOKENS", 10)
    goes_on, written = threading.Event(), []

    def write(line: bytes) -> int:
        goes_on.wait(10)
        written.append(line)
        return len(line)

    trace = request_trace.RequestTrace(tmp_path / "trace", 0.0)
    trace._file = SimpleNamespace(write=write, close=lambda: None)  # type: ignore[assignment]
    spec = SimpleNamespace(token_ids=np.zeros(6, np.int32), namespace="")
    choices = [SimpleNamespace(output_ids=[1, 2])]
    ended: Any = SimpleNamespace(spec=spec, created=1.0, choices=choices)
    for _ in range(100):
        trace.add_prompt(ended)
    assert "rows are lost" in caplog.text
    goes_on.set()
    trace.close()
    assert [json.loads(line)["input_length"] for line in written] == [6]


def test_a_row_that_is_torn_on_a_full_disk_leaves_those_behind_it_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace"
    trace = request_trace.RequestTrace(path, 0.0)
    file = trace._file
    room = iter([None, 30, 1, 0, None, None])

    def write(line: bytes) -> int:
        size = next(room)
        if size == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return file.write(line[:size])

    trace._file = SimpleNamespace(write=write, close=file.close)  # type: ignore[assignment]
    choices = [SimpleNamespace(output_ids=[1, 2])]
    for size in range(1, 7):
        spec = SimpleNamespace(token_ids=np.zeros(size, np.int32), namespace="")
        ended: Any = SimpleNamespace(spec=spec, created=1.0, choices=choices)
        trace.add_prompt(ended)
    trace.close()
    assert "a row is lost: the disk took a part of it" in caplog.text
    assert [row.input_length for row in read_window(path, (0, 3600))] == [1, 5, 6]
    assert "1 line is not JSON" in caplog.text


@pytest.mark.one_process("no process of the proxy starts")
def test_a_file_that_cannot_be_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.write_text("{}\n")
    with pytest.raises(UsageError, match=r"--trace-requests .*used has rows already"):
        cluster.proxy(text=False, wait_ready=0, trace_requests=str(used))
    missing = tmp_path / "no" / "trace"
    with pytest.raises(UsageError, match=r"--trace-requests .*No such file or directory"):
        cluster.proxy(text=False, wait_ready=0, trace_requests=str(missing))
