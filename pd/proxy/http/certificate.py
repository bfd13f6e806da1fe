"""The certificate and private key for HTTPS (``--tls-cert``, ``--tls-key``)."""

from __future__ import annotations

import logging
import os
import re
import ssl
import time
from typing import NamedTuple

from pd.core.errors import UsageError
from pd.util.secret_files import find_exposure

logger = logging.getLogger(__name__)

# We check the files for changes at most this often, when a client connects.
LOOK_SECONDS = 1.0

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
# Upper bound for the steps of a handshake.
_STEPS = 6


class _EncryptedKeyError(Exception):
    """OpenSSL asks for a passphrase."""


class ServerCertificate:
    """A certificate with its key. We reload them when their files change."""

    def __init__(self, cert: str, key: str) -> None:
        """Load the files. Raises UsageError, in one line and without the key, if they cannot be
        used.
        """
        self._cert, self._key = cert, key
        self._seen = self._read_state()
        self._look_again = time.monotonic() + LOOK_SECONDS
        self._loaded = load_certificate(cert, key)

    @property
    def warnings(self) -> list[str]:
        """Faults for which clients refuse the certificate, and keys readable by other users."""
        return self._loaded.warnings

    def get_context(self) -> ssl.SSLContext:
        """Return the context for a new connection, after reloading changed files."""
        now = time.monotonic()
        if now >= self._look_again:
            self._look_again = now + LOOK_SECONDS
            state = self._read_state()
            if state != self._seen:
                self._seen = state
                self._reload()
        return self._loaded.context

    def _reload(self) -> None:
        try:
            self._loaded = load_certificate(self._cert, self._key)
        except UsageError as error:
            logger.warning("keeping the certificate in use: %s", error.message)
            return
        logger.info("loaded the new certificate in --tls-cert %s for new connections", self._cert)
        for warning in self.warnings:
            logger.warning("%s", warning)

    def _read_state(self) -> list[tuple[int, int, int] | None]:
        """Return a value that changes with the files. Symbolic links are followed."""
        states: list[tuple[int, int, int] | None] = []
        for path in (self._cert, self._key):
            try:
                status = os.stat(path)
            except OSError:
                states.append(None)  # the file is about to be replaced
            else:
                states.append((status.st_mtime_ns, status.st_ino, status.st_size))
        return states


class LoadedCertificate(NamedTuple):
    """A server's context, and warnings about its files."""

    context: ssl.SSLContext
    warnings: list[str]


def check_certificate(cert: str | None, key: str | None) -> None:
    """Raise UsageError for files that a proxy cannot use."""
    if cert is not None and key is not None:
        load_certificate(cert, key)
    elif cert is not None:
        raise UsageError("--tls-cert needs --tls-key FILE, the certificate's private key")
    elif key is not None:
        raise UsageError("--tls-key needs --tls-cert FILE, the key's certificate")


def load_certificate(cert: str, key: str) -> LoadedCertificate:
    """Make a server's context with TLS 1.2 or newer and the standard library's secure defaults.

    Raises UsageError for unusable files.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        with open(cert, encoding="ascii", errors="ignore") as file:
            text = file.read()
    except OSError as error:
        raise UsageError(f"cannot read --tls-cert {cert}: {error.strerror}") from None
    try:
        # We check the certificate alone first, because load_cert_chain does not say which file is
        # wrong.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        raise UsageError(f"--tls-cert {cert} is not a certificate in PEM format") from None
    try:
        with open(key, "rb"):
            warnings = find_exposure(key, f"--tls-key {key}")
    except OSError as error:
        raise UsageError(f"cannot read --tls-key {key}: {error.strerror}") from None
    try:
        context.load_cert_chain(cert, key, password=_refuse_passphrase)
    except _EncryptedKeyError:
        raise UsageError(
            f"--tls-key {key} is encrypted, and pd cannot ask for its passphrase; "
            f"openssl pkey -in {key} -out NEW writes a key without one"
        ) from None
    except OSError as error:
        raise UsageError(
            _explain_failure(cert, key, getattr(error, "reason", None) or "")
        ) from None
    objection = _find_objection(context, text)
    if objection:
        warnings.insert(0, f"clients refuse the certificate in --tls-cert {cert}: {objection}")
    return LoadedCertificate(context, warnings)


def _refuse_passphrase() -> str:
    raise _EncryptedKeyError


def _explain_failure(cert: str, key: str, reason: str) -> str:
    """Explain why a readable certificate and its key cannot be used. ``reason`` is OpenSSL's."""
    if (
        reason.endswith("_MISMATCH") or reason == "NO_CERTIFICATE_ASSIGNED"
    ):  # the key's type differs
        return f"--tls-key {key} is not the key of the certificate in --tls-cert {cert}"
    if reason.endswith(("_TOO_SMALL", "_TOO_WEAK")):
        return f"--tls-cert {cert} is refused: {reason.replace('_', ' ').lower()}"
    return f"--tls-key {key} is not a private key in PEM format"


def _find_objection(context: ssl.SSLContext, text: str) -> str:
    """Find out why a client would refuse a certificate it trusts, for example its age.

    Return an empty string if it would not.
    """
    certificate = _CERTIFICATE.search(text)
    if certificate is None:
        return ""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(cadata=certificate[0])
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        trusting.wrap_bio(ours, theirs),
        context.wrap_bio(theirs, ours, server_side=True),
    )
    for step in range(_STEPS):
        try:
            ends[step % 2].do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
        except ssl.SSLError as error:
            return error.reason or str(error)
    return ""
