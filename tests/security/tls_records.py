"""A client that shakes hands like any other and then writes records of its choice.

Python's ``ssl`` offers no key updates, empty records or alerts, so what follows the handshake is
encrypted here, with the secrets that ``ssl`` writes to a key log and OpenSSL's AES-GCM.
"""

from __future__ import annotations

import _ssl
import contextlib
import ctypes
import hashlib
import hmac
import re
import socket
import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

CHANGE_CIPHER_SPEC, ALERT, HANDSHAKE, APPLICATION_DATA = 20, 21, 22, 23
KEY_UPDATE, CLIENT_HELLO = 24, 1
_VERSION = b"\x03\x03"
_GET_TAG = 0x10
_HEAD = re.compile(rb".*content-length: (\d+).*?\r\n\r\n", re.DOTALL)

_openssl = ctypes.CDLL(_ssl.__file__)
for _name in ("EVP_CIPHER_CTX_new", "EVP_aes_128_gcm", "EVP_aes_256_gcm"):
    getattr(_openssl, _name).restype = ctypes.c_void_p


def encrypt(key: bytes, nonce: bytes, data: bytes, associated: bytes) -> bytes:
    """AES-GCM; the tag is at the end."""
    cipher = _openssl.EVP_aes_128_gcm() if len(key) == 16 else _openssl.EVP_aes_256_gcm()
    context = ctypes.c_void_p(_openssl.EVP_CIPHER_CTX_new())
    out, tag = ctypes.create_string_buffer(len(data) + 16), ctypes.create_string_buffer(16)
    size = ctypes.c_int()
    try:
        _openssl.EVP_EncryptInit_ex(context, ctypes.c_void_p(cipher), None, key, nonce)
        _openssl.EVP_EncryptUpdate(context, None, ctypes.byref(size), associated, len(associated))
        _openssl.EVP_EncryptUpdate(context, out, ctypes.byref(size), data, len(data))
        written = size.value
        assert _openssl.EVP_EncryptFinal_ex(context, None, ctypes.byref(size)) == 1
        assert _openssl.EVP_CIPHER_CTX_ctrl(context, _GET_TAG, 16, tag) == 1
    finally:
        _openssl.EVP_CIPHER_CTX_free(context)
    return out.raw[:written] + tag.raw


class RecordClient:
    """A TLS connection on a socket that is connected. Closing it is the caller's."""

    def __init__(self, sock: socket.socket, trusting: ssl.SSLContext, log: Path) -> None:
        """``log``: file for secrets, which does not exist yet."""
        self._socket = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trusting.keylog_filename = str(log)
        self._incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = trusting.wrap_bio(self._incoming, outgoing, server_hostname="localhost")
        from_server = b""
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                self._tls.do_handshake()
                break
            sock.sendall(outgoing.read())
            data = sock.recv(1 << 16)
            assert data, "the server does not shake hands"
            from_server += data
            self._incoming.write(data)
        sock.sendall(outgoing.read())
        self.is_new = self._tls.version() == "TLSv1.3"
        secrets = dict(
            (line.split()[0], bytes.fromhex(line.split()[2]))
            for line in log.read_text().splitlines()
            if not line.startswith("#")
        )
        if self.is_new:
            self._hash = "sha384" if "SHA384" in self._tls.cipher()[0] else "sha256"  # type: ignore[index]
            self._set_secret(secrets["CLIENT_TRAFFIC_SECRET_0"])
        else:
            hello = re.search(rb"CLIENT_RANDOM ([0-9a-f]+) ", log.read_bytes())
            assert hello is not None
            # The server's random follows the headers of record and message, and the version.
            randoms = from_server[11:43] + bytes.fromhex(hello[1].decode())
            block = _prf(secrets["CLIENT_RANDOM"], b"key expansion" + randoms, 40)
            self._key, self._iv = block[:16], block[32:36]
            self._number = 1  # the end of the handshake was the first

    def _set_secret(self, secret: bytes) -> None:
        self._secret = secret
        self._key = self._expand("key", 32 if self._hash == "sha384" else 16)
        self._iv = self._expand("iv", 12)
        self._number = 0

    def _expand(self, label: str, length: int) -> bytes:
        """HKDF-Expand-Label of the present secret, with no context."""
        name = b"tls13 " + label.encode()
        info = length.to_bytes(2, "big") + bytes([len(name)]) + name + b"\0"
        return hmac.digest(self._secret, info + b"\1", self._hash)[:length]

    def record(self, kind: int, content: bytes, padding: int = 0) -> bytes:
        """An encrypted record."""
        number = self._number.to_bytes(8, "big")
        self._number += 1
        if self.is_new:
            plain = content + bytes([kind]) + bytes(padding)
            head = bytes([APPLICATION_DATA]) + _VERSION + (len(plain) + 16).to_bytes(2, "big")
            nonce = bytes(a ^ b for a, b in zip(self._iv, number.rjust(12, b"\0"), strict=True))
            return head + encrypt(self._key, nonce, plain, head)
        head = bytes([kind]) + _VERSION
        associated = number + head + len(content).to_bytes(2, "big")
        sealed = number + encrypt(self._key, self._iv + number, content, associated)
        return head + len(sealed).to_bytes(2, "big") + sealed

    def key_update(self, *, asks_back: bool = False) -> bytes:
        """A record that announces the next key; later ones are encrypted with it."""
        size = hashlib.new(self._hash).digest_size
        record = self.record(HANDSHAKE, bytes([KEY_UPDATE, 0, 0, 1, asks_back]))
        self._set_secret(self._expand("traffic upd", size))
        return record

    def send(self, *records: bytes) -> None:
        self._socket.sendall(b"".join(records))

    def ask(self, request: bytes) -> bytes:
        """Send a request in one record and return the answer, which says how long it is."""
        self.send(self.record(APPLICATION_DATA, request))
        answer = b""
        while not (head := _HEAD.match(answer)) or len(answer) < head.end() + int(head[1]):
            try:
                answer += self._tls.read(1 << 14)
            except ssl.SSLWantReadError:
                data = self._socket.recv(1 << 16)
                assert data, "the server has closed the connection"
                self._incoming.write(data)
        return answer


def _prf(secret: bytes, seed: bytes, length: int) -> bytes:
    """TLS 1.2's function for keys."""
    out, a = b"", seed
    while len(out) < length:
        a = hmac.digest(secret, a, "sha256")
        out += hmac.digest(secret, a + seed, "sha256")
    return out[:length]
