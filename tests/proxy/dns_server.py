"""A DNS server of a test's own, over UDP and TCP on loopback."""

from __future__ import annotations

import socketserver
import struct
import threading
from typing import TYPE_CHECKING, Any

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.resolver
import dns.rrset

if TYPE_CHECKING:
    from types import TracebackType


class DnsServer:
    """Answers from ``records``.

    Attributes:
        records: texts of records by name (absolute, lower case) and type. A name without any of
            its own does not exist.
        rcodes: answers with a code instead, by type.
        ttl: of all records.
        udp_bytes: longer answers are truncated.
        queries: names, types and transports of all queries.
    """

    def __init__(self, **records: dict[str, list[str]]) -> None:
        self.records = {f"{name.replace('__', '.')}.": texts for name, texts in records.items()}
        self.extra: list[tuple[str, str, str]] = []
        self.rcodes: dict[str, dns.rcode.Rcode] = {}
        self.ttl, self.udp_bytes, self.is_silent = 1, 1232, False
        self.queries: list[tuple[str, str, str]] = []
        self._servers: list[socketserver.BaseServer] = []

    def __enter__(self) -> DnsServer:
        server = self

        class Udp(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                data, socket = self.request
                answer = server.answer(data, "udp")
                if answer is not None:
                    socket.sendto(answer, self.client_address)

        class Tcp(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                (length,) = struct.unpack("!H", self.rfile.read(2))
                answer = server.answer(self.rfile.read(length), "tcp")
                if answer is not None:
                    self.wfile.write(struct.pack("!H", len(answer)) + answer)

        while not self._servers:
            udp = socketserver.ThreadingUDPServer(("127.0.0.1", 0), Udp)
            self.port = udp.server_address[1]
            try:
                tcp = socketserver.ThreadingTCPServer(("127.0.0.1", self.port), Tcp)
            except OSError:  # the port is in use for TCP
                udp.server_close()
            else:
                self._servers = [udp, tcp]
        for made in self._servers:
            made.daemon_threads = True  # type: ignore[attr-defined]
            threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def answer(self, wire: bytes, transport: str) -> bytes | None:
        query = dns.message.from_wire(wire)
        (question,) = query.question
        name, kind = question.name.to_text().lower(), dns.rdatatype.to_text(question.rdtype)
        self.queries.append((name, kind, transport))
        if self.is_silent:
            return None
        response = dns.message.make_response(query)
        response.flags |= dns.flags.RA
        if name not in self.records:
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif kind in self.rcodes:
            response.set_rcode(self.rcodes[kind])
        elif texts := self.records[name].get(kind):
            response.answer.append(dns.rrset.from_text_list(name, self.ttl, "IN", kind, texts))
            for extra in self.extra:
                rrset = dns.rrset.from_text(extra[0], self.ttl, "IN", *extra[1:])
                response.additional.append(rrset)
        made = response.to_wire(max_size=65535)
        if transport == "udp" and len(made) > self.udp_bytes:
            cut = dns.message.make_response(query)
            cut.flags |= dns.flags.TC
            return cut.to_wire()
        return made

    def resolver(self, **settings: Any) -> dns.resolver.Resolver:
        """A resolver that asks this server alone."""
        made = dns.resolver.Resolver(configure=False)
        made.nameservers, made.port = ["127.0.0.1"], self.port
        for name, value in settings.items():
            setattr(made, name, value)
        return made
