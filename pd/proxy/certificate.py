"""The certificate and the private key with which a proxy serves HTTPS (``--tls-cert``,
``--tls-key``)."""

from __future__ import annotations

import logging
import os
import re
import ssl
import stat
import time
from typing import NamedTuple

from pd.core.errors import UsageError

logger = logging.getLogger(__name__)

# The files are looked at for changes at most so often, when a client connects.
LOOK_SECONDS = 1.0

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
# More steps than a handshake has.
_STEPS = 6


class _EncryptedKeyError(Exception):
    """OpenSSL wants a passphrase."""


class ServerCertificate:
    """A certificate with its key, loaded again when their files change."""

    def __init__(self, cert: str, key: str) -> None:
        """Raises UsageError, in one line without the key, for files that cannot be used."""
        self._cert, self._key = cert, key
        self._seen = self._state()
        self._look_again = time.monotonic() + LOOK_SECONDS
        self._loaded = load_certificate(cert, key)

    @property
    def warnings(self) -> list[str]:
        """Faults of the files for which clients refuse them, and keys that others may read."""
        return self._loaded.warnings

    def context(self) -> ssl.SSLContext:
        """The context of a connection that begins. If the files have changed and can be used, it is
        made of them."""
        now = time.monotonic()
        if now >= self._look_again:
            self._look_again = now + LOOK_SECONDS
            state = self._state()
            if state != self._seen:
                self._seen = state
                self._load_again()
        return self._loaded.context

    def _load_again(self) -> None:
        try:
            self._loaded = load_certificate(self._cert, self._key)
        except UsageError as error:
            logger.warning("the certificate in use stays: %s", error.message)
            return
        logger.info("new connections get the certificate that --tls-cert %s has now", self._cert)
        for warning in self.warnings:
            logger.warning("%s", warning)

    def _state(self) -> list[tuple[int, int, int] | None]:
        """Return a value that changes when one of the files does; symbolic links are followed."""
        found: list[tuple[int, int, int] | None] = []
        for path in (self._cert, self._key):
            try:
                status = os.stat(path)
            except OSError:
                found.append(None)  # it is about to be replaced
            else:
                found.append((status.st_mtime_ns, status.st_ino, status.st_size))
        return found


class LoadedCertificate(NamedTuple):
    """A server's context, and what is wrong with the files that it was made of."""

    context: ssl.SSLContext
    warnings: list[str]


def check_certificate(cert: str | None, key: str | None) -> None:
    """Raise UsageError for files with which no proxy can serve."""
    if cert is not None and key is not None:
        load_certificate(cert, key)
    elif cert is not None:
        raise UsageError("--tls-cert needs --tls-key FILE, the certificate's private key")
    elif key is not None:
        raise UsageError("--tls-key needs --tls-cert FILE, the key's certificate")


def load_certificate(cert: str, key: str) -> LoadedCertificate:
    """Make a server's context: TLS 1.2 and newer, with the secure defaults of the standard library.

    Raises UsageError for files that cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    text = _read(cert)
    try:
        # load_cert_chain does not say which of the two files is wrong.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        raise UsageError(f"--tls-cert {cert} is not a certificate in PEM format") from None
    try:
        with open(key, "rb") as file:
            others_read = os.fstat(file.fileno()).st_mode & stat.S_IROTH
    except OSError as error:
        raise UsageError(f"cannot read --tls-key {key}: {error.strerror}") from None
    try:
        context.load_cert_chain(cert, key, password=_refuse_passphrase)
    except _EncryptedKeyError:
        raise UsageError(
            f"--tls-key {key} is encrypted, and nobody is asked for its passphrase; "
            f"openssl pkey -in {key} -out NEW writes a key without one"
        ) from None
    except OSError as error:
        raise UsageError(_complaint(cert, key, getattr(error, "reason", None) or "")) from None
    warnings = []
    objection = _objection(context, text)
    if objection:
        warnings.append(f"clients refuse the certificate in --tls-cert {cert}: {objection}")
    if others_read:
        warnings.append(f"every user of this host can read --tls-key {key}: chmod 600 it")
    return LoadedCertificate(context, warnings)


def _read(cert: str) -> str:
    try:
        with open(cert, encoding="ascii", errors="ignore") as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"cannot read --tls-cert {cert}: {error.strerror}") from None


def _refuse_passphrase() -> str:
    raise _EncryptedKeyError


def _complaint(cert: str, key: str, reason: str) -> str:
    """The error about a certificate that could be read and its key. ``reason`` is OpenSSL's."""
    if reason.endswith("_MISMATCH") or reason == "NO_CERTIFICATE_ASSIGNED":  # another kind of key
        return f"--tls-key {key} is not the key of the certificate in --tls-cert {cert}"
    if reason.endswith(("_TOO_SMALL", "_TOO_WEAK")):
        return f"--tls-cert {cert} is refused: {reason.replace('_', ' ').lower()}"
    return f"--tls-key {key} is not a private key in PEM format"


def _objection(context: ssl.SSLContext, text: str) -> str:
    """Why a client that trusts the certificate itself would refuse it, such as for its age; empty
    if it would not."""
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
