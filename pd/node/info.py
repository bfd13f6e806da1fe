"""What a node says about itself over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd.node.node import Node


def server_info(node: Node) -> dict[str, object]:
    """What ``GET /server_info`` answers."""
    from pd import __version__

    config, engine = node.config, node.engine
    with node.lock:
        return {
            "role": node.role,
            "instance_id": node.instance_id,
            "version": __version__,
            "model": config.model_name,
            "model_path": str(config.model.resolve()),
            "model_id": engine.model_id,
            "vocab_size": engine.model_config.vocab_size,
            "dtype": engine.layout.dtype,
            "page_size": config.page_size,
            "tp_size": config.tp_size,
            "transfer_backend": node.transfer_backend,
            "attention_backend": engine.attention_backend,
            "context_length": engine.context_length,
            "ready": node.ready,
            "endpoints": {"zmq": node.endpoint, "bootstrap": node.bootstrap_url},
            "pages": node.memory.counts(),
            "queues": node.queues(),
        }
