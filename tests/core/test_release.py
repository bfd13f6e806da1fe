"""Different releases of pd understand each other well enough to name the difference."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import recorded_release

from pd.core.messages import (
    Abort,
    ErrorInfo,
    Failed,
    Finish,
    Generate,
    NodeHeartbeat,
    Output,
    PeerHeartbeat,
    PrefixEvents,
    ProxyHeartbeat,
    RoleState,
    Stages,
    StepFailed,
    StepOutputs,
    TakenBack,
    decode_message,
    encode_message,
)
from pd.core.node_load import NodeLoad
from pd.core.release import PROTOCOL, RELEASE, describe_mismatch, describe_release, format_release
from pd.core.sampling_params import SamplingParams
from pd.core.step_cost import StepCost

ENDS = {"to": "b", "sender": "a"}
ROOM = b"r" * 16
ERROR = ErrorInfo("internal", "why")
LOAD = NodeLoad(cost=StepCost(), itl=0.05)
OUTPUT = Output(ROOM, 0, 0, [5], finish=Finish("length"), stages=Stages(queue=1.0))
REPORTS = [
    ProxyHeartbeat(**ENDS),
    NodeHeartbeat(**ENDS, ready=True, queued_tokens=0, running=0, load=LOAD, roles=RoleState()),
    PeerHeartbeat(**ENDS),
    StepOutputs(**ENDS, outputs=[OUTPUT]),
    Failed(**ENDS, room=ROOM, error=ERROR),
    StepFailed(**ENDS, rooms=[ROOM], error=ERROR),
    TakenBack(**ENDS, room=ROOM, taken=True),
    PrefixEvents(**ENDS, number=1),
]
GENERATE = Generate(
    **ENDS, rid="r", room=ROOM, token_ids=b"", params=SamplingParams(max_tokens=1, seed=1)
)


def with_more(value: Any) -> Any:
    """Add a field to every object."""
    if isinstance(value, dict):
        return {key: with_more(each) for key, each in value.items()} | {"of_a_later_release": [1]}
    return [with_more(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("message", REPORTS, ids=lambda message: type(message).__name__)
def test_reports_with_unknown_fields_are_decoded(message: Any) -> None:
    raw = msgspec.msgpack.decode(encode_message(message))
    for name in ("run_delays", "meet"):  # names of their own
        raw.pop(name, None)
    assert decode_message(msgspec.msgpack.encode(with_more(raw))) == message


@pytest.mark.parametrize(
    "message", [GENERATE, Abort(**ENDS, room=ROOM)], ids=lambda message: type(message).__name__
)
def test_orders_with_unknown_fields_are_refused(message: Any) -> None:
    raw = msgspec.msgpack.decode(encode_message(message))
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        decode_message(msgspec.msgpack.encode(raw | {"of_a_later_release": 1}))


def test_heartbeats_without_a_release_are_decoded() -> None:
    proxy = decode_message(recorded_release.PROXY_HEARTBEAT)
    node = decode_message(recorded_release.NODE_HEARTBEAT)
    assert isinstance(proxy, ProxyHeartbeat) and isinstance(node, NodeHeartbeat)
    assert (proxy.release, node.release) == ("", msgspec.UNSET)


def test_every_heartbeat_of_a_proxy_states_its_release() -> None:
    sent = decode_message(encode_message(ProxyHeartbeat(**ENDS)))
    assert isinstance(sent, ProxyHeartbeat)
    assert sent.release == RELEASE
    other = decode_message(encode_message(ProxyHeartbeat(**ENDS, release="9")))
    assert isinstance(other, ProxyHeartbeat)
    assert other.release == "9"


@pytest.mark.parametrize(
    "release", ["", "0.2.0 (protocol 3)", format_release("0.1.0", PROTOCOL - 1)]
)
def test_the_error_names_both_releases_and_the_remedy(release: str) -> None:
    problem = describe_mismatch(release)
    assert RELEASE in problem
    assert (release or "an earlier pd") in problem
    assert "run the same release of pd on all nodes and proxies" in problem
    assert not describe_mismatch(RELEASE)


@pytest.mark.parametrize("release", ["\x1b[2J\r\n", "\u202e", "x" * 256])
def test_a_release_is_shown_escaped_and_cut(release: str) -> None:
    shown = describe_release(release)
    assert shown.isprintable() and len(shown) < 120
