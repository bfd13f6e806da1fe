"""Files of keys that others than their owner can use: warned of, all in the same words."""

from __future__ import annotations

import logging
import os
import secrets
from typing import TYPE_CHECKING

import pytest
from certificates import Authority

from pd import cli
from pd.embedded import EMBEDDED_MODEL
from pd.proxy.http.certificate import ServerCertificate
from pd.util.secret_files import find_exposure

if TYPE_CHECKING:
    from pathlib import Path

MODES = {
    0o600: [],
    0o400: [],
    0o640: ["users of its group can read"],
    0o604: ["every user of this host can read"],
    0o644: ["every user of this host can read"],
    0o622: ["every user of this host can change"],
    0o660: ["users of its group can read", "users of its group can change"],
    0o777: ["every user of this host can read", "every user of this host can change"],
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands load their configuration, and no more."""
    from pd.commands import admin, node, proxy

    monkeypatch.delenv("PD_API_KEY", raising=False)
    monkeypatch.delenv("PD_ADMIN_API_KEY", raising=False)
    monkeypatch.setattr("pd.commands.proxy.run", lambda args: bool(proxy.make_config(args)))
    monkeypatch.setattr("pd.commands.node.run", lambda args: bool(node.make_config(args)))
    monkeypatch.setattr(admin, "TIMEOUT_SECONDS", 0.1)


def warned(caplog: pytest.LogCaptureFixture, *command: object) -> list[str]:
    """Warnings of a command."""
    caplog.clear()
    cli.launch([str(part) for part in command])
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize("mode", MODES, ids=oct)
@pytest.mark.usefixtures("started")
def test_every_file_of_keys_that_others_can_use_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        path.chmod(mode)
        return path

    key = write("cluster.key", secrets.token_hex(32))
    keys = write("api-keys", "admin a-key\n")
    settings = write("proxy.yaml", "api-key: a-key\n")
    admin_settings = write("admin.yaml", "host: 127.0.0.1\nadmin_api_key: a-key\n")
    with_key = ("--cluster-key-file", key)
    found = {
        f"the cluster key in {key}": [
            warned(caplog, "proxy", *with_key),
            warned(caplog, "prefill", "--model", EMBEDDED_MODEL, *with_key),
            warned(caplog, "admin", "drain", "http://127.0.0.1:1", *with_key),
        ],
        f"the keys in {keys}": [warned(caplog, "proxy", "--api-keys", keys)],
        f"the keys in --config {settings}": [warned(caplog, "proxy", "--config", settings)],
        f"the keys in --config {admin_settings}": [
            warned(caplog, "proxy", f"--config={admin_settings}")
        ],
    }
    for content, runs in found.items():
        for lines in runs:
            assert lines == [f"{text} {content}: chmod 600 it" for text in MODES[mode]]


def test_a_private_key_that_others_can_use_is_warned_of(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue("server")
    for mode, said in MODES.items():
        os.chmod(files.key, mode)
        warnings = ServerCertificate(files.cert, files.key).warnings
        assert warnings == [f"{text} --tls-key {files.key}: chmod 600 it" for text in said]


@pytest.mark.usefixtures("started")
def test_settings_without_keys_and_pipes_are_no_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = tmp_path / "proxy.yaml"
    settings.write_text("port: 0\n")
    settings.chmod(0o666)
    assert warned(caplog, "proxy", "--config", settings) == []
    os.mkfifo(tmp_path / "pipe", 0o644)
    assert find_exposure(tmp_path / "pipe", "a key") == []


@pytest.mark.parametrize("link", ["symbolic", "second"])
def test_the_file_counts_and_not_the_link_to_it(tmp_path: Path, link: str) -> None:
    """As Kubernetes mounts secrets: the link is open to all, the file need not be."""
    file, name = tmp_path / "file", tmp_path / "name"
    file.write_text("x")
    file.chmod(0o600)
    (name.symlink_to if link == "symbolic" else name.hardlink_to)(file)
    assert find_exposure(name, "a key") == []
    file.chmod(0o644)
    assert len(find_exposure(name, "a key")) == 1
