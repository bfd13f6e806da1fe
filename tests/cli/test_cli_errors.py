"""Whatever is wrong with a command ends it at once, with one line that says what to do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pd.commands.node import check_early
from pd.core.config import NodeConfig
from pd.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

USAGE, ENVIRONMENT = 2, 1
EAGLE = "prefill --model {root}/model --speculative-algorithm eagle --speculative-draft-model"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and everything that can be wrong beside it."""
    root = tmp_path_factory.mktemp("place")
    (root / "model").symlink_to(EMBEDDED_MODEL)
    config = json.loads((root / "model" / "config.json").read_text())
    _write_model(root / "yarn", config | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    _write_model(root / "alien", config | {"architectures": ["AlienForCausalLM"]})
    _write_model(root / "halves", config | {"num_key_value_heads": 3})
    _write_model(root / "weightless", config)
    _write_model(root / "hot", config)
    (root / "hot" / "generation_config.json").write_text('{"temperature": "hot"}')
    head = json.loads((EMBEDDED_MODEL.parent / "embedded-eagle3" / "config.json").read_text())
    _write_model(root / "head-of-more-tokens", head | {"vocab_size": 4096})
    _write_model(root / "head-of-wider", head | {"target_hidden_size": 512})
    _write_model(root / "head-of-deeper", head | {"eagle_aux_hidden_state_layer_ids": [1, 3, 9]})
    _write_model(root / "head-without-weights", head)
    (root / "empty").mkdir()
    (root / "broken").mkdir()
    (root / "broken" / "config.json").write_text("{")
    (root / "short.key").write_text("secret\n")
    (root / "script.yaml").write_text("rules: [{do: explode}]\n")
    (root / "bad.yaml").write_text("port: [1, 2\nmodel: {")
    (root / "list.yaml").write_text("- port\n")
    (root / "unknown.yaml").write_text("page-sise: 16\n")
    (root / "several.yaml").write_text("page-size: [1, 16]\n")
    (root / "nested.yaml").write_text("page-size: {value: 16}\n")
    (root / "flag.yaml").write_text("kv-digest: maybe\n")
    (root / "config.yaml").write_text("config: other.yaml\n")
    (root / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    return root


def _write_model(directory: Path, config: dict[str, Any]) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


# Arguments, exit status, and what the line must contain. {root} and {port} are filled in.
ERRORS = [
    # commands and flags
    ("", USAGE, "COMMAND"),
    ("serve", USAGE, "serve"),
    (
        "prefill --model {root}/model --modle x",
        USAGE,
        "unknown flag --modle (did you mean --model?)",
    ),
    ("prefill --model {root}/model --kv-cache 5", USAGE, "--kv-cache-tokens?"),
    ("prefill {root}/model --model {root}/model", USAGE, "unexpected argument"),
    ("prefill", USAGE, "--model"),
    ("decode --model {root}/model --bootstrap-port 0", USAGE, "--bootstrap-port"),
    ("prefill --model {root}/model --port 70000", USAGE, "70000"),
    ("prefill --model {root}/model --port x", USAGE, "a port is 0 to 65535"),
    ("decode --model {root}/model --retraction-host-memory lots", USAGE, "512MiB"),
    # choices
    ("prefill --model {root}/model --schedule-policy sjf", USAGE, "dfs-weight"),
    ("prefill --model {root}/model --eviction-policy random", USAGE, "slru"),
    ("prefill --model {root}/model --dtype int8", USAGE, "bfloat16"),
    ("prefill --model {root}/model --device tpu", USAGE, "cuda:N"),
    ("prefill --model {root}/model --load-format gguf", USAGE, "dummy"),
    ("prefill --model {root}/model --attention-backend magic", USAGE, "flashinfer"),
    ("prefill --model {root}/model --transfer-backend pigeon", USAGE, "nixl"),
    # values
    ("prefill --model {root}/model --page-size 3", USAGE, "--page-size must be one of"),
    ("prefill --model {root}/model --mem-fraction 1.5", USAGE, "1.5"),
    ("prefill --model {root}/model --kv-cache-tokens 1", USAGE, "at least 16, not 1"),
    ("prefill --model {root}/model --context-length 9999999", USAGE, "exceeds the model's 8192"),
    ("prefill --model {root}/model --tp-size 7", USAGE, "--tp-size 7 does not divide"),
    ("decode --model {root}/model --tp-size 2 --transfer-backend fake", USAGE, "nixl, mooncake"),
    ("prefill --model {root}/model --cpu-threads 0", USAGE, "--cpu-threads"),
    ("prefill --model {root}/model --host 0.0.0.0", USAGE, "--cluster-key-file"),
    ("prefill --model {root}/model --cluster-key-file {root}/none", USAGE, "cluster key"),
    ("prefill --model {root}/model --cluster-key-file {root}/short.key", USAGE, "openssl"),
    # models
    ("prefill --model {root}/nowhere", USAGE, "nowhere"),
    ("prefill --model {root}/empty", USAGE, "config.json"),
    ("prefill --model {root}/broken", USAGE, "config.json"),
    ("prefill --model {root}/yarn", USAGE, "yarn"),
    ("decode --model {root}/hot", USAGE, "temperature must be a number, not 'hot'"),
    ("decode --model {root}/model --generation-config vllm", USAGE, "'none'"),
    ("prefill --model {root}/alien", USAGE, "AlienForCausalLM"),
    ("prefill --model {root}/halves", USAGE, "num_key_value_heads"),
    # drafters
    ("decode --model {root}/model --speculative-algorithm eagle", USAGE, "need each other"),
    (f"{EAGLE} {{root}}/nowhere", USAGE, "nowhere"),
    (f"{EAGLE} {{root}}/empty", USAGE, "config.json"),
    (f"{EAGLE} {{root}}/model", USAGE, "'Qwen3ForCausalLM' is not an EAGLE head"),
    (f"{EAGLE} {{root}}/head-of-more-tokens", USAGE, "4096 tokens in its vocabulary"),
    (f"{EAGLE} {{root}}/head-of-wider", USAGE, "size 512, those of the model have 256"),
    (f"{EAGLE} {{root}}/head-of-deeper", USAGE, "layers of a model of 6"),
    # the machine
    ("prefill --model {root}/model --port {port}", ENVIRONMENT, "choose another --port"),
    (
        "prefill --model {root}/model --port 0 --bootstrap-port {port}",
        ENVIRONMENT,
        "choose another --bootstrap-port",
    ),
    ("prefill --model {root}/model --host 192.0.2.1 --cluster-key-file {root}/key", USAGE, "key"),
    ("decode --model {root}/model --device cpu --transfer-backend nvlink", ENVIRONMENT, "nvlink"),
    ("decode --model {root}/model --fake-script {root}/script.yaml", USAGE, "--fake-script needs"),
    (
        "decode --model {root}/model --transfer-backend fake --fake-script {root}/script.yaml",
        USAGE,
        "explode",
    ),
    ("decode --model {root}/model --transfer-backend fake --fake-script {root}/no", USAGE, "/no"),
    # files with settings
    ("prefill --config {root}/none.yaml", USAGE, "none.yaml: No such file"),
    ("prefill --config {root}/bad.yaml", USAGE, "is not YAML"),
    ("prefill --config {root}/binary.yaml", USAGE, "binary.yaml"),
    ("prefill --config {root}/list.yaml", USAGE, "must map flags to values"),
    ("prefill --config {root}/unknown.yaml", USAGE, "'page-sise' (did you mean page-size?)"),
    ("prefill --config={root}/several.yaml", USAGE, "page-size takes one value"),
    ("prefill --config {root}/nested.yaml", USAGE, "page-size"),
    ("prefill --config {root}/flag.yaml", USAGE, "kv-digest must be true or false"),
    ("prefill --config {root}/config.yaml", USAGE, "unknown key 'config'"),
    # proxy and demo
    ("proxy --port {port}", ENVIRONMENT, "choose another --port"),
    ("proxy --prefill http://", USAGE, "http://host:port"),
    ("proxy --decode ftp://127.0.0.1:1", USAGE, "http://host:port"),
    ("proxy --decode http://me:pass@127.0.0.1:1", USAGE, "came with user info"),
    ("proxy --cors-origins chat.example.org", USAGE, "https://chat.example.org"),
    ("proxy --api-keys {root}/short.key", USAGE, "line 1"),
    ("proxy --policy best", USAGE, "power_of_two"),
    ("admin explode", USAGE, "flush-cache"),
    ("admin drain http://127.0.0.1:1", ENVIRONMENT, "cannot ask http://127.0.0.1:1"),
    ("proxy --max-queue 0", USAGE, "--max-queue"),
    ("proxy --workers 0", USAGE, "--workers"),
    ("proxy --workers 2 --port {port}", ENVIRONMENT, "choose another --port"),
    ("proxy --stream-interval 0", USAGE, "--stream-interval"),
    ("proxy --request-timeout -1", USAGE, "--request-timeout"),
    ("proxy --tokenizer {root}/nowhere", USAGE, "nowhere"),
    ("proxy --tokenizer {root}/empty", USAGE, "tokenizer.json"),
    ("proxy --prefill 127.0.0.1:1 --decode http://127.0.0.1:1", USAGE, "more than once"),
    ("demo --sevre", USAGE, "--serve"),
]


def launch(command: str) -> Any:
    """Run to the end; nothing of this host's may change what comes out."""
    environment = {k: v for k, v in os.environ.items() if k != "PD_API_KEY"}
    return subprocess.run(
        [sys.executable, "-m", "pd.cli", *command.split()],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment | {"HF_HOME": "/nonexistent", "HF_HUB_CACHE": "/nonexistent"},
    )


@pytest.mark.parametrize(("command", "status", "named"), ERRORS, ids=[e[0] or "-" for e in ERRORS])
def test_one_line_and_a_status(
    command: str, status: int, named: str, place: Path, taken_port: int
) -> None:
    ended = launch(command.format(root=place, port=taken_port))
    assert ended.returncode == status, ended.stderr
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert named in ended.stderr


@pytest.mark.parametrize(
    "models",
    [
        "--model {place}/weightless",
        "--model {place}/model --speculative-algorithm eagle "
        "--speculative-draft-model {place}/head-without-weights",
    ],
    ids=["model", "head"],
)
def test_a_model_whose_weights_are_missing(place: Path, models: str) -> None:
    """Found out only after torch is loaded, and still without a traceback."""
    ended = launch(f"unified {models.format(place=place)} --port 0 --device cpu")
    assert ended.returncode == USAGE
    assert "--load-format dummy" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("head", ["embedded-eagle", "embedded-eagle3"])
def test_a_head_that_fits_is_not_refused(place: Path, head: str) -> None:
    config = NodeConfig(
        role="prefill",
        model=place / "model",
        device="cpu",
        speculative_algorithm="eagle",
        speculative_draft_model=EMBEDDED_MODEL.parent / head,
    )
    check_early(config)


@pytest.mark.parametrize(
    ("name", "value"), [("attention-backend", "flashinfer"), ("device", "cuda:7")]
)
def test_what_this_machine_lacks(place: Path, name: str, value: str) -> None:
    ended = launch(f"unified --model {place}/model --port 0 --{name} {value}")
    assert ended.returncode in (USAGE, ENVIRONMENT)
    assert value in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
