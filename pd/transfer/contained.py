"""Calls of a transfer backend whose errors concern only one request or one peer.

Backends may come from other packages. If one raises an error that :mod:`pd.transfer.base` does not
name, it must neither end requests of others nor keep its own request from ending.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from pd.core.errors import PDError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from pd.transfer.base import Receiver, Sender, TransferManager
    from pd.util.warning_limit import WarningLimit

logger = logging.getLogger(__name__)


class HandedOff(Protocol):
    """A request whose KV goes to another node, or comes from one.

    Attributes:
        peer: instance id of that node.
    """

    peer: str


R = TypeVar("R", bound=HandedOff)


class Contained(Generic[R]):
    """Context in which an exception ends one request and goes no further.

    A PDError is the backend's own message, so the request ends with it. We log anything else with
    its traceback, such as an out-of-memory error of torch, and turn it into a TransferError.

    Args:
        fail: ends a request.
        what: names the failed action, up to the name of the peer.
    """

    __slots__ = ("_fail", "_request", "_what")

    def __init__(self, fail: Callable[[R, PDError], None], request: R, what: str) -> None:
        self._fail, self._request, self._what = fail, request, what

    def __enter__(self) -> None:
        return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if not isinstance(error, PDError):
            what = f"{self._what} {self._request.peer}"
            logger.error("%s", what, exc_info=error)
            error = TransferError(f"{what}: {str(error) or type(error).__name__}")
        self._fail(self._request, error)
        return True


def disconnect_peer(transfer: TransferManager, instance: str) -> None:
    """Have the backend forget a peer, whatever it raises.

    The caller can then fail the peer's requests. Their pages wait for :meth:`Sender.drained` and
    :meth:`Receiver.drained` as usual.
    """
    try:
        transfer.disconnect(instance)
    except Exception:
        # Whatever it is, the peer is gone.
        logger.exception("the transfer backend cannot disconnect %s", instance)


def abort_transfer(end: Sender | Receiver, peer: str) -> None:
    """Abort the transfer of a request that has ended, whatever the backend raises."""
    try:
        end.abort()
    except Exception:
        # Pages are still safe, because they wait until the transfer has drained.
        logger.exception("cannot abort a transfer with %s", peer)


def is_drained(end: Sender | Receiver, peer: str, broken: WarningLimit) -> bool:
    """Whether a transfer has stopped using its pages. False as long as the backend raises.

    Args:
        broken: logs the exceptions. It limits their rate, because the node asks again and again.
    """
    try:
        return end.drained()
    except Exception as error:  # noqa: BLE001
        # A page that may be in use must not go to another request.
        broken.log_warning(f"pages of a transfer with {peer} stay in quarantine: {error!r}")
        return False
