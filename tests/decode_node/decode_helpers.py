"""A decode node between a prefill node and a proxy that say whatever a test likes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster import wait_until
from requests_for_tests import make_generate

if TYPE_CHECKING:
    from prefill_peer import PrefillPeer
    from raw_peer import RawPeer

    from pd.launch import NodeServer
    from pd.scheduling.request import RequestState

PROMPT = list(range(10, 32))


def lose(decode: NodeServer, peer: PrefillPeer) -> None:
    """As if its lease had ended."""

    def on_control_thread() -> None:
        with decode.node.core.events.event():
            decode.node.receiving.drop_peer(peer.name, "the test said so")

    decode.node.control.call_soon(on_control_thread)


def ask(
    proxy: RawPeer, decode: NodeServer, prefill: PrefillPeer, tokens: Any = PROMPT, **fields: Any
) -> bytes:
    message = make_generate(
        tokens,
        to=decode.instance_id,
        sender=proxy.name,
        peer=prefill.name,
        peer_bootstrap=prefill.url,
        **fields,
    )
    proxy.send(message)
    return message.room


def handled(decode: NodeServer) -> None:
    """What the prefill node said before this was handled: a turn of the control thread is over."""
    turned: list[bool] = []
    for count in (1, 2):
        decode.node.control.call_soon(lambda: turned.append(True))
        wait_until(lambda count=count: len(turned) == count, 5)


def state_of(decode: NodeServer, room: bytes) -> RequestState:
    return decode.node.requests.find_request(room).state
