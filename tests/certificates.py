"""Certificates for tests, made by the command openssl."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

EC = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
RSA = ("-algorithm", "RSA")
NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


class CertificateFiles(NamedTuple):
    """What ``--tls-cert`` and ``--tls-key`` take."""

    cert: str
    key: str

    @property
    def flags(self) -> dict[str, str]:
        """Return fields of a proxy's configuration."""
        return {"tls_cert": self.cert, "tls_key": self.key}


class Authority:
    """A private authority. Its files are in ``directory``, which it has for itself.

    Attributes:
        cert: the certificate that clients trust.
    """

    def __init__(self, directory: Path) -> None:
        if shutil.which("openssl") is None:
            assert not os.environ.get("CI"), "the command openssl is missing"
            pytest.skip("the command openssl is missing")
        self._directory = directory
        self._key = self.key("authority")
        self.cert = str(directory / "authority.pem")
        self.run("req", "-x509", "-key", self._key, "-subj", "/CN=authority", "-out", self.cert)

    def run(self, *command: str) -> None:
        """Run openssl."""
        done = subprocess.run(["openssl", *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def key(self, name: str, *options: str, kind: Sequence[str] = EC) -> str:
        """Make a new key, readable by this user only."""
        path = str(self._directory / f"{name}.key")
        self.run("genpkey", *kind, *options, "-out", path)
        os.chmod(path, 0o600)
        return path

    def issue(self, name: str, days: int = 1, *options: str) -> CertificateFiles:
        """Issue a certificate for this host. With negative ``days`` it has expired."""
        key = self.key(name)
        request, extensions = str(self._directory / "request"), self._directory / "extensions"
        cert = str(self._directory / f"{name}.pem")
        extensions.write_text(NAMES)
        self.run("req", "-new", "-key", key, "-subj", f"/CN={name}", "-out", request)
        signing = ("-CA", self.cert, "-CAkey", self._key, "-CAcreateserial")
        more = ("-extfile", str(extensions), "-days", str(days), *options)
        self.run("x509", "-req", "-in", request, *signing, *more, "-out", cert)
        return CertificateFiles(cert, key)

    def trusting(self) -> ssl.SSLContext:
        """Make a client's context that trusts only this authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.cert)
        return context
