"""Messages of pd 0.1.0 before processes stated their release, as its build 75580878 wrote them."""

from __future__ import annotations

import json
from typing import Any

PROXY_HEARTBEAT = (
    b"\x8a\xa4type\xaeProxyHeartbeat\xa9run_delay\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xaarun_delays"
    b"\x80\xa4meet\x80\xa6number\x00\xa3itl\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xa8prefixes\xfe"
    b"\xa7decides\xc2\xa2to\xa0\xa6sender\xa3old"
)
NODE_HEARTBEAT = (
    b"\x8e\xa4type\xadNodeHeartbeat\xa5ready\xc3\xadqueued_tokens\x00\xa7running\x00\xa6losses\x00"
    b"\xa9run_delay\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xa6linked\xc0\xa4load\xc0\xa7answers\x00"
    b"\xa7leaving\xc2\xa5stuck\xc2\xa5roles\xc0\xa2to\xa1p\xa6sender\xa3old"
)
# That build refuses heartbeats with other fields.
NODE_HEARTBEAT_FIELDS = {"type", "to", "sender", "ready", "queued_tokens", "running", "losses"}
NODE_HEARTBEAT_FIELDS |= {"run_delay", "linked", "load", "answers", "leaving", "stuck", "roles"}
_PLANE = {
    "name": "model",
    "num_layers": 2,
    "num_heads": 4,
    "head_dim": 8,
    "dtype": "float32",
    "vectors": 2,
    "sharded": True,
    "group": 0,
}
_NODE_INFO = {
    "instance_id": "old",
    "model_id": "m",
    "kv": {"planes": [_PLANE], "page_size": 16, "tp_size": 1, "layout": "layer_major"},
    "endpoint": "tcp://127.0.0.1:1",
    "bootstrap": "",
    "transfers": {"tcp": {"host": "127.0.0.1", "port": "1"}},
    "kv_digest": False,
    "sampling_defaults": {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    },
    "drafter": "",
}


def node_info(role: str, **added: Any) -> bytes:
    """Return the body of a handshake."""
    return json.dumps({"role": role, **_NODE_INFO, **added}).encode()
