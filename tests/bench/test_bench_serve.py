"""`pd-bench serve` measures nodes and a proxy over HTTP, and takes times from when bytes come."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from cluster import Cluster

from pd import cli
from pd.bench.load.endpoints import Completions
from pd.bench.load.records import read_records
from pd.bench.serve import MixedLoad, Prompts, measure_unloaded
from pd.bench.serve_client import BenchRequest, CompletionReception, Server
from pd.core.errors import NodeFailedError, UsageError
from pd.embedded import EMBEDDED_MODEL
from pd.proxy.config import ProxyConfig
from pd.proxy.server import ProxyThread

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Served:
    """A pair in this process, and the URL of a proxy before it."""

    cluster: Cluster
    url: str


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Cluster(EMBEDDED_MODEL, kv_cache_tokens=16384) as cluster:
        prefill, decode = cluster.pair
        with ProxyThread(ProxyConfig(prefill=[prefill.url], decode=[decode.url], port=0)) as proxy:
            yield Served(cluster, proxy.url)


def test_measures_alone_and_under_load(served, tmp_path, capsys) -> None:
    output = tmp_path / "serve.json"
    flags = ["--url", served.url, "--unloaded", "24,80", "--repeats", "4", "--outputs", "5"]
    load = "streams=2,in=10,out=60,long=64,every=1,long_out=3,seconds=2"
    assert cli.bench(["serve", *flags, "--load", load, "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert report["command"].startswith("pd-bench serve --url")
    assert set(report["settings"]) == {"client_cpu_share", "tokens_per_s", "tokens_per_event"}
    assert report["settings"]["tokens_per_s"] > 0
    rows = {(row["work"], row["metric"]): row for row in report["results"]}
    for length in (24, 80):
        first = rows[f"unloaded:{length}", "first token"]
        second = rows[f"unloaded:{length}", "second token after the first"]
        last = rows[f"unloaded:{length}", "last token"]
        assert first["count"] == last["count"] == 4
        assert 1 <= second["count"] <= 4  # less those that came together with the first
        assert 0 < first["p50_ms"] < last["p50_ms"]
        assert 0 < second["p50_ms"] < last["p50_ms"]
    assert rows["load", "first token of long prompts"]["count"] == 2
    itl = rows["load", "ITL of the streams"]
    assert itl["count"] >= rows["load", "ITL of the streams from token 2 on"]["count"] > 0
    assert itl["p50_ms"] <= itl["p95_ms"] <= itl["p99_ms"] <= itl["p99.9_ms"] <= itl["max_ms"]
    assert "client_cpu_share" in capsys.readouterr().out
    served.cluster.wait_idle()  # who was hung up on is gone


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        (["--dataset-name", "shared-prefix", "--num-prefixes", "1", "--prefix-len", "64"], 5),
        pytest.param(
            ["--dataset-name", "multi-turn", "--turns", "2", "--turn-input-len", "8"],
            5,
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["--dataset-name", "random", "--endpoint", "/generate"], 5, marks=pytest.mark.full
        ),
        pytest.param(
            ["--dataset-name", "random", "--endpoint", "/v1/chat/completions"],
            5,
            marks=pytest.mark.full,
        ),
        (["--dataset-name", "structured", "--random-output-len", "200"], None),
    ],
    ids=["shared-prefix", "multi-turn", "generate", "chat", "structured"],
)
def test_load_on_a_split_is_measured_and_leaves_nothing_behind(
    served, tmp_path, flags, tokens, capsys
) -> None:
    """Counts come from the token ids; caches, stages and schemas are the deployment's own."""
    out = tmp_path / "out"
    common = ["--num-prompts", "4", "--random-input-len", "16", "--random-output-len", "5"]
    patient = ["--max-client-lag-ms", "100000", "--max-client-cpu", "10"]
    command = ["--url", served.url, *common, *patient, *flags, "--output-dir", str(out)]
    assert cli.bench(["serve", *command, "--max-concurrency", "2"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    found, records = summary["measures"], read_records(out / "requests.jsonl")
    assert found["completed"] == len(records) == (8 if "multi-turn" in flags else 4)
    assert "fields_the_server_refuses" not in summary["notes"]
    assert summary["server"]["stages_mean_ms"]["prefill"] > 0
    (transfers,) = summary["server"]["transfers"].values()
    assert 0 < transfers["count"] <= found["completed"]
    assert transfers["gigabytes_per_s"] > 0
    for record in records:
        assert record.counted_by == "token_ids"
        assert tokens in (None, record.output_tokens)
        assert sum(record.tokens or ()) == record.output_tokens
    if "shared-prefix" in flags or "multi-turn" in flags:
        assert found["cached_share"] > 0
    if "/generate" in flags:
        assert found["stages_ms"]["prefill"]["count"] == 4
    # Where answers have no stages, the end of the run says why.
    said = "pd says so with --endpoint /generate" in capsys.readouterr().out
    assert said == ("stages" in summary["notes"]) == ("/generate" not in flags)
    if "structured" in flags:
        assert found["structured"]["answers"] == 4
        # An answer that its length ended is no whole JSON.
        whole = [r for r in records if r.finish_reason == "stop"]
        assert all(record.valid_output for record in whole)
    served.cluster.wait_idle()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--unloaded", "64,8180"], "--unloaded 8180 and --outputs 16 make 8196 tokens"),
        (["--load", ""], "--load long=8192,long_out=32 make 8224 tokens"),
        (["--load", "in=8000"], "--load in=8000,out=900 make 8900 tokens"),
    ],
)
def test_what_the_context_does_not_hold_is_refused_at_once(
    served, capsys, flags, complaint
) -> None:
    assert cli.bench(["serve", "--url", served.url, *flags]) == 2
    error = capsys.readouterr().err
    assert f"{complaint}; the model's context is 8192: give less" in error
    assert len(error.splitlines()) == 1


