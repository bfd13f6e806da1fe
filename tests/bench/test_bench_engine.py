"""`pd-bench engine` measures a node that really serves, and its roofline is what one computes by
hand."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pd import cli
from pd.bench import engine_profile
from pd.bench.engine_roofline import CEILINGS, Roofline
from pd.bench.engine_sampling import sampling_params
from pd.bench.engine_steps import LoggedStep, StepLog
from pd.bench.engine_work import Simulated, Workload, parse_work
from pd.bench.shapes import EAGLE_SHAPES, NAMES, SHAPES, model_directory
from pd.core.errors import UsageError
from pd.grammar.lengths import split_lengths
from pd.models.config_reader import read_model_config
from pd.models.eagle_config import EagleConfig
from pd.structured.schema_rewriting import rewrite_schema

FLAGS = ["engine", "--model", "embedded", "--device", "cpu", "--cpu-threads", "1"]


def test_measures_every_kind_of_work_in_one_node(tmp_path, capsys) -> None:
    output = tmp_path / "engine.json"
    work = ["decode:1,3", "prefill:48", "cached:48", "offline:5x20x4"]
    size = ["--context", "40", "--steps", "12", "--repeats", "3", "--kv-cache-tokens", "4096"]
    assert cli.bench([*FLAGS, "--work", *work, *size, "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert {"command", "commit", "machine", "date", "settings", "results"} == set(report)
    assert report["command"].startswith("pd-bench engine --model embedded")
    assert report["settings"]["kv_cache_tokens"] == 4096
    rows = {row["work"]: row for row in report["results"]}
    assert list(rows) == ["decode:1", "decode:3", "prefill:48", "cached:48", "offline:5x20x4"]
    for row in rows.values():
        assert 0 < row["median_ms"] <= row["p90_ms"]
        assert row["roofline_ms"] is None and row["vllm_ms"] is None
    for batch in (1, 3):
        row = rows[f"decode:{batch}"]
        assert row["repeats"] == 12
        assert 40 < row["context"] < 80
        assert row["tokens_per_s"] == pytest.approx(batch / row["median_ms"] * 1e3, rel=0.01)
    assert rows["prefill:48"]["repeats"] == rows["cached:48"]["repeats"] == 3
    offline = rows["offline:5x20x4"]
    assert offline["tokens_per_s"] == pytest.approx(20 / offline["median_ms"] * 1e3, rel=0.01)
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_steps_with_a_part_of_a_prompt_are_measured(tmp_path) -> None:
    output = tmp_path / "engine.json"
    work = ["mixed:3:16:40", "mixed:1:8:0"]
    size = ["--context", "40", "--repeats", "2", "--kv-cache-tokens", "4096"]
    assert cli.bench([*FLAGS, "--work", *work, *size, "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["results"]
    assert [row["work"] for row in rows] == work
    for row, tokens in zip(rows, (19, 9), strict=True):
        assert row["tokens_per_s"] == pytest.approx(tokens / row["median_ms"] * 1e3, rel=0.01)
    assert cli.bench([*FLAGS, "--work", "mixed:3:0:40", *size]) == 2


@pytest.mark.full
def test_steps_with_other_sampling_are_measured(tmp_path) -> None:
    output = tmp_path / "engine.json"
    work = ["sampled:2", "filters:2", "penalties:2", "schema:2", "schema-bounded:2"]
    work += ["schema-prefill:48"]
    size = ["--context", "40", "--steps", "12", "--repeats", "3", "--kv-cache-tokens", "4096"]
    assert cli.bench([*FLAGS, "--work", *work, *size, "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["results"]
    assert [row["work"] for row in rows] == work
    assert [row["repeats"] for row in rows] == [12, 12, 12, 12, 12, 3]


@pytest.mark.full
def test_steps_under_a_schema_whose_strings_have_lengths_are_measured(tmp_path) -> None:
    output = tmp_path / "engine.json"
    size = ["--context", "40", "--steps", "60", "--kv-cache-tokens", "4096"]
    work = ["schema-bounded:1", "schema-bounded:3"]
    assert cli.bench([*FLAGS, "--work", *work, *size, "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["results"]
    assert [row["work"] for row in rows] == work
    assert [row["repeats"] for row in rows] == [60, 60]


def test_the_lengths_of_a_bounded_schema_are_counted_beside_its_grammar() -> None:
    grammar = sampling_params("schema-bounded", 0, 1).grammar
    assert (
        grammar is not None and split_lengths(rewrite_schema(json.loads(grammar.text))) is not None
    )


def test_drafts_are_measured_beside_plain_steps(tmp_path) -> None:
    output = tmp_path / "engine.json"
    draft = ["--speculative-algorithm", "draft", "--speculative-draft-model", "embedded"]
    work = ["--work", "decode:2", "spec:2:3", "spec:1:4", "--context", "40", "--steps", "10"]
    rest = ["--speculative-adaptive", "off", "--kv-cache-tokens", "4096"]
    assert cli.bench([*FLAGS, *draft, *work, *rest, "--output", str(output)]) == 0
    rows = {row["work"]: row for row in json.loads(output.read_text())["results"]}
    assert list(rows) == ["decode:2", "spec:2:3", "spec:1:4"]
    assert rows["decode:2"]["acceptance_length"] is None
    # A model that drafts for itself is right.
    assert rows["spec:2:3"]["acceptance_length"] == pytest.approx(4.0)
    assert rows["spec:1:4"]["acceptance_length"] == pytest.approx(5.0)
    row = rows["spec:2:3"]
    assert row["tokens_per_s"] == pytest.approx(8 / row["median_ms"] * 1e3, rel=0.01)


@pytest.mark.full
def test_acceptance_is_simulated(tmp_path) -> None:
    output = tmp_path / "engine.json"
    flags = ["--speculative-algorithm", "ngram", "--speculative-adaptive", "off"]
    work = ["--work", "spec:2:3", "--context", "40", "--steps", "60", "--simulate-acceptance"]
    assert cli.bench([*FLAGS, *flags, *work, "1.0", "--output", str(output)]) == 0
    (row,) = json.loads(output.read_text())["results"]
    assert row["acceptance_length"] == 1.0
    # Without a drafter there is nothing to verify.
    assert cli.bench([*FLAGS, *work, "2.0"]) == 1
    assert cli.bench([*FLAGS, *flags, *work, "4.5"]) == 1


@pytest.mark.parametrize(("length", "drafted"), [(1.0, 3), (2.88, 3), (4.0, 3), (1.5, 1), (3.0, 7)])
def test_simulated_acceptance_has_the_mean_that_was_asked_for(length: float, drafted: int) -> None:
    rng = np.random.default_rng(1)
    simulated = Simulated(length, drafted, rng)
    accepted = [simulated(drafted) for _ in range(300)]
    assert min(accepted) >= 0 and max(accepted) <= drafted
    assert 1 + np.mean(accepted) == pytest.approx(length, abs=0.03)


def test_a_work_that_cannot_be_done_fails_and_the_others_count(tmp_path, capsys) -> None:
    output = tmp_path / "engine.json"
    flags = ["--work", "decode:2", "prefill:64", "--context", "40", "--steps", "4"]
    limits = ["--max-running-requests", "1", "--kv-cache-tokens", "512", "--repeats", "1"]
    assert cli.bench([*FLAGS, *flags, *limits, "--output", str(output)]) == 1
    rows = json.loads(output.read_text())["results"]
    assert [row["work"] for row in rows] == ["prefill:64"]
    error = capsys.readouterr().err
    assert "pd-bench engine: decode:2: 0 steps decoded 2 sequences together" in error


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--work", "decode"], "--work decode: give decode:BATCH (or sampled,"),
        (["--work", "prefill:0"], "--work prefill:0: give"),
        (["--work", "offline:8x32"], "--work offline:8x32: give"),
        (["--profile-work", "prefill:8"], "--profile-work prefill:8: give decode:B, spec:B:K"),
        (["--profile-work", "decode:1,2"], "--profile-work decode:1,2: give decode:B"),
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--output", "/nowhere/engine.json"], "there is no directory /nowhere"),
        (["--page-size", "3"], "--page-size must be one of"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(flags, complaint, capsys) -> None:
    assert cli.bench([*FLAGS, *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pd-bench engine: ")
    assert complaint in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("flags", [[], ["--model", "embedded"]])
def test_work_without_its_flag_is_told_of_the_flag(flags, capsys) -> None:
    with pytest.raises(SystemExit):
        cli.bench(["engine", *flags, "decode:2"])
    error = capsys.readouterr().err
    assert "give works as --work decode:2" in error
    assert len(error.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_profile_needs_a_gpu(tmp_path, capsys) -> None:
    assert cli.bench([*FLAGS, "--profile", str(tmp_path / "trace.json")]) == 2
    assert "torch sees no CUDA device here" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("work", ["decode:2", "sampled:2", "mixed:2:8:16", "verify:2:3"])
def test_a_profile_holds_the_steps_of_one_work(work, tmp_path, monkeypatch, capsys) -> None:
    """As on a GPU, except for what the profiler looks at."""
    activities = SimpleNamespace(CUDA=ProfilerActivity.CPU)
    monkeypatch.setattr(engine_profile, "ProfilerActivity", activities)

    def load_profiler() -> None:
        with profile(activities=[ProfilerActivity.CPU]):
            torch.zeros(1).add_(1)

    monkeypatch.setattr(engine_profile, "load_profiler", load_profiler)
    monkeypatch.setattr(engine_profile, "_PLAIN", 6)
    path = tmp_path / "trace.json.gz"
    flags = ["--work", "verify:1:1", "--context", "24", "--steps", "10", "--profile-work", work]
    size = ["--kv-cache-tokens", "4096"]
    assert cli.bench([*FLAGS, *flags, *size, "--profile", str(path)]) == 0
    facts = json.loads(gzip.decompress(path.read_bytes()))["pd_steps"]
    assert facts["work"] == work
    assert f"--profile-work {work}" in facts["command"]
    assert 10 <= facts["steps"] <= 20
    assert facts["step_ms"] > 0 and facts["traced_step_ms"] > 0
    assert f"{facts['steps']} steps of {work}; summarize it" in capsys.readouterr().out


def test_work_is_read_from_its_short_form() -> None:
    texts = ["decode:1,64", "prefill:1024", "cached:9", "offline:512x1024x128"]
    assert parse_work(texts, 2048) == [
        Workload("decode", 1, 2048),
        Workload("decode", 64, 2048),
        Workload("prefill", 1, 1024),
        Workload("cached", 1, 9),
        Workload("offline", 512, 1024, 128),
    ]
    works = parse_work(texts, 2048)
    assert [str(work) for work in works] == ["decode:1", "decode:64", *texts[1:]]
    with pytest.raises(UsageError):
        parse_work(["decode:1x2"], 2048)


def test_intervals_lie_between_neighbours_of_the_same_batch() -> None:
    log = StepLog.__new__(StepLog)
    log.steps = [
        LoggedStep(0.0, 2, False, 0.0, 2),  # a prompt is among them
        LoggedStep(1.0, 2, True, 10.0, 2),
        LoggedStep(1.5, 2, True, 11.0, 2),
        LoggedStep(9.0, 1, True, 12.0, 2),
        LoggedStep(9.5, 2, True, 13.0, 2),
        LoggedStep(9.75, 2, True, 14.0, 2),
    ]
    assert log.find_intervals(2) == [(0.5, 11.0, 2), (0.25, 14.0, 2)]
    assert log.find_intervals(1) == []


def test_named_models_have_a_configuration() -> None:
    for name in NAMES:
        assert read_model_config(model_directory(name)).num_layers > 0
    for name in EAGLE_SHAPES:
        target = read_model_config(model_directory(name.removesuffix("-eagle3")))
        assert EagleConfig.from_pretrained(model_directory(name), target).layer.num_layers == 1
    found = {path.name for path in model_directory(SHAPES[0]).parent.iterdir()}
    assert {*SHAPES, *EAGLE_SHAPES} == found


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-30b-a3b", 30.5), ("deepseek-v2-lite", 15.7), ("glm-4.7-flash", 29.9)],
)
def test_shapes_have_as_many_weights_as_their_makers_say(name: str, billions: float) -> None:
    for kind in ("", "-fp8"):
        config = read_model_config(model_directory(name + kind))
        embeddings = 2 * config.vocab_size * config.hidden_size
        total = config.count_weights(config.num_experts) + embeddings
        assert total / 1e9 == pytest.approx(billions, rel=0.003)
        assert (config.quantization is not None) == bool(kind)


def roofline(name: str, num_gpus: int = 1) -> Roofline:
    config = read_model_config(model_directory(name))
    return Roofline(config, 2, CEILINGS["NVIDIA H200"], num_gpus)


def test_the_roofline_of_the_8b_shape() -> None:
    """As in the reference numbers, which were made independently."""
    model = roofline("llama-3.1-8b")
    for batch, milliseconds in ((1, 3.5), (8, 3.7), (32, 4.5), (64, 5.6), (128, 7.7), (256, 11.9)):
        assert model.decode_seconds(batch, 1080) * 1e3 == pytest.approx(milliseconds, rel=0.02)
    assert model.prefill_seconds(8192) * 1e3 == pytest.approx(165, rel=0.01)
    assert model.prefill_seconds(32768) * 1e3 == pytest.approx(920, rel=0.01)
    # 16 tokens are computed: weights and the whole prompt's KV are read.
    weights = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) + 4096 * 128256
    cached = (2 * weights + 32752 * 131072) / 4.33e12
    assert model.prefill_seconds(32768, cached=32752) == pytest.approx(cached)
    assert model.offline_seconds(512, 1024, 128, 256) == pytest.approx(
        512 * model.prefill_seconds(1024) + 2 * 127 * model.decode_seconds(256, 1088)
    )
    assert roofline("llama-3.1-8b", 2).decode_seconds(8, 1024) == pytest.approx(
        model.decode_seconds(8, 1024) / 2
    )


def test_the_roofline_of_experts_grows_with_those_that_a_batch_touches() -> None:
    model = roofline("mixtral-8x1b")
    one, many = model.decode_seconds(1, 1), model.decode_seconds(64, 1)
    layer, expert = 2 * 2048 * (2048 + 256) + 2048 * 8, 3 * 2048 * 5632
    head = 2048 * 32000
    assert one == pytest.approx(2 * (22 * (layer + 2 * expert) + head) / 4.33e12, rel=1e-3)
    assert many == pytest.approx(2 * (22 * (layer + 8 * expert) + head) / 4.33e12, rel=1e-3)


def test_the_roofline_of_gpt_oss_has_experts_in_four_bits_and_windows() -> None:
    layer, expert = 2 * 2880 * (4096 + 512) + 2880 * 32, 3 * 2880 * 2880
    others = 2 * (24 * layer + 2880 * 201088)
    kv = 2 * 2 * 8 * 64 * 12 * (4096 + 128)
    for name, width in (("gpt-oss-20b", 17 / 32), ("gpt-oss-20b-bf16", 2)):
        seconds = (others + 24 * 4 * expert * width + kv) / 4.33e12
        assert roofline(name).decode_seconds(1, 4096) == pytest.approx(seconds)


def test_the_roofline_of_fp8_has_a_head_in_bfloat16() -> None:
    layers = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)
    head, kv = 2 * 4096 * 128256, 2 * 2 * 1024 * 32
    for name in ("llama-3.1-8b-fp8", "llama-3.1-8b-fp8-blocks"):
        model = roofline(name)
        assert model.decode_seconds(1, 1) == pytest.approx((layers + head + kv) / 4.33e12)
        products = 2 * layers * 8192 / 1.49e15
        pairs = 8192 * 8193 / 2 * 4 * 32 * 4096
        assert model.prefill_seconds(8192) == pytest.approx(products + (pairs + head) / 800e12)
