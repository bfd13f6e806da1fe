"""Builds a node from its parts: engine, transfer, registry. Importing this imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pd.bootstrap.registry import Registry
from pd.core.node_info import NodeInfo
from pd.decode_node.node import DecodeNode
from pd.engine.engine import Engine
from pd.models.generation_config import sampling_defaults
from pd.prefill_node.node import PrefillNode
from pd.transfer.registry import make_transfer_manager
from pd.unified_node.node import UnifiedNode

if TYPE_CHECKING:
    from pd.core.config import NodeConfig
    from pd.core.sampling_params import SamplingDefaults
    from pd.node.node import Node
    from pd.transfer.base import TransferManager


class Assembled(NamedTuple):
    """A node, not started yet; ``registry`` on prefill nodes only."""

    node: Node
    registry: Registry | None


def assemble(config: NodeConfig, instance_id: str, bootstrap_url: str) -> Assembled:
    """Load the model and build the node around it.

    Raises:
        UsageError, SetupError: the model, the device or the transfer backend cannot be had.
    """
    engine = Engine.build(config)
    node: Node
    registry = None
    if config.role == "unified":
        node = UnifiedNode(config, engine, instance_id)
    elif config.role == "decode":
        node = _decode(config, engine, instance_id)
    else:
        node, registry = _prefill(config, engine, instance_id, bootstrap_url)
    node.bootstrap_url = bootstrap_url
    node.sampling_defaults = _sampling_defaults(config)
    return Assembled(node, registry)


def _decode(config: NodeConfig, engine: Engine, instance_id: str) -> DecodeNode:
    transfer = _transfer(config, engine, instance_id)
    node = DecodeNode(config, engine, instance_id, transfer)
    node.introduce(_introduction(node, transfer, bootstrap_url=""))
    return node


def _prefill(
    config: NodeConfig, engine: Engine, instance_id: str, bootstrap_url: str
) -> tuple[PrefillNode, Registry]:
    transfer = _transfer(config, engine, instance_id)
    node = PrefillNode(config, engine, instance_id, transfer)
    node.registry = Registry(
        _introduction(node, transfer, bootstrap_url),
        connect=node.add_peer,
        on_replaced=lambda old: node.lose_peer(old, "a new instance took its place"),
    )
    return node, node.registry


def _transfer(config: NodeConfig, engine: Engine, instance_id: str) -> TransferManager:
    return make_transfer_manager(
        config.transfer_backend,
        engine.pool,
        instance_id,
        config.host,
        advertise_host=config.advertise_host,
        cluster_key=config.cluster_key,
        trust_network=config.trust_network,
        fake_script=config.fake_script,
    )


def _sampling_defaults(config: NodeConfig) -> SamplingDefaults:
    return sampling_defaults(config.model, config.generation_config)


def _introduction(node: Node, transfer: TransferManager, bootstrap_url: str) -> NodeInfo:
    return NodeInfo(
        instance_id=node.instance_id,
        role=node.role,
        model_id=node.engine.model_id,
        kv=node.engine.layout,
        endpoint=node.endpoint,
        bootstrap=bootstrap_url,
        transfers=transfer.addresses(),
        kv_digest=node.config.kv_digest,
        sampling_defaults=_sampling_defaults(node.config),
    )
