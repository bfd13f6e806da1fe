"""Records of TLS that bring no plaintext: they end their connection and hold up nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
import time
from typing import TYPE_CHECKING

import pytest
from certificates import Authority
from guarded_server import LoopTime, Server, wait_until
from tls_records import (
    ALERT,
    APPLICATION_DATA,
    CHANGE_CIPHER_SPEC,
    CLIENT_HELLO,
    HANDSHAKE,
    RecordClient,
)

from pd.net import tls, turns
from pd.net.turns import Turns
from pd.proxy.http.certificate import ServerCertificate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Flood = Callable[[RecordClient], bytes]

UPLOAD = b"POST /size HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"
QUESTION = UPLOAD % 0
USER_CANCELED = b"\x01\x5a"
NO_RENEGOTIATION = b"\x01\x64"
# The beginning of a message of 16,000 bytes.
LONG_MESSAGE = bytes([CLIENT_HELLO]) + (16_000).to_bytes(3, "big")
# What a client sends in one go, of which the server should look at no more than a few records.
FLOOD_BYTES = 32 << 10


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def server(authority: Authority) -> Iterator[Server]:
    certificate = ServerCertificate(*authority.issue("localhost"))
    server = Server(certificate.get_context)
    yield server
    server.stop()


class Clients:
    """Connections with TLS to one server, which end with the test."""

    def __init__(self, stack: contextlib.ExitStack, directory: Path, authority: Authority) -> None:
        self._stack, self._directory, self._authority = stack, directory, authority
        self._numbers = itertools.count()

    def connect(self, server: Server, version: ssl.TLSVersion) -> RecordClient:
        trusting = self._authority.trusting()
        trusting.minimum_version = trusting.maximum_version = version
        trusting.set_ciphers("ECDHE+AES128+AESGCM")
        sock = self._stack.enter_context(server.ask(b""))
        return RecordClient(sock, trusting, self._directory / f"secrets {next(self._numbers)}")


@pytest.fixture
def clients(tmp_path: Path, authority: Authority) -> Iterator[Clients]:
    with contextlib.ExitStack() as stack:
        yield Clients(stack, tmp_path, authority)


def unencrypted(kind: int, content: bytes) -> bytes:
    return bytes([kind, 3, 3]) + len(content).to_bytes(2, "big") + content


def key_updates_and_a_byte(client: RecordClient) -> bytes:
    """A flood with a sign of life, such as the next byte of an endless body, now and then."""
    updates = b"".join(client.key_update() for _ in range(50))
    return updates + client.record(APPLICATION_DATA, b"x")


NEW_FLOODS: dict[str, Flood] = {
    "key updates": RecordClient.key_update,
    "key updates that are answered": lambda client: client.key_update(asks_back=True),
    "key updates and plaintext": key_updates_and_a_byte,
    "empty records": lambda client: client.record(APPLICATION_DATA, b""),
    "padding": lambda client: client.record(APPLICATION_DATA, b"", padding=1000),
    "empty records after key updates": lambda client: (
        client.key_update() + client.record(APPLICATION_DATA, b"")
    ),
    "warnings": lambda client: client.record(ALERT, USER_CANCELED),
    "warnings after key updates": lambda client: (
        client.key_update() + client.record(ALERT, USER_CANCELED)
    ),
    "parts of a message": lambda client: client.record(HANDSHAKE, b"\0"),
    "changes of ciphers": lambda client: unencrypted(CHANGE_CIPHER_SPEC, b"\1"),
    "changes of ciphers, encrypted": lambda client: client.record(CHANGE_CIPHER_SPEC, b"\1"),
}
OLD_FLOODS: dict[str, Flood] = {
    "renegotiation": lambda client: client.record(HANDSHAKE, bytes([CLIENT_HELLO, 0, 0, 0])),
    "parts of a message": lambda client: client.record(HANDSHAKE, LONG_MESSAGE[:1]),
    "hello requests": lambda client: client.record(HANDSHAKE, bytes(4)),
    "empty records": lambda client: client.record(APPLICATION_DATA, b""),
    "warnings": lambda client: client.record(ALERT, NO_RENEGOTIATION),
    "changes of ciphers": lambda client: client.record(CHANGE_CIPHER_SPEC, b"\1"),
}
NEW, OLD = ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("version", "flood"),
    [
        *(pytest.param(NEW, flood, id=f"1.3: {name}") for name, flood in NEW_FLOODS.items()),
        *(pytest.param(OLD, flood, id=f"1.2: {name}") for name, flood in OLD_FLOODS.items()),
    ],
)
@pytest.mark.parametrize(
    "begun",
    [b"", pytest.param(UPLOAD % (1 << 20), marks=pytest.mark.full)],
    ids=["idle", "in a body"],
)
def test_records_without_plaintext_end_their_connection(
    server: Server,
    clients: Clients,
    monkeypatch: pytest.MonkeyPatch,
    version: ssl.TLSVersion,
    flood: Flood,
    begun: bytes,
) -> None:
    """After a few KiB, whatever else came with them."""
    worked_on = count_records(monkeypatch)
    client = clients.connect(server, version)
    client.ask(QUESTION)
    before = sum(worked_on)
    data = client.record(APPLICATION_DATA, begun) if begun else b""
    while len(data) < FLOOD_BYTES:
        data += flood(client)
    with contextlib.suppress(ConnectionError):
        client.send(data)
    wait_until(lambda: server.connections == 0)
    assert sum(worked_on) - before < 3 * tls._SILENT_BYTES


def count_records(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what OpenSSL is given."""
    sizes: list[int] = []
    original = tls.TlsTransport._decrypt_record

    def read(self: tls.TlsTransport, record: bytes) -> bytes | None:
        sizes.append(len(record))
        return original(self, record)

    monkeypatch.setattr(tls.TlsTransport, "_decrypt_record", read)
    return sizes


