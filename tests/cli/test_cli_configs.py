"""Settings from files and command lines, and the examples of both that we publish."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import shlex
from ipaddress import ip_address
from pathlib import Path

import pytest

from pd.cli import launch, launch_parser, parse_arguments
from pd.commands import node, node_flags, proxy
from pd.commands.parser import parse_size, show_size
from pd.core import config as choices
from pd.core.config import NodeConfig
from pd.core.errors import UsageError
from pd.core.kv_events_config import KVEventsConfig
from pd.embedded import EMBEDDED_MODEL
from pd.engine.kv_pool import DTYPES
from pd.proxy.config import ProxyConfig
from pd.proxy.routing.policies import make_policy
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


# One parser for all tests, because making it takes 200 times as long as parsing.
make_parser = functools.cache(launch_parser)


def parsed(*arguments: object) -> dict[str, object]:
    parser, commands = make_parser()
    return vars(parse_arguments(parser, commands, [str(argument) for argument in arguments]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


# ---- precedence


def test_a_file_sets_what_the_command_line_leaves_open(file: Path) -> None:
    file.write_text("model: m\nport: 1234\npage_size: 32\nkv-digest: true\n")
    settings = parsed("decode", "--config", file)
    assert (settings["model"], settings["port"], settings["page_size"]) == ("m", 1234, 32)
    assert settings["kv_digest"] is True


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


# What YAML 1.1 takes for something else than the text.
SCALARS = [
    "off",
    "on",
    "yes",
    "no",
    "true",
    "False",
    "n",
    "0123",
    "0o17",
    "0x10",
    "0b11",
    "1_000",
    "1.10",
    "1e3",
    "1e400",
    ".inf",
    "-.inf",
    ".nan",
    "12:30",
    "190:20:30.5",
    "2026-01-01",
    "2024-13-45",
    "2026-01-01 10:00:00 +1",
    "=",
    "<<",
    "+1",
    "-1",
    "1,000",
    "a#b",
    "0",
    "00",
    "١٢",
    "null?",
    "~/keys",
    "key=value",
    "007e2",
    "1__0",
]


@pytest.mark.parametrize("text", SCALARS)
def test_a_value_means_what_it_means_on_the_command_line(file: Path, text: str) -> None:
    for key in ("api-key", "served-model-name", "tokenizer"):
        command_line = parsed("proxy", f"--{key}={text}")
        for written in (text, f'"{text}"', f"'{text}'"):
            file.write_text(f"{key}: {written}\n", encoding="utf-8")
            assert parsed("proxy", "--config", file) | {"config": None} == command_line


@pytest.mark.parametrize(
    ("key", "text"),
    [("port", t) for t in [*SCALARS, "8000", "65536"]]
    + [("drain-timeout", t) for t in [*SCALARS, "1.5", "inf", "nan"]]
    + [("failover", t) for t in [*SCALARS, "ON", "Off"]],
)
def test_a_value_is_taken_or_refused_as_on_the_command_line(
    file: Path, capsys: pytest.CaptureFixture, key: str, text: str
) -> None:
    def outcome(*arguments: object) -> object:
        try:
            return parsed("proxy", *arguments)[key.replace("-", "_")]
        except SystemExit as ended:
            assert ended.code == 2
            return capsys.readouterr().err

    file.write_text(f"{key}: {text}\n", encoding="utf-8")
    found, expected = outcome("--config", file), outcome(f"--{key}={text}")
    assert repr(found) == repr(expected)


def flags_of(command: str) -> list[str]:
    _, commands = make_parser()
    return [flag[2:] for flag in commands[command].flags if flag != "--config"]


@pytest.mark.parametrize("command", ["prefill", "decode", "unified", "proxy"])
@pytest.mark.parametrize(
    "value",
    [
        "",
        "~",
        "null",
        "Null",
        "NULL",
        '""',
        "''",
        '" "',
        "[]",
        "[null]",
        "['']",
        "[~, a]",
        "|",
        "# a comment",
        "!!null ''",
        "&anchor",
        "!!str",
    ],
)
def test_a_flag_without_a_value_is_refused(file: Path, command: str, value: str) -> None:
    for key in flags_of(command):
        file.write_text(f"{key}: {value}\n")
        for overridden in ([], [f"--{key}=1"]):
            with pytest.raises(UsageError, match=f"line 1: {key} ") as refused:
                parsed(command, "--config", file, *overridden)
            assert "\n" not in refused.value.message


@pytest.mark.parametrize("value", ["", "~", "null", "''", "# later"])
@pytest.mark.parametrize("key", ["api-key", "api_key", "admin-api-key", "api-keys"])
def test_an_empty_key_never_starts_an_open_proxy(
    file: Path, capsys: pytest.CaptureFixture, key: str, value: str
) -> None:
    file.write_text(f"host: 0.0.0.0\nport: 0\n{key}: {value}\n")
    assert launch(["proxy", "--config", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "line 3" in err


@pytest.mark.parametrize("variable", ["PD_API_KEY", "PD_ADMIN_API_KEY"])
def test_an_empty_variable_never_starts_an_open_proxy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, variable: str
) -> None:
    monkeypatch.setenv(variable, "")
    assert launch(["proxy", "--port", "0"]) == 2
    assert variable in capsys.readouterr().err


def test_switches_are_true_or_false(file: Path) -> None:
    for text, is_on in (
        ("true", True),
        ("yes", True),
        ("On", True),
        ("FALSE", False),
        ("no", False),
    ):
        file.write_text(f"kv-digest: {text}\n")
        assert parsed("decode", "--model", "m", "--config", file)["kv_digest"] is is_on
    for text in ("1", "0", "y", "maybe", "[true]", "{a: b}", "!!bool yes"):
        file.write_text(f"kv-digest: {text}\n")
        with pytest.raises(UsageError, match="kv-digest"):
            parsed("decode", "--model", "m", "--config", file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 1\nport: 2\n", "port is there twice, in lines 1 and 2"),
        ("api_key: a\nhost: h\napi-key: b\n", "api-key is there twice, in lines 1 and 3"),
        ("port: [1]\n", "line 1: port takes one value, not a list of 1"),
        ("\nport: {a: 1}\n", "line 2: port cannot be a mapping here"),
        ("prefill: [[a]]\n", "line 1: prefill cannot be a list here"),
        ("prefill: {a: b}\n", "line 1: prefill cannot be a mapping here"),
        ("port: !!int 0x10\n", "line 1: port has a YAML tag"),
        ("? [port]\n: 1\n", "line 1: a key is the name of a flag"),
        ("? {a: b}\n: 1\n", "line 1: a key is the name of a flag"),
        ("<<: {port: 1}\n", "unknown key '<<'"),
        ("~: 1\n", "unknown key '~'"),
        ("api-key: &a [*a]\n", "line 1: api-key takes one value"),
        ("prefill: &a [*a]\n", "line 1: prefill cannot be a list here"),
        ("port: *nothing\n", "is not YAML: found undefined alias"),
        ("port: 1\n---\nport: 2\n", "is not YAML: expected a single document"),
        ("~\n", "must map flags to values"),
        ("port\n", "must map flags to values"),
    ],
)
def test_a_file_that_means_nothing_is_refused_in_one_line(
    file: Path, text: str, message: str
) -> None:
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)) as refused:
        parsed("proxy", "--config", file)
    assert "\n" not in refused.value.message


def test_an_error_of_a_file_does_not_show_keys(file: Path) -> None:
    for value in ("[secret-1, secret-2]", "{secret-1: secret-2}", "!!int secret-1"):
        file.write_text(f"api-key: {value}\n")
        with pytest.raises(UsageError) as refused:
            parsed("proxy", "--config", file)
        assert "secret" not in refused.value.message


def test_anchors_stand_for_the_text_that_they_mark(file: Path) -> None:
    file.write_text(
        "served-model-name: &name 0123\napi-key: *name\nprefill: &p [a:1]\ndecode: *p\n"
    )
    settings = parsed("proxy", "--config", file)
    assert (settings["served_model_name"], settings["api_key"]) == (["0123"], "0123")
    assert settings["prefill"] == settings["decode"] == ["http://a:1"]


def test_a_proxy_takes_several_names_either_way(file: Path) -> None:
    file.write_text("served-model-name: [a, b]\n")
    assert parsed("proxy", "--config", file)["served_model_name"] == ["a", "b"]
    flags = ["--served-model-name", "c", "d", "--port", "1"]
    assert parsed("proxy", "--config", file, *flags)["served_model_name"] == ["c", "d"]


def test_lists_of_numbers_are_written_either_way(file: Path) -> None:
    for text in ("[1, 8, 64]", "1,8,64", "'1 8 64'"):
        file.write_text(f"cuda-graph-batch-sizes: {text}\n")
        settings = parsed("decode", "--model", "m", "--config", file)
        assert settings["cuda_graph_batch_sizes"] == (1, 8, 64)


def test_a_file_is_read_as_utf_8_whatever_the_locale(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("locale.getencoding", lambda: "ascii")
    for before in (b"", b"\xef\xbb\xbf"):
        file.write_bytes(before + "served-model-name: Modell-ß\n".encode())
        assert parsed("proxy", "--config", file)["served_model_name"] == ["Modell-ß"]


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
                default = None if field.default == "" else field.default
                assert settings[field.name] == default, (role, field.name)
    assert proxy.make_config(argparse.Namespace(**parsed("proxy"))) == ProxyConfig()


def test_defaults_in_documents_are_those_of_the_flags() -> None:
    """``--flag`` with "default VALUE" after it in a line, and the table of docs/gpu.md."""
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
        assert parse_size(show_size(num_bytes)) == num_bytes
    assert show_size(4 << 30) == "4GiB"


@pytest.mark.parametrize("role", list(node_flags.ROLES))
def test_defaults_make_a_configuration(role: str) -> None:
    parser, commands = launch_parser()
    args = parse_arguments(parser, commands, [role, "--model", str(EMBEDDED_MODEL)])
    config = node.make_config(args)
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
    args = parse_arguments(parser, commands, ["unified", "--model", "owner/name"])
    config = node.make_config(args)
    assert (config.model, config.model_name) == (snapshot, "owner/name")
    args = parse_arguments(
        parser, commands, ["unified", "--model", "owner/name", "--served-model-name", "x"]
    )
    assert node.make_config(args).model_name == "x"


def test_the_proxy_takes_addresses_without_a_scheme() -> None:
    parser, commands = launch_parser()
    args = parse_arguments(
        parser, commands, ["proxy", "--prefill", "node:1", "--decode", "https://d:2"]
    )
    config = proxy.make_config(args)
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
    args = parse_arguments(
        parser, commands, ["proxy", "--prefill", "10.0.0.1:1", "--host", "0.0.0.0"]
    )
    open_port, no_key, no_decode = proxy.find_warnings(proxy.make_config(args))
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
    # The package whose backend docs/extending-transfer.md chooses.
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
