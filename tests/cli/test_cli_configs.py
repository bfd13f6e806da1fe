"""Settings from files and command lines, and the examples of both that we publish."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from ipaddress import ip_address
from pathlib import Path

import pytest

from pd.cli import launch_parser, parse
from pd.commands import node, node_flags, proxy
from pd.commands.parser import show_size, size
from pd.core import config as choices
from pd.core.config import NodeConfig
from pd.core.errors import UsageError
from pd.core.kv_events_config import KVEventsConfig
from pd.embedded import EMBEDDED_MODEL
from pd.engine.kv_pool import DTYPES
from pd.proxy.config import ProxyConfig
from pd.proxy.policies import make_policy
from pd.radix import EVICTION_POLICIES
from pd.scheduling.policy import POLICIES
from pd.transfer.fake.script import load_script

ROOT = Path(__file__).parents[2]
# Files for --config. Those of pd-launch cluster: tests/deployments/test_cluster_spec.py.
OTHERS = ("script.yaml", "cluster.yaml")
CONFIGS = sorted(path for path in ROOT.glob("configs/*/*.yaml") if path.name not in OTHERS)
CLUSTERS = sorted(ROOT.glob("configs/*/cluster.yaml"))
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *CONFIGS, *CLUSTERS]
# In examples, for what the reader puts in.
MODEL = "DIR"


def parsed(*arguments: object) -> dict[str, object]:
    parser, commands = launch_parser()
    return vars(parse(parser, commands, [str(argument) for argument in arguments]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


# ---- precedence


def test_a_file_sets_what_the_command_line_leaves_open(file: Path) -> None:
    file.write_text("model: m\nport: 1234\npage_size: 32\nkv-digest: true\nseed:\n")
    settings = parsed("decode", "--config", file)
    assert (settings["model"], settings["port"], settings["page_size"]) == ("m", 1234, 32)
    assert settings["kv_digest"] is True
    assert settings["seed"] == 0  # null asks for the default


def test_flags_win(file: Path) -> None:
    file.write_text("model: m\nport: 1234\n")
    for flag in (["--port", "4321"], ["--port=4321"]):
        settings = parsed("decode", f"--config={file}", *flag)
        assert (settings["model"], settings["port"]) == ("m", 4321)
    assert parsed("decode", "--port", 4321, "--config", file)["port"] == 4321


def test_a_repeated_flag_replaces_the_list_of_the_file(file: Path) -> None:
    file.write_text("prefill: [http://a:1, http://b:1]\ndecode: http://c:1\n")
    assert parsed("proxy", "--config", file)["prefill"] == ["http://a:1", "http://b:1"]
    settings = parsed("proxy", "--config", file, "--prefill", "http://d:1")
    assert settings["prefill"] == ["http://d:1"]
    assert settings["decode"] == ["http://c:1"]


def test_settings_of_events_are_a_mapping_in_a_file(file: Path) -> None:
    file.write_text("kv-events-config:\n  enable_kv_cache_events: true\n  topic: kv\n")
    settings = parsed("prefill", "--config", str(file), "--model", "m")
    assert settings["kv_events_config"] == KVEventsConfig(enable_kv_cache_events=True, topic="kv")


def test_an_empty_file_sets_nothing(file: Path) -> None:
    file.write_text("# nothing\n")
    assert parsed("proxy", "--config", file)["port"] == 8000


def test_values_of_a_file_are_checked_like_flags(file: Path, capsys: pytest.CaptureFixture) -> None:
    file.write_text("model: m\nport: 70000\n")
    with pytest.raises(SystemExit) as ended:
        parsed("decode", "--config", file)
    assert ended.value.code == 2
    assert "--port" in capsys.readouterr().err


def test_a_key_of_another_command_is_unknown(file: Path) -> None:
    file.write_text("max-queue: 1\n")
    with pytest.raises(UsageError, match="unknown key 'max-queue'"):
        parsed("decode", "--config", file)


# ---- flags


def test_names_to_choose_from_are_those_that_exist() -> None:
    assert tuple(EVICTION_POLICIES) == choices.EVICTION_POLICIES
    assert tuple(POLICIES) == choices.SCHEDULE_POLICIES
    assert ("auto", *DTYPES) == choices.DTYPES
    for name in choices.ROUTING_POLICIES:
        make_policy(name)


def test_a_flag_has_the_default_of_the_field_that_it_sets() -> None:
    # A program that makes a NodeConfig itself has a free port.
    own = {"role", "model", "port"}
    for role in node_flags.ROLES:
        settings = parsed(role, "--model", "m")
        for field in dataclasses.fields(NodeConfig):
            if field.name in settings and field.name not in own:
                assert settings[field.name] == field.default, (role, field.name)
    assert proxy.config_from(argparse.Namespace(**parsed("proxy"))) == ProxyConfig()


def test_defaults_in_documents_are_those_of_the_flags() -> None:
    """``--flag`` with "default VALUE" behind it in a line, and the table of docs/gpu.md."""
    defaults = parsed("unified", "--model", "m") | parsed("prefill", "--model", "m")
    found = []
    for path in DOCUMENTS:
        found += re.findall(r"`--([\w-]+)`[^`\n]*?\bdefault `?([\d.]+)", path.read_text())
    rows = re.findall(
        r"^\| `--([\w-]+)` \| `?([\w.]+)`?[: |]", (ROOT / "docs/gpu.md").read_text(), re.M
    )
    found += [(flag, value) for flag, value in rows if value not in ("a", "the")]
    assert {flag for flag, _ in found} >= {"page-size", "drain-timeout", "mem-fraction"}
    for flag, value in found:
        default = defaults[flag.replace("-", "_")]
        assert type(default)(value) == default, flag


def test_sizes_are_shown_as_they_are_read() -> None:
    for num_bytes in (0, 1, 1536, 4 << 30, (4 << 30) + 1):
        assert size(show_size(num_bytes)) == num_bytes
    assert show_size(4 << 30) == "4GiB"


@pytest.mark.parametrize("role", list(node_flags.ROLES))
def test_defaults_make_a_configuration(role: str) -> None:
    parser, commands = launch_parser()
    args = parse(parser, commands, [role, "--model", str(EMBEDDED_MODEL)])
    config = node.config_from(args)
    assert (config.role, config.model, config.model_name) == (role, EMBEDDED_MODEL, "embedded")


def test_a_model_is_served_under_the_id_that_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("abc")
    parser, commands = launch_parser()
    args = parse(parser, commands, ["unified", "--model", "owner/name"])
    config = node.config_from(args)
    assert (config.model, config.model_name) == (snapshot, "owner/name")
    args = parse(parser, commands, ["unified", "--model", "owner/name", "--served-model-name", "x"])
    assert node.config_from(args).model_name == "x"


def test_the_proxy_takes_addresses_without_a_scheme() -> None:
    parser, commands = launch_parser()
    args = parse(parser, commands, ["proxy", "--prefill", "node:1", "--decode", "https://d:2"])
    config = proxy.config_from(args)
    assert (config.prefill, config.decode) == (["http://node:1"], ["https://d:2"])


def test_a_node_on_every_address_tells_one_that_others_can_use() -> None:
    assert node.reachable_address("10.0.0.5") == "10.0.0.5"
    assert node.reachable_address("node.example") == "node.example"
    for wildcard in ("0.0.0.0", "::"):
        told = ip_address(node.reachable_address(wildcard))
        assert not told.is_unspecified
        assert told.version == ip_address(wildcard).version


def test_a_file_may_name_the_home_directory(file: Path) -> None:
    file.write_text("model: m\ncluster-key-file: ~/cluster.key\n")
    settings = parsed("decode", "--config", file)
    assert settings["cluster_key_file"] == Path.home() / "cluster.key"


def test_advice_names_what_is_probably_not_meant() -> None:
    parser, commands = launch_parser()
    args = parse(parser, commands, ["proxy", "--prefill", "10.0.0.1:1", "--host", "0.0.0.0"])
    open_port, no_key, no_decode = proxy.advice(proxy.config_from(args))
    assert "without an API key" in open_port
    assert "10.0.0.1:1" in no_key and "--cluster-key-file" in no_key
    assert "POST /workers" in no_decode


# ---- what we publish


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_published_files_are_understood(path: Path) -> None:
    model = [] if path.stem == "proxy" else ["--model", MODEL]
    parsed(path.stem, "--config", path, *model)


def test_published_scripts_are_understood() -> None:
    for path in ROOT.glob("configs/*/script.yaml"):
        assert load_script(path).rules


def commands_in(path: Path) -> list[list[str]]:
    """Every ``pd-launch`` line of a document or of a file's header, without its prompt."""
    text = path.read_text().replace("\\\n", " ")
    found = re.findall(r"^[#$ ]*(?:\w+=\S+ )?pd-launch ((?:\w|--).*)$", text, re.MULTILINE)
    return [shlex.split(command, comments=True) for command in found]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_published_commands_are_understood(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The package whose backend docs/extending.md chooses.
    information = tmp_path / "pd_mailbox-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: pd-mailbox\nVersion: 1.0\n")
    entry_point = "[pd.transfer]\nmailbox = pd_mailbox:MailboxBackend\n"
    (information / "entry_points.txt").write_text(entry_point)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(ROOT)
    for command in commands_in(path):
        if command[0] != "--help" and command[1:] != ["--help"]:
            parsed(*command)


def test_every_configuration_tells_how_to_use_it() -> None:
    for path in [*CONFIGS, *CLUSTERS]:
        shown = str(path.relative_to(ROOT))
        assert any(shown in " ".join(command) for command in commands_in(path)), shown


def test_help_is_shown_for_every_command(capsys: pytest.CaptureFixture) -> None:
    _, commands = launch_parser()
    for name in commands:
        with pytest.raises(SystemExit) as ended:
            parsed(name, "--help")
        assert ended.value.code == 0
        assert "examples:" in capsys.readouterr().out
