"""A prefill node between a proxy and a decode node that say whatever a test likes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster import random_prompts
from requests_for_tests import make_generate

from pd.core.messages import NodeHeartbeat, StepOutputs

if TYPE_CHECKING:
    from decode_peer import DecodePeer
    from raw_peer import RawPeer

    from pd.launch import NodeServer

PROMPT = next(random_prompts(7, [21]))


def ask(proxy: RawPeer, prefill: NodeServer, decode: DecodePeer, **fields: Any) -> bytes:
    message = make_generate(
        PROMPT, to=prefill.instance_id, sender=proxy.name, peer=decode.name, **fields
    )
    proxy.send(message)
    return message.room


def computed(proxy: RawPeer) -> int:
    """Wait for token 1 and return it."""
    (output,) = proxy.receive(StepOutputs).outputs
    assert output.position == 0
    return output.token_ids[0]


def handled(peer: RawPeer) -> None:
    """Everything that this peer sent so far was handled."""
    peer.beat()
    peer.receive(NodeHeartbeat)
