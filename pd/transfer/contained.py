"""Calls of a transfer backend whose errors stay with the request or the peer that they are about.

Backends may come from other packages. One that raises where :mod:`pd.transfer.base` names no error
must neither end requests of others nor keep its own from ending.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pd.core.errors import PDError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from pd.core.request import Request
    from pd.core.seldom import Seldom
    from pd.transfer.base import Receiver, Sender, TransferManager

logger = logging.getLogger(__name__)


class Contained:
    """Context in which any exception ends one request and goes no further.

    A PDError is the backend's own message, with which the request ends. Anything else, such as what
    torch raises without memory, is logged with its traceback and becomes a TransferError.

    Args:
        fail: ends a request.
        what: says what failed, up to the name of the peer.
    """

    __slots__ = ("_fail", "_request", "_what")

    def __init__(
        self, fail: Callable[[Request, PDError], None], request: Request, what: str
    ) -> None:
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


def disconnect(transfer: TransferManager, instance: str) -> None:
    """Have the backend forget a peer. If it raises, the caller can still fail the peer's requests,
    whose pages wait for :meth:`Sender.drained` and :meth:`Receiver.drained` as ever."""
    try:
        transfer.disconnect(instance)
    except Exception:
        # Whatever it is, the peer is gone.
        logger.exception("the transfer backend cannot disconnect %s", instance)


def abort(end: Sender | Receiver, peer: str) -> None:
    """Abort the transfer of a request that has ended, and stays ended if the backend raises."""
    try:
        end.abort()
    except Exception:
        # Pages are still safe: they wait until the transfer has drained.
        logger.exception("cannot abort a transfer with %s", peer)


def is_drained(end: Sender | Receiver, peer: str, broken: Seldom) -> bool:
    """Whether nothing of a transfer uses its pages any more; False as long as the backend raises.

    Args:
        broken: logs what it raises, since the node asks again and again.
    """
    try:
        return end.drained()
    except Exception as error:  # noqa: BLE001
        # A page that may be in use must not be given to another request.
        broken.warn(f"pages of a transfer with {peer} stay in quarantine: {error!r}")
        return False
