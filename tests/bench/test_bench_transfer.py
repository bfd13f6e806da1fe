"""`pd-bench transfer` moves real bytes, says where numbers come from and explains its errors."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from e2e.backends import MOONCAKE, NIXL
from forked_commands import ForkedCommand
from processes import Process

from pd import cli
from pd.bench import transfer_control
from pd.bench.transfer_ends import SourceEnd, TargetEnd, send_as_nodes
from pd.bench.transfer_spec import TransferSpec, load_shape, make_row
from pd.core.errors import TransferError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = ["--model", "embedded", "--tokens", "200", "--repeats", "2", "--seconds", "0"]
SMALL += ["--pattern", "nodes"]
FIELDS = {"backend", "device", "gb_s", "page_size", "tokens", "ceiling_gb_s", "ceiling", "layout"}


def spec(**changes) -> TransferSpec:
    settings = dict(
        backend="tcp",
        shape=load_shape("embedded", "auto"),
        page_size=16,
        tokens=200,
        layout="scattered",
        source_device="cpu",
        target_device="cpu",
        connections=0,
        repeats=1,
        seconds=0.0,
    )
    return TransferSpec(**{**settings, **changes})


@pytest.mark.full
def test_measures_several_backends_and_page_sizes_into_one_file(tmp_path, capfd) -> None:
    output = tmp_path / "transfer.json"
    flags = ["--backend", "tcp,fake", "--page-size", "16", "--output", str(output)]
    assert cli.bench(["transfer", *SMALL, *flags, "--connections", "2"]) == 0
    report = json.loads(output.read_text())
    assert {"command", "commit", "machine", "date", "results"} == set(report)
    assert report["command"].startswith("pd-bench transfer --model embedded --tokens 200")
    assert [row["backend"] for row in report["results"]] == ["tcp", "fake"]
    for row in report["results"]:
        assert set(row) >= FIELDS
        assert row["device"] == "cpu"
        assert row["bytes"] == 200 * 6 * 2 * 2 * 64 * 2
        assert 0 < row["gb_s"] <= row["best_gb_s"]
        assert 0 < row["ceiling_gb_s"] <= row["best_ceiling_gb_s"]
    assert report["results"][0]["ceiling"] == "2 plain sockets"
    shown = capfd.readouterr()
    assert len(shown.out.splitlines()) == 3
    assert "tcp, embedded, cpu, page size 16, nodes: 2/2" in shown.err


@pytest.mark.full
def test_a_backend_that_cannot_work_fails_and_the_others_count(tmp_path, capsys) -> None:
    output = tmp_path / "transfer.json"
    flags = ["--backend", "nvlink", "--backend", "tcp", "--output", str(output)]
    assert cli.bench(["transfer", *SMALL, *flags]) == 1
    assert [row["backend"] for row in json.loads(output.read_text())["results"]] == ["tcp"]
    assert (
        "pd-bench transfer: nvlink, embedded, cpu, page size 16, nodes:" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--backend", "ucx"], "unknown backend 'ucx'; choose from tcp, nixl"),
        (["--model", "nowhere"], "--model nowhere is neither a model directory"),
        (["--device", "gpu"], "--device is cpu, cuda or cuda:N, or two of them: P,D; not 'gpu'"),
        (["--page-size", "0"], "--page-size 0 is not a whole number above 0"),
        (["--pattern", "nodes,late"], "--pattern is one of nodes, groups, not 'late'"),
        (["--listen", "0.0.0.0:0"], "--listen 0.0.0.0 is not a loopback address"),
        (["--connect", "127.0.0.1:1"], "start pd-bench transfer --listen there first"),
        (["--connect", "somewhere"], "an address is HOST:PORT, not 'somewhere'"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(flags, complaint, capsys) -> None:
    assert cli.bench(["transfer", *flags]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("pd-bench transfer: ")
    assert complaint in error
    assert len(error.splitlines()) == 1


class RecordingSender:
    """Notes what it is given, ``(token_start, token_stop, layer_start, layer_stop)``."""

    def __init__(self, flops_per_byte: float) -> None:
        self.flops_per_byte = flops_per_byte
        self.sent: list[tuple[int, int, int, int]] = []

    def send(self, *what: int) -> None:
        self.sent.append(what)


@pytest.mark.parametrize("tokens", [100, 8192, 20_000])
def test_nodes_send_by_small_groups_or_late_where_a_pass_hides_it(tokens: int) -> None:
    measured = spec(shape=load_shape("llama-3.1-8b", "auto"), tokens=tokens)
    chunks = -(-tokens // measured.chunk)
    early, late = RecordingSender(0.0), RecordingSender(5000.0)
    for sender in (early, late):
        send_as_nodes(measured, sender)
        seen = np.zeros((tokens, measured.shape.layers), np.int32)
        for first, stop, layer, layers in sender.sent:
            seen[first:stop, layer:layers] += 1
        assert (seen == 1).all(), "every token and layer once"
    assert len(early.sent) == 8 * chunks
    assert len(late.sent) < len(early.sent)
    # What remains behind the last layer is little in either case.
    assert late.sent[-1][2] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(capsys) -> None:
    assert cli.bench(["transfer", *SMALL, "--device", "cpu,cuda:1"]) == 1
    assert "--device cuda:1: torch sees no CUDA device here" in capsys.readouterr().err


def test_shapes_come_from_a_name_a_directory_or_a_config(tmp_path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for given in (tmp_path, tmp_path / "config.json"):
        shape = load_shape(str(given), "auto")
        assert (shape.layers, shape.kv_heads, shape.head_dim) == (3, 2, 16)
        assert (shape.name, shape.dtype) == (tmp_path.name, "float16")
    assert load_shape("llama-3.1-8b", "float32").dtype == "float32"
    latents = load_shape("deepseek-v2-lite", "auto")
    assert spec(shape=latents).kv.token_bytes == 27 * (512 + 64) * 2
    assert str(latents) == "27 layers, rows of 576"
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be used"):
        load_shape(str(tmp_path), "auto")


class CorruptTarget(TargetEnd):
    """Loses one bit of what it received."""

    def _handle_commit(self, message):
        answer = super()._handle_commit(message)
        self._opened.pool.planes[0].buffer.view(torch.int16)[3, 1, int(self._pages[2]) * 16] ^= 1
        return answer


def test_bytes_that_differ_fail_the_measurement() -> None:
    listener = transfer_control.open_listener("127.0.0.1", 0, None)
    threading.Thread(target=_serve, args=(listener, CorruptTarget), daemon=True).start()
    sock = transfer_control.connect_socket("127.0.0.1", listener.getsockname()[1], None)
    control = transfer_control.Control(sock)
    source = SourceEnd(spec(), control, None)
    try:
        with pytest.raises(TransferError, match="the received bytes differ"):
            source.measure(lambda line: None)
    finally:
        control.close()
        source.manager.close()
        listener.close()


def _serve(listener, end: type[TargetEnd]) -> None:
    control = transfer_control.Control(transfer_control.accept_socket(listener, None))
    end(control, "cpu", None).serve()


def test_two_ends_measure_over_every_library(tmp_path) -> None:
    for backend in (NIXL, MOONCAKE):
        backend.require()
    output = tmp_path / "transfer.json"
    with decode_end() as (decode, address):
        flags = ["--backend", "nixl,mooncake", "--connect", address, "--output", str(output)]
        assert cli.bench(["transfer", *SMALL, *flags]) == 0
        assert decode.wait(timeout=30) == 0
    rows = json.loads(output.read_text())["results"]
    assert [row["backend"] for row in rows] == ["nixl", "mooncake"]


class ElsewhereTarget(TargetEnd):
    """Has its pool on another device than P thinks."""

    def _handle_open(self, message):
        return super()._handle_open(message) | {"target_device": "cuda:7"}


def test_the_decode_end_says_where_its_pool_is() -> None:
    listener = transfer_control.open_listener("127.0.0.1", 0, None)
    threading.Thread(target=_serve, args=(listener, ElsewhereTarget), daemon=True).start()
    sock = transfer_control.connect_socket("127.0.0.1", listener.getsockname()[1], None)
    control = transfer_control.Control(sock)
    try:
        found = SourceEnd(spec(), control, None).measure(lambda line: None)
    finally:
        control.close()
        listener.close()
    assert make_row(found)["device"] == "cpu,cuda:7"


@contextlib.contextmanager
def decode_end(*flags: str) -> Iterator[tuple[subprocess.Popen[str] | ForkedCommand, str]]:
    command = [sys.executable, "-m", "pd.bench", "transfer", "--listen", "127.0.0.1:0", *flags]
    root = Path(__file__).resolve().parents[2]
    decode: subprocess.Popen[str] | ForkedCommand
    if Process.forks:
        program = str(root / "pd" / "bench" / "__main__.py")
        decode = ForkedCommand(program, command[3:], env=os.environ, namespace=None, log=2)
    else:
        decode = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, text=True)
    assert decode.stdout is not None
    with decode.stdout:
        try:
            ready = json.loads(decode.stdout.readline())
            assert (ready["event"], ready["role"]) == ("ready", "decode")
            yield decode, ready["address"]
        finally:
            decode.kill()
            decode.wait(30)


@pytest.mark.parametrize("same_key", [True, False])
def test_two_hosts_measure_with_the_same_key_only(tmp_path, capsys, same_key) -> None:
    keys = [tmp_path / "ours", tmp_path / "theirs"]
    for number, path in enumerate(keys):
        path.write_text("secret of at least 16 bytes" + str(0 if same_key else number))
    with decode_end("--cluster-key-file", str(keys[1])) as (decode, address):
        flags = ["--connect", address, "--cluster-key-file", str(keys[0])]
        status = cli.bench(["transfer", *SMALL, *flags])
        if same_key:
            assert status == 0
            assert decode.wait(timeout=30) == 0
            assert "tcp       cpu" in capsys.readouterr().out
        else:
            assert status == 1
            assert "the cluster key" in capsys.readouterr().err
