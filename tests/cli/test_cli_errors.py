"""Whatever is wrong with a command ends it at once, with one line that says what to do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pd import cli
from pd.core.config import NodeConfig
from pd.core.errors import PDError
from pd.embedded import EMBEDDED_MODEL
from pd.launch import check_early

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
    (root / "tag.yaml").write_text("model: !!int ''\n")
    (root / "deep.yaml").write_text("[" * 3000)
    (root / "nodes").write_text("http://127.0.0.1:1\nhttp://10.0.0.1:30000\n")
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


# Arguments that cannot be right, and what the line must contain. {root} is filled in.
MISUSES = [
    # commands and flags
    ("", "COMMAND"),
    ("serve", "serve"),
    (
        "prefill --model {root}/model --modle x",
        "unknown flag --modle (did you mean --model?)",
    ),
    ("prefill --model {root}/model --kv-cache-token 5", "--kv-cache-tokens?"),
    ("prefill {root}/model --model {root}/model", "unexpected argument"),
    ("prefill", "--model"),
    ("decode --model {root}/model --bootstrap-port x", "a port is 0 to 65535"),
    ("decode --model {root}/model --elastic on", "--elastic: invalid choice"),
    ("prefill --model {root}/model --port 70000", "70000"),
    ("prefill --model {root}/model --port x", "a port is 0 to 65535"),
    ("decode --model {root}/model --retraction-host-memory lots", "512MiB"),
    # choices
    ("prefill --model {root}/model --schedule-policy sjf", "dfs-weight"),
    ("prefill --model {root}/model --eviction-policy random", "slru"),
    ("prefill --model {root}/model --dtype int8", "bfloat16"),
    ("prefill --model {root}/model --device tpu", "cuda:N"),
    ("prefill --model {root}/model --load-format gguf", "dummy"),
    ("prefill --model {root}/model --attention-backend magic", "flashinfer"),
    ("prefill --model {root}/model --transfer-backend pigeon", "nixl"),
    # values
    ("prefill --model {root}/model --page-size 3", "--page-size must be one of"),
    ("prefill --model {root}/model --kv-events-config on", "--kv-events-config is a JSON object"),
    ("prefill --model {root}/model --mem-fraction 1.5", "1.5"),
    ("prefill --model {root}/model --kv-cache-tokens 1", "at least 16, not 1"),
    ("prefill --model {root}/model --context-length 9999999", "exceeds the model's 8192"),
    ("prefill --model {root}/model --tp-size 7", "--tp-size 7 does not divide"),
    ("prefill --model {root}/model --tp-size 2 --ep-size 2", "--ep-size 2: qwen3 has no experts"),
    ("decode --model {root}/model --tp-size 2 --transfer-backend fake", "nixl, mooncake"),
    ("prefill --model {root}/model --cpu-threads 0", "--cpu-threads"),
    ("prefill --model {root}/model --host 0.0.0.0", "--cluster-key-file"),
    ("prefill --model {root}/model --cluster-key-file {root}/none", "cluster key"),
    ("prefill --model {root}/model --cluster-key-file {root}/short.key", "openssl"),
    # models
    ("prefill --model {root}/nowhere", "nowhere"),
    ("prefill --model {root}/empty", "config.json"),
    ("prefill --model {root}/broken", "config.json"),
    ("prefill --model {root}/yarn", "yarn"),
    ("decode --model {root}/hot", "temperature must be a number, not 'hot'"),
    ("decode --model {root}/model --generation-config vllm", "'none'"),
    ("prefill --model {root}/alien", "AlienForCausalLM"),
    ("prefill --model {root}/halves", "num_key_value_heads"),
    # drafters
    (
        "decode --model {root}/model --speculative-algorithm eagle",
        "draft or eagle need each other, not no model with eagle",
    ),
    (
        "decode --model {root}/model --speculative-algorithm mtp",
        "model has no layer for drafts (num_nextn_predict_layers in config.json)",
    ),
    (
        "decode --model {root}/model --speculative-algorithm mtp "
        "--speculative-draft-model {root}/model",
        "/model with mtp",
    ),
    (
        "decode --model {root}/model --speculative-ngram-cache on",
        "needs --speculative-algorithm ngram, not none",
    ),
    (
        "decode --model {root}/model --speculative-algorithm ngram --speculative-topk 3",
        "--speculative-topk 3 (above 1) needs --speculative-algorithm eagle or mtp, not ngram",
    ),
    (f"{EAGLE} {{root}}/nowhere", "nowhere"),
    (f"{EAGLE} {{root}}/empty", "config.json"),
    (f"{EAGLE} {{root}}/model", "'Qwen3ForCausalLM' is not an EAGLE head"),
    (f"{EAGLE} {{root}}/head-of-more-tokens", "4096 tokens in its vocabulary"),
    (f"{EAGLE} {{root}}/head-of-wider", "size 512, those of the model have 256"),
    (f"{EAGLE} {{root}}/head-of-deeper", "layers of a model of 6"),
    # the machine
    ("prefill --model {root}/model --host 192.0.2.1 --cluster-key-file {root}/key", "key"),
    ("decode --model {root}/model --fake-script {root}/script.yaml", "--fake-script needs"),
    (
        "decode --model {root}/model --transfer-backend fake --fake-script {root}/script.yaml",
        "explode",
    ),
    ("decode --model {root}/model --transfer-backend fake --fake-script {root}/no", "/no"),
    # files with settings
    ("prefill --config {root}/none.yaml", "none.yaml: No such file"),
    ("prefill --config {root}/bad.yaml", "is not YAML"),
    ("prefill --config {root}/binary.yaml", "binary.yaml"),
    ("prefill --config {root}/tag.yaml", "tag.yaml, line 1: model has a YAML tag"),
    ("prefill --config {root}/deep.yaml", "deep.yaml is nested too deeply"),
    ("prefill --config {root}/list.yaml", "must map flags to values"),
    ("prefill --config {root}/unknown.yaml", "'page-sise' (did you mean page-size?)"),
    ("prefill --config={root}/several.yaml", "page-size takes one value"),
    ("prefill --config {root}/nested.yaml", "page-size"),
    ("prefill --config {root}/flag.yaml", "kv-digest must be true or false"),
    ("prefill --config {root}/config.yaml", "unknown key 'config'"),
    # proxy and demo
    ("proxy --prefill http://", "http://host:port"),
    ("proxy --decode ftp://127.0.0.1:1", "http://host:port"),
    ("proxy --decode http://me:pass@127.0.0.1:1", "came with user info"),
    ("proxy --cors-origins chat.example.org", "https://chat.example.org"),
    ("proxy --api-keys {root}/short.key", "line 1"),
    ("proxy --policy best", "power_of_two"),
    ("proxy --discover file:{root}/nodes", "lists http://10.0.0.1:30000: nodes on other hosts"),
    ("proxy --discover kubernetes:app=pd", "--cluster-key-file"),
    ("proxy --discover dns:10.0.0.1:30000", "'10.0.0.1' is not a valid DNS name"),
    ("proxy --discover consul:pd", "dns:NAME:PORT"),
    ("admin explode", "flush-cache"),
    ("proxy --max-queue 0", "--max-queue"),
    ("proxy --request-timeout -1", "--request-timeout"),
    ("proxy --tokenizer {root}/nowhere", "nowhere"),
    ("proxy --tokenizer {root}/empty", "tokenizer.json"),
    ("proxy --prefill 127.0.0.1:1 --decode http://127.0.0.1:1", "more than once"),
    # values that cannot be meant
    ("proxy --unified notaurl", "--unified: a node's url must be like http://host:port, not 'nota"),
    *(
        (f"proxy --prefill {url}", "must be like http://host:port")
        for url in ("host:", "http://..", "http://a,b:1", "http://-:1", "http://[zz]:1", "'':1")
    ),
    *(
        (f"{command} {flag}=", f"{flag}: the value is empty")
        for command in ("proxy", "prefill --model {root}/model")
        for flag in ("--served-model-name", "--cluster-key-file")
    ),
    *(
        (f"proxy {flag}=", f"argument {flag}: ")
        for flag in (
            *("--prefill", "--decode", "--unified", "--tokenizer", "--host", "--api-key"),
            *("--admin-api-key", "--api-keys", "--cors-origins", "--tls-cert", "--tls-key"),
            *("--trace-requests", "--policy", "--port", "--discover"),
        )
    ),
    *(
        (f"decode --model {{root}}/model {flag}=", f"argument {flag}: ")
        for flag in ("--host", "--advertise-host", "--device", "--speculative-draft-model")
    ),
    ("prefill --model=", "argument --model: the value is empty"),
    ("proxy --served-model-name=\x7fa", "printable characters, and no space at either end"),
    ("decode --model {root}/model --served-model-name " + "x" * 4097, "1 to 4096 printable"),
    ("proxy --host [::1]", "an IP address without brackets, not '[::1]'"),
    ("decode --model {root}/model --advertise-host a/b", "not 'a/b'"),
    ("admin drain nothost", "must be like http://host:port"),
    ("batch in out --url ftp://x", "--url"),
    ("cluster down x.yaml --grace inf", "--grace: must be a number of seconds from 0"),
    ("cluster down x.yaml --grace 1e300", "from 0 to 1e+09, not 1e300"),
    ("cluster down x.yaml --grace nan", "--grace: must be a number of seconds from 0"),
    ("cluster up x.yaml --wait nan", "--wait: must be a number of seconds from 0"),
    ("cluster up x.yaml --wait 0", "--wait: must be a number of seconds above 0"),
    ("demo --sevre", "--serve"),
]

# What the machine lacks is found while a command starts, so in a process of its own; and some of
# the above. {port} is filled in, too. ``make test`` leaves out what differs least from others.
PROCESSES = [
    ("", USAGE, "COMMAND"),
    ("prefill --model {root}/model --kv-cache-token 5", USAGE, "--kv-cache-tokens?"),
    ("decode --model {root}/yarn", USAGE, "yarn"),
    ("proxy --prefill http://", USAGE, "http://host:port"),
    ("prefill --model {root}/model --port {port}", ENVIRONMENT, "choose another --port"),
    (
        "prefill --model {root}/model --port 0 --bootstrap-port {port}",
        ENVIRONMENT,
        "choose another --bootstrap-port",
    ),
    ("decode --model {root}/model --device cpu --transfer-backend nvlink", ENVIRONMENT, "nvlink"),
    ("proxy --port {port}", ENVIRONMENT, "choose another --port"),
    ("admin drain http://127.0.0.1:1", ENVIRONMENT, "cannot ask http://127.0.0.1:1"),
    ("proxy --workers 2 --port {port}", ENVIRONMENT, "choose another --port"),
]
MORE_PROCESSES = {
    "decode --model {root}/yarn",
    "prefill --model {root}/model --port {port}",
    "proxy --port {port}",
    "",
}
assert {command for command, _, _ in PROCESSES} >= MORE_PROCESSES


def nothing_of_this_host() -> dict[str, str]:
    """An environment in which nothing of this host's changes what comes out."""
    environment = {k: v for k, v in os.environ.items() if k != "PD_API_KEY"}
    return environment | {"HF_HOME": "/nonexistent", "HF_HUB_CACHE": "/nonexistent"}


