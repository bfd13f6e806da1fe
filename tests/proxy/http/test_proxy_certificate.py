"""What ``--tls-cert`` and ``--tls-key`` name wrongly is refused before the port is open."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from certificates import RSA

from pd import cli
from pd.proxy.config import ProxyConfig

if TYPE_CHECKING:
    from certificates import Authority, CertificateFiles

WRONG = {
    "no key": ("{good.cert}", None, "--tls-cert needs --tls-key FILE"),
    "no certificate": (None, "{good.key}", "--tls-key needs --tls-cert FILE"),
    "a certificate that is not there": ("/no", "{good.key}", "read --tls-cert /no: No such file"),
    "a key that is not there": ("{good.cert}", "/no", "read --tls-key /no: No such file"),
    "a directory": ("{good.cert}", "/", "cannot read --tls-key /: Is a directory"),
    "a key as certificate": ("{good.key}", "{good.key}", "--tls-cert {good.key} is not a cert"),
    "a certificate as key": (
        "{good.cert}",
        "{good.cert}",
        "--tls-key {good.cert} is not a private",
    ),
    "another's key": ("{good.cert}", "{other.key}", "--tls-key {other.key} is not the key of the"),
    "a key of another kind": ("{good.cert}", "{rsa}", "--tls-key {rsa} is not the key of the cert"),
    "an encrypted key": ("{good.cert}", "{encrypted}", "--tls-key {encrypted} is encrypted"),
}


@pytest.fixture(scope="module")
def wrong(authority: Authority, files: CertificateFiles) -> dict[str, Any]:
    return {
        "good": files,
        "other": authority.issue("other"),
        "encrypted": authority.key("encrypted", "-aes256", "-pass", "pass:secret"),
        "rsa": authority.key("rsa", kind=RSA),
    }


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_named_in_one_line(
    case: str,
    wrong: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cert, key, message = WRONG[case]
    monkeypatch.setattr(sys, "stdin", None)  # nobody is asked
    command = ["proxy", "--port", "0"]
    command += [f"--tls-cert={cert.format(**wrong)}"] if cert else []
    command += [f"--tls-key={key.format(**wrong)}"] if key else []
    assert cli.launch(command) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert message.format(**wrong) in err
    # Nothing of a key is shown.
    assert not any(line in err for line in Path(wrong["good"].key).read_text().splitlines())


def test_what_clients_would_not_accept_is_warned_of(authority: Authority) -> None:
    from pd.commands.proxy import find_warnings

    def said(files: CertificateFiles) -> str:
        config = ProxyConfig(unified=["http://127.0.0.1:1"], **files.flags)
        return "\n".join(line for line in find_warnings(config) if "tls" in line)

    files = authority.issue("expired", -1)
    assert said(files) == (
        f"clients refuse the certificate in --tls-cert {files.cert}: certificate has expired"
    )
    files = authority.issue("open")
    assert said(files) == ""
    os.chmod(files.key, 0o644)
    assert said(files) == f"every user of this host can read --tls-key {files.key}: chmod 600 it"
