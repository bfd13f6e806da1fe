"""`scripts/gpu_idle.py`: what is idle is what no kernel, copy or fill covers."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import gpu_idle
import pytest

if TYPE_CHECKING:
    from pathlib import Path


def event(name: str, begin: float, end: float, cat: str = "kernel", device: int = 0) -> Any:
    args = {"device": device}
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "args": args}


def step(begin: float) -> list[Any]:
    """100 us: two kernels that overlap, 10 us of nothing, a copy, 5 us of nothing."""
    return [
        event("matmul", begin, begin + 60),
        event("attention", begin + 50, begin + 80),
        event("Memcpy DtoH (Device -> Pinned)", begin + 90, begin + 95, "gpu_memcpy"),
        event("launch", begin, begin + 99, "cuda_runtime"),
    ]


def write(path: Path, events: list[Any], **facts: Any) -> Path:
    path.write_text(json.dumps({"traceEvents": events, **facts}))
    return path


def test_idle_shares_of_whole_and_step(tmp_path: Path, capsys: Any) -> None:
    facts = {"work": "decode:64", "steps": 4, "step_ms": 0.095, "traced_step_ms": 0.1}
    events = [e for number in (3, 1, 0, 2) for e in step(1000 + 100 * number)]
    trace = write(tmp_path / "trace.json", events, pd_steps=facts)
    output = tmp_path / "idle.json"
    assert gpu_idle.main([str(trace), "--output", str(output)]) == 1
    report = json.loads(output.read_text())
    summary = report["settings"]
    assert summary["work"] == "decode:64"
    assert summary["traced_ms"] == 0.395
    assert summary["idle_ms"] == 0.055
    assert summary["idle_share"] == round(55 / 395, 4)
    assert summary["idle_share_in_long_gaps"] == round(40 / 395, 4)
    assert summary["longest_gap_us"] == 10.0
    assert summary["steps_seen"] == 3
    assert summary["idle_share_of_median_step"] == summary["idle_share_of_worst_step"] == 0.15
    assert summary["idle_share_without_tracing"] == pytest.approx(
        1 - 340 / 395 * 100 / 95, abs=1e-4
    )
    first = report["results"][0]
    assert (first["kernel"], first["launches"], first["total_ms"]) == ("matmul", 4, 0.24)
    assert "at most 3.00%: NO" in capsys.readouterr().out
    assert gpu_idle.main([str(trace), "--limit", "0.2"]) == 0


def test_without_one_copy_a_step_only_the_whole_is_told(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.json", step(0) + step(100), pd_steps={"steps": 20})
    spans, facts = gpu_idle.read_trace(trace)
    assert "idle_share_of_median_step" not in gpu_idle.summarize(spans, facts)


def test_reads_compressed_traces_and_refuses_those_without_one_gpu(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": step(0)}).encode()))
    assert len(gpu_idle.read_trace(path)[0]) == 3
    for events in ([], [event("a", 0, 1), event("b", 0, 1, device=1)]):
        with pytest.raises(SystemExit, match="GPUs, not of one"):
            gpu_idle.read_trace(write(tmp_path / "trace.json", events))
