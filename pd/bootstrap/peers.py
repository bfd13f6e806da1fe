"""The prefill nodes known to a decode node, and the handshakes under way."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from pd.bootstrap.client import handshake
from pd.core.errors import PDError, UnavailableError
from pd.util.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.node_info import NodeInfo
    from pd.util.starvation import Patience

    Callback = Callable[[NodeInfo | PDError], None]

logger = logging.getLogger(__name__)

# For this time we answer demands for a peer with its failed handshake. The next demand tries again.
# The time counts from the beginning of the handshake, because after a timeout we do not know the
# peer's state since then.
FAILURE_SECONDS = 0.5
# Threads for handshakes that requests need, and as many for handshakes ahead of need. A thread
# starts if all others are busy. This many dead peers do not delay the handshake with another one.
_WORKERS = 16
_MAX_FAILURES = 1024

_Key = tuple[str, str]
# A peer, and whether the handshake is ahead of need.
_Demand = tuple[_Key, bool]


class PeerDirectory:
    """Prefill nodes by bootstrap URL and instance id. Thread-safe.

    Requests that need the same node at once share a handshake. They do not share or wait for a
    handshake ahead of need, because it may have begun before a cut link came back. Handshakes ahead
    of need have their own threads. A slow or dead node occupies one worker of each kind for
    ``timeout`` seconds, extended by ``patience``, and fails only its own requests.

    Args:
        own: description of this node.
        connect: the worker calls this for each new peer before any caller gets the peer. If it
            raises an error, the handshake fails with this error.
    """

    def __init__(
        self,
        own: NodeInfo,
        *,
        cluster_key: bytes | None = None,
        connect: Callable[[NodeInfo], None] = lambda _: None,
        timeout: float = 2.0,
        patience: Patience | None = None,
    ) -> None:
        self._own, self._key, self._connect, self._timeout = own, cluster_key, connect, timeout
        self._patience = patience
        self._lock = threading.Lock()
        self._known: dict[_Key, NodeInfo] = {}
        self._failed: dict[_Key, tuple[float, PDError]] = {}
        self._waiting: dict[_Demand, list[Callback]] = {}
        self._forgotten: set[_Demand] = set()
        self._closed = False
        self._needed = WorkQueue("pd-handshake", _WORKERS, self._shake_hands)
        self._ahead = WorkQueue("pd-handshake-ahead", _WORKERS, self._shake_hands)

    def get_peer(self, url: str, instance_id: str) -> NodeInfo | None:
        """Return the peer if we know it. Starts no handshake."""
        with self._lock:
            return self._known.get((url, instance_id))

    def request_peer(
        self, url: str, instance_id: str, callback: Callback, *, ahead: bool = False
    ) -> None:
        """Call ``callback`` once with the peer or an error.

        We call it before we return if we know the answer, and otherwise in a worker thread. It must
        not block. ``ahead``: no request needs the peer yet.
        """
        key = (url, instance_id)
        demand = key, ahead
        with self._lock:
            answer = self._find_answer(key)
            if answer is None:
                waiting = self._waiting.setdefault(demand, [])
                waiting.append(callback)
                if len(waiting) == 1:
                    answer = self._start_demand(demand)
        if answer is not None:
            callback(answer)

    def forget_peer(self, instance_id: str) -> None:
        """Forget a peer that is gone or has forgotten us. The next demand shakes hands again."""
        with self._lock:
            for key in [k for k in self._known if k[1] == instance_id]:
                del self._known[key]
            # A handshake under way may have learned about the peer before this call.
            self._forgotten.update(d for d in self._waiting if d[0][1] == instance_id)

    def all_peers(self) -> list[NodeInfo]:
        with self._lock:
            return list(self._known.values())

    def close(self) -> None:
        """Start no more handshakes. Waiting callers get an error."""
        with self._lock:
            self._closed = True
        for work in (self._needed, self._ahead):
            work.close()
        for demand in list(self._waiting):
            self._finish_demand(demand, UnavailableError("this node is stopping"), time.monotonic())

    def _find_answer(self, key: _Key) -> NodeInfo | PDError | None:
        if key in self._known:
            return self._known[key]
        if self._closed:
            return UnavailableError("this node is stopping")
        failed = self._failed.get(key)
        if failed is not None and time.monotonic() < failed[0]:
            return failed[1]
        return None

    def _start_demand(self, demand: _Demand) -> PDError | None:
        """Give a demand to a worker.

        Returns:
            An error if no worker can start. It is not a failure of the peer, so the next demand
            tries again.
        """
        (url, _), ahead = demand
        try:
            (self._ahead if ahead else self._needed).put(demand)
        except UnavailableError as error:
            del self._waiting[demand]
            failure = UnavailableError(f"no handshake with {url}: {error}")
            logger.warning("%s", failure)
            return failure
        return None

    def _shake_hands(self, demand: _Demand) -> None:
        url, instance_id = demand[0]
        began = time.monotonic()
        result: NodeInfo | PDError
        try:
            result = handshake(
                url,
                self._own,
                expected_instance=instance_id,
                cluster_key=self._key,
                timeout=self._timeout,
                patience=self._patience,
            )
            self._connect(result)
        except PDError as error:
            logger.warning("%s", error)
            result = error
        except Exception as error:
            # We catch everything, because callers wait for the result.
            logger.exception("handshake with %s failed", url)
            result = UnavailableError(f"handshake with {url} failed: {error}")
        self._finish_demand(demand, result, began)

    def _finish_demand(self, demand: _Demand, result: NodeInfo | PDError, began: float) -> None:
        key, _ = demand
        with self._lock:
            callbacks = self._waiting.pop(demand, [])
            forgotten = demand in self._forgotten
            self._forgotten.discard(demand)
            if isinstance(result, PDError):
                self._remember_failure(key, result, began)
            elif not forgotten and not self._closed:
                self._known[key] = result
                self._failed.pop(key, None)
        for callback in callbacks:
            callback(result)

    def _remember_failure(self, key: _Key, error: PDError, began: float) -> None:
        now = time.monotonic()
        if len(self._failed) >= _MAX_FAILURES:
            self._failed = {k: f for k, f in self._failed.items() if f[0] > now}
        self._failed[key] = (began + FAILURE_SECONDS, error)
