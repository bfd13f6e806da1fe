"""Handlers of messages, by type of message."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

from pd.core.messages import Message

if TYPE_CHECKING:
    from collections.abc import Callable

M = TypeVar("M", bound=Message)


class Handlers:
    """Functions that take the sender's identity and a message, registered by type of message.

    :meth:`on` ties the type of the message to the type that the function takes, so no handler has
    to check what it was given.
    """

    def __init__(self) -> None:
        # NOTE: Any, since a dictionary cannot say that each value goes with the type of its key.
        self._by_type: defaultdict[type[Message], list[Callable[[bytes, Any], None]]]
        self._by_type = defaultdict(list)

    def on(self, kind: type[M], handle: Callable[[bytes, M], None]) -> None:
        """Call ``handle`` for each message of exactly this type, after those registered before."""
        self._by_type[kind].append(handle)

    def handle(self, identity: bytes, message: Message) -> None:
        """Call the handlers of a message. The caller checked :meth:`__contains__`."""
        for handle in self._by_type[type(message)]:
            handle(identity, message)

    def __contains__(self, message: Message) -> bool:
        return type(message) in self._by_type
