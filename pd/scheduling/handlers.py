"""Handlers of messages by message type."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

from pd.core.messages import Message

if TYPE_CHECKING:
    from collections.abc import Callable

M = TypeVar("M", bound=Message)


class Handlers:
    """Calls functions for messages. Functions are registered by message type.

    :meth:`add_handler` ties the type of a message to the argument type of the function, so handlers
    need no type checks.
    """

    def __init__(self) -> None:
        # Any, because a dictionary type cannot tie each value to the type of its key.
        self._by_type: defaultdict[type[Message], list[Callable[[bytes, Any], None]]]
        self._by_type = defaultdict(list)

    def add_handler(self, kind: type[M], handle: Callable[[bytes, M], None]) -> None:
        """Call ``handle`` for each message of exactly this type, in order of registration."""
        self._by_type[kind].append(handle)

    def call_handlers(self, identity: bytes, message: Message) -> None:
        """Call the handlers of a message. The caller has checked :meth:`__contains__`."""
        for handle in self._by_type[type(message)]:
            handle(identity, message)

    def __contains__(self, message: Message) -> bool:
        return type(message) in self._by_type