def test_a_refused_prompt_is_an_error_in_one_line(served, capsys) -> None:
    flags = ["--unloaded", "24", "--vocab-size", "99999999"]
    assert cli.bench(["serve", "--url", served.url, *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith("pd-bench serve: ")
    assert "HTTP status 400" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "nothing to measure: give --unloaded, --load or both"),
        (["--unloaded", "12,x"], "--unloaded is lengths of prompts"),
        (["--load", "streams=0"], "--load is streams=N, in=N, out=N, long=N"),
        (["--load", "strands=3"], "not strands=3"),
        (["--unloaded", "8", "--url", "127.0.0.1"], "--url is http://HOST:PORT or https"),
        (["--unloaded", "8", "--url", "http://HOST:PORT"], "--url is http://HOST:PORT or https"),
        (["--unloaded", "8", "--url", "http://[::1:8000"], "--url is http://HOST:PORT or https"),
        (["--unloaded", "8", "--url", "http://é..x:9"], "cannot reach http://é..x:9/v1/models: "),
        (["--unloaded", "8", "--url", "http://[::1]:9"], "cannot reach http://[::1]:9/v1/models: "),
        (["--unloaded", "8"], "cannot reach http://127.0.0.1:9/v1/models: "),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(flags, complaint, capsys) -> None:
    assert cli.bench(["serve", "--url", "http://127.0.0.1:9", *flags]) in (1, 2)
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.splitlines()) == 1


def test_what_is_left_out_of_a_load_has_its_default() -> None:
    assert MixedLoad.parse("") == MixedLoad()
    assert MixedLoad.parse("in=3,out=4,every=0.25") == MixedLoad(num_in=3, num_out=4, every=0.25)
    with pytest.raises(UsageError):
        MixedLoad.parse("every=soon")


async def reception(*pieces: tuple[float, bytes]) -> CompletionReception:
    """As if these pieces had come at these times."""
    made = CompletionReception(Completions())
    made._pieces = list(pieces)
    return made


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(*ids: int) -> bytes:
    choice = {"index": 0, "text": "", "token_ids": list(ids), "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def test_an_event_has_come_when_its_last_byte_has() -> None:
    first, second = chunk(event(1)), chunk(event(2, 3))
    end = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    pieces = [(1.0, HEAD + first), (2.0, second[:10]), (3.0, second[10:] + chunk(event(4)) + end)]
    found = asyncio.run(reception(*pieces)).completion()
    assert found.error is None
    assert found.times == [1.0, 3.0, 3.0]
    assert found.counts == [1, 2, 1]


def test_an_event_may_lie_in_two_chunks_and_chunks_may_be_of_no_token() -> None:
    data = event(1)
    pieces = [(1.0, HEAD + chunk(data[:7])), (2.0, chunk(data[7:])), (3.0, chunk(event()))]
    found = asyncio.run(reception(*pieces)).completion()
    assert (found.times, found.counts) == ([2.0], [1])
    assert found.error == "the connection ended in the middle of the stream"


def test_failures_are_told() -> None:
    refused = b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull"
    assert asyncio.run(reception((1.0, refused))).completion().error == "HTTP status 429: full"
    assert asyncio.run(reception()).completion().error == "the connection ended without an answer"
    broken = HEAD + chunk(b'data: {"error": {"message": "gone"}}\n\n')
    assert "gone" in str(asyncio.run(reception((1.0, broken))).completion().error)


def test_an_answer_of_another_length_is_refused(served) -> None:
    class Shorter(Server):
        def make_request(self, prompt: list[int], max_tokens: int) -> BenchRequest:
            return super().make_request(prompt, max_tokens - 1)

    server = Shorter(served.url, None)
    with pytest.raises(NodeFailedError, match="3 tokens came, not 4"):
        asyncio.run(measure_unloaded(server, Prompts(2000, 0), 16, 4, 1))
