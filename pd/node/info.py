"""The state of a node as it is served over HTTP."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from pd.core.release import PROTOCOL

if TYPE_CHECKING:
    from pd.node.node import Node


def transfer_info(node: Node) -> dict[str, object]:
    """Describe the transfer backends of a node: all it offers and the one each peer uses.

    ``transfer_backend`` sums them up: the best one in use or, before the first peer, the preferred
    one. ``staging`` counts the buffers quarantined because of a lost link.
    """
    if not node.transfers:
        return {
            "transfer_backend": "none",
            "transfer_backends": [],
            "peers": [],
            "staging": {"quarantined": 0},
        }
    offered = list(node.transfers[0].addresses())
    peers = [
        {
            "instance_id": peer.instance_id,
            "role": peer.role,
            "transfer_backend": end.backend_of(peer.instance_id),
        }
        for end in node.ends
        for peer in end.peers.list_infos()
    ]
    used = {peer["transfer_backend"] for peer in peers}
    best = next((backend for backend in offered if backend in used), offered[0])
    return {
        "transfer_backend": best,
        "transfer_backends": offered,
        "peers": peers,
        "staging": {"quarantined": sum(each.quarantined_buffers for each in node.transfers)},
    }


def server_info(node: Node) -> dict[str, object]:
    """Build the answer to ``GET /server_info``."""
    from pd import __version__

    config, engine, lease = node.core.config, node.engine, node.role_lease
    with node.core.events.lock:
        return {
            "role": node.role,
            "elastic": config.is_elastic,
            "instance_id": node.instance_id,
            "version": __version__,
            "protocol": PROTOCOL,
            "model": config.model_name,
            "model_path": str(config.model.resolve()),
            "model_id": engine.model_id,
            "identity": engine.identity,
            "vocab_size": engine.model_config.vocab_size,
            "dtype": engine.layout.model.dtype,
            "page_size": config.page_size,
            "tp_size": config.tp_size,
            "ep_size": config.ep_size,
            "kv_digest": config.kv_digest,
            "trust_network": config.trust_network,
            **transfer_info(node),
            "attention_backend": engine.attention_backend,
            "speculative_algorithm": config.speculative_algorithm,
            "drafter": node.own.drafter,
            "sampling_defaults": asdict(node.own.sampling_defaults),
            "context_length": engine.context_length,
            "ready": node.ready,
            "endpoints": {"zmq": node.endpoint, "bootstrap": node.own.bootstrap},
            "preferred_role": None
            if lease is None
            else asdict(lease.describe_state(time.monotonic())),
            "kv_events": None if node.kv_events is None else node.kv_events.describe_endpoints(),
            "pages": node.core.memory.count_pages(),
            "prefix_leases": node.core.memory.prefix_leases.count_leases(),
            "queues": node.count_queues(),
        }