def test_a_flood_of_records_does_not_delay_others(server: Server, clients: Clients) -> None:
    """Four connections, each with 150 KiB of key updates that come at once."""
    attackers = [clients.connect(server, NEW) for _ in range(4)]
    floods = [b"".join(client.key_update() for _ in range(6000)) for client in attackers]
    other = clients.connect(server, NEW)
    with LoopTime(server) as longest:
        for client, flood in zip(attackers, floods, strict=True):
            with contextlib.suppress(ConnectionError):
                client.send(flood)
            assert b"200 OK" in other.ask(QUESTION)
        wait_until(lambda: server.connections == 1)
    # What one turn of the loop may take is a tenth of it.
    assert longest.computed < 10 * turns.TURN_SECONDS


@pytest.mark.parametrize("version", [NEW, OLD])
def test_a_body_in_tiny_records_arrives_whole(
    server: Server, clients: Clients, version: ssl.TLSVersion
) -> None:
    """Progress, however slow, is no flood; what one turn had no time for comes in the next."""
    client = clients.connect(server, version)
    body = bytes(5000)
    tiny = [client.record(APPLICATION_DATA, bytes([byte])) for byte in UPLOAD % len(body) + body]
    client.send(*tiny)
    assert client.ask(b"").partition(b"\r\n\r\n")[0].startswith(b"HTTP/1.1 200")


def test_a_client_may_update_its_keys(server: Server, clients: Clients) -> None:
    """Before every request, and many times in the life of a connection."""
    client = clients.connect(server, NEW)
    for number in range(300):
        for _ in range(1 + number % 3):
            client.send(client.key_update())
        assert b"200 OK" in client.ask(QUESTION)
    for _ in range(20):
        client.send(client.key_update())
        time.sleep(0.01)
    assert b"200 OK" in client.ask(QUESTION)


def test_an_endless_handshake_is_ended(server: Server, authority: Authority) -> None:
    """A hello of 128 KiB in records of a byte."""
    hello = bytes([CLIENT_HELLO]) + (128 << 10).to_bytes(3, "big") + bytes(128 << 10)
    tiny = b"".join(unencrypted(HANDSHAKE, bytes([byte])) for byte in hello)
    with server.ask(b"") as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(tiny)
        wait_until(lambda: server.connections == 0)


def test_connections_take_turns_with_their_records() -> None:
    async def main() -> list[int]:
        shared = Turns()
        order: list[int] = []
        left = dict.fromkeys(range(3), 4)

        def step(number: int, end: float) -> bool:
            assert end <= time.monotonic() + turns.STEP_SECONDS
            order.append(number)
            left[number] -= 1
            time.sleep(turns.TURN_SECONDS)
            return not left[number]

        for number in left:
            shared.run_step(lambda end, number=number: step(number, end))  # type: ignore[misc]
        while any(left.values()):
            await asyncio.sleep(0)
        return order

    order = asyncio.run(main())
    assert order[0] == 0
    assert sorted(order[1:4]) == [0, 1, 2]
    assert sorted(order[4:7]) == [0, 1, 2]
