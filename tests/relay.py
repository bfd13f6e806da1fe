"""A TCP wire that tests stop and cut."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Relay:
    """A wire between two nodes that a test can stop or cut."""

    def __init__(self, port: int, *, pause: float = 0.0, at: int = 0) -> None:
        """Listen, and relay to a target.

        Args:
            pause: seconds to wait after each 64 KiB.
            at: port to listen on.
        """
        self._target = ("127.0.0.1", port)
        self._pause = pause
        self._listener = socket.create_server(("127.0.0.1", at))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._flows = threading.Event()
        self._flows.set()
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def address(self) -> dict[str, str]:
        host, port = self._listener.getsockname()
        return {"host": host, "port": str(port)}

    def stall(self) -> None:
        """Let nothing pass, without telling either end."""
        self._flows.clear()

    def resume(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        """Reset all connections; new ones are accepted."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._flows.set()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                self.connections += 1
                self._pairs.append((near, far))
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                sink.sendall(data)
                time.sleep(self._pause)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