def launch(command: str) -> subprocess.CompletedProcess[str]:
    """Run a process to its end."""
    return subprocess.run(
        [sys.executable, "-m", "pd.cli", *command.split()],
        capture_output=True,
        text=True,
        timeout=60,
        env=nothing_of_this_host(),
    )


def check_one_line(status: object, expected: int, out: str, err: str, named: str) -> None:
    assert status == expected, err
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert named in err


@pytest.mark.parametrize(("command", "named"), MISUSES, ids=[e[0] or "-" for e in MISUSES])
def test_one_line_and_a_status(
    command: str,
    named: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process: what a command refuses, it refuses before it starts anything."""
    monkeypatch.setattr(os, "environ", nothing_of_this_host())
    status: object
    try:
        status = cli.launch(command.format(root=place).split())
    except SystemExit as ended:
        status = ended.code
    check_one_line(status, USAGE, *capsys.readouterr(), named)


@pytest.mark.parametrize(
    ("command", "status", "named"), PROCESSES, ids=[e[0] or "-" for e in PROCESSES]
)
@pytest.mark.sample(cells=lambda params: params["command"] not in MORE_PROCESSES)
def test_a_process_ends_with_one_line_and_a_status(
    command: str, status: int, named: str, place: Path, taken_port: int
) -> None:
    ended = launch(command.format(root=place, port=taken_port))
    check_one_line(ended.returncode, status, ended.stdout, ended.stderr, named)


def test_a_model_whose_weights_are_missing(place: Path) -> None:
    """Found out only after torch is loaded, and still without a traceback."""
    ended = launch(f"unified --model {place}/weightless --port 0 --device cpu")
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
    ("settings", "named"),
    [
        ({"attention_backend": "flashinfer"}, "flashinfer"),
        ({"device": "cuda:7"}, "cuda:7"),
        (
            {"speculative_algorithm": "eagle", "speculative_draft_model": "head-without-weights"},
            "--load-format dummy",
        ),
    ],
    ids=["attention backend", "device", "weights of a head"],
)
def test_what_a_node_lacks_when_it_starts(
    place: Path, settings: dict[str, Any], named: str
) -> None:
    from pd.launch import NodeServer

    if "speculative_draft_model" in settings:
        settings = settings | {"speculative_draft_model": place / "head-without-weights"}
    server = NodeServer(
        NodeConfig(role="unified", model=place / "model", **{"device": "cpu"} | settings)
    )
    try:
        with pytest.raises(PDError) as refused:
            server.start()
        assert refused.value.exit_status in (USAGE, ENVIRONMENT)
        assert named in refused.value.message
    finally:
        server.stop()
