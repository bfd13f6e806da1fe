"""Builds a node from its parts: engine, schedulers, transfer, registry. Importing this imports
torch."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec

from pd.bootstrap.registry import Registry
from pd.core.addresses import format_host
from pd.core.node_info import NodeInfo
from pd.decode_node.receiving import ReceivingEnd
from pd.engine.digests import Digests
from pd.engine.engine import Engine
from pd.engine.footprint import NO_EXTRA_MEMORY
from pd.grammar.compile_jobs import Vocabulary
from pd.grammar.compiler import CompileLimits
from pd.grammar.grammars import MAX_COMPILED_BYTES, Grammars
from pd.models.generation_config import read_sampling_defaults
from pd.node.control import ControlThread
from pd.node.node import Node
from pd.node.step_outputs import StepOutputBuffer
from pd.prefill_node.sending import SendingEnd
from pd.radix import RadixCache
from pd.scheduling.admission_policy import AdmissionPolicy
from pd.scheduling.calibration import calibrate_costs
from pd.scheduling.combined import CombinedScheduler
from pd.scheduling.core import NodeCore
from pd.scheduling.cost_model import CostModel
from pd.scheduling.decode import DecodeScheduler
from pd.scheduling.events import Events
from pd.scheduling.live_requests import LiveRequests
from pd.scheduling.memory import Memory
from pd.scheduling.metrics import RequestMetrics
from pd.scheduling.prefill import PrefillScheduler
from pd.scheduling.waiting_queue import WaitingQueue
from pd.speculative.choice import (
    describe_drafter,
    load_draft_model,
    make_draft_lengths,
    make_drafter,
)
from pd.transfer.registry import make_transfer_manager

if TYPE_CHECKING:
    from pd.core.config import NodeConfig
    from pd.core.node_info import Role
    from pd.models.config import ModelConfig
    from pd.speculative.drafter import Drafter
    from pd.transfer.base import TransferManager


class Assembled(NamedTuple):
    """A node, not started yet; ``registry`` on nodes that send KV only."""

    node: Node
    registry: Registry | None


def assemble_node(config: NodeConfig, instance_id: str, bootstrap_url: str) -> Assembled:
    """Load the model and build the node around it.

    Raises:
        UsageError, SetupError: the model, the device or the transfer backend cannot be had.
    """
    draft = load_draft_model(config)
    with ExitStack() as made:
        engine = Engine.build(config, NO_EXTRA_MEMORY if draft is None else draft.memory)
        made.callback(engine.close)
        control = ControlThread(
            instance_id,
            config.host,
            config.cluster_key,
            mutual=config.is_elastic,
            endpoint=config.message_endpoint,
        )
        made.callback(control.stop)
        drafter = make_drafter(config, engine, draft)
        core = make_core(config, engine, instance_id, control, drafter)
        node = _node_of_role(core, control, bootstrap_url)
        made.pop_all()
        return node


def _node_of_role(core: NodeCore, control: ControlThread, bootstrap_url: str) -> Assembled:
    config = core.config
    if config.is_elastic:
        return elastic_node(core, control, bootstrap_url)
    if config.role == "unified":
        return Assembled(unified_node(core, _describe_node(core, control), control), None)
    transfer = _make_transfer(core)
    own = _describe_node(core, control, transfer, bootstrap_url)
    if config.role == "decode":
        return Assembled(decode_node(core, own, control, transfer), None)
    return prefill_node(core, own, control, transfer)


def make_core(
    config: NodeConfig,
    engine: Engine,
    instance_id: str,
    control: ControlThread,
    drafter: Drafter | None,
) -> NodeCore:
    """Build the objects that the parts of a node share."""
    windows = engine.layout.windows
    radix = RadixCache(config.page_size, policy=config.eviction_policy, num_windows=len(windows))
    memory = Memory(
        engine.pool.num_pages,
        config.page_size,
        radix,
        None if drafter is None else drafter.ngram_cache,
        caches_prefixes=config.radix_cache == "on",
        windows=windows,
    )
    events, metrics = Events(), RequestMetrics()
    return NodeCore(
        config=config,
        instance_id=instance_id,
        engine=engine,
        memory=memory,
        events=events,
        requests=LiveRequests(events, metrics, StepOutputBuffer(instance_id, control.post_message)),
        metrics=metrics,
        drafter=drafter,
        draft_lengths=make_draft_lengths(config, engine, drafter),
        grammars=make_grammars(config, engine),
        costs=_measured_costs(config, engine) if config.is_elastic else None,
        post=control.post_message,
        request_poll=control.request_poll,
    )


def _measured_costs(config: NodeConfig, engine: Engine) -> CostModel:
    mixed = engine.runner.mixed_graphs
    costs = CostModel(mixed.sizes[-1] if mixed is not None else 0)
    calibrate_costs(costs, engine, config)
    return costs


def make_grammars(config: NodeConfig, engine: Engine) -> Grammars:
    """Create the compiler of requests' grammars; its processes start with the first grammar."""
    vocabulary = _load_vocabulary(config, engine.model_config)
    limits = CompileLimits(config.grammar_cpu_seconds, config.grammar_memory, MAX_COMPILED_BYTES)
    jump_forward = config.grammar_jump_forward
    return Grammars(vocabulary, limits, config.grammar_cache, jump_forward=jump_forward)


def _load_vocabulary(config: NodeConfig, model: ModelConfig) -> Vocabulary | str:
    """The tokens of the model, or why they are not known."""
    if config.grammar_backend == "none":
        return "it was started with --grammar-backend none"
    path = config.model / "tokenizer.json"
    if not path.is_file():
        return (
            "its model directory has no tokenizer.json; where it has a sentencepiece model, "
            "transformers writes one: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    stop_ids = [token for token in model.eos_token_ids if 0 <= token < model.vocab_size]
    if not stop_ids:
        return "its model names no token that ends an answer: eos_token_id in config.json"
    return Vocabulary(str(path), model.vocab_size, stop_ids)


def prefill_node(
    core: NodeCore, own: NodeInfo, control: ControlThread, transfer: TransferManager
) -> Assembled:
    """A prefill scheduler and a sending end; queues: bootstrap (the decode node has not reserved)
    → waiting → running → in flight."""

    waiting = WaitingQueue.from_config(core.config, core.memory.radix)
    sending, registry = _sending_end(core, own, transfer, waiting)
    admission = AdmissionPolicy(core.memory, sending=sending)
    prefill = PrefillScheduler(core.engine, core.memory, waiting, admission)
    scheduler = CombinedScheduler(core, prefill, None, sending)
    node = Node(core, own, control, scheduler, sending=sending, transfers=[transfer])
    return Assembled(node, registry)


def _sending_end(
    core: NodeCore, own: NodeInfo, transfer: TransferManager, waiting: WaitingQueue
) -> tuple[SendingEnd, Registry]:
    """The sending end and the registry where its decode nodes introduce themselves."""

    def replaced(old: str) -> None:
        sending.drop_peer(old, "a new instance took its place")

    registry = Registry(own, connect=lambda peer: sending.add_peer(peer), on_replaced=replaced)
    sending = SendingEnd(
        core,
        transfer,
        resume=waiting.put_back,
        forget=registry.forget_peer,
        digests=_make_digests(core),
    )
    return sending, registry


def decode_node(
    core: NodeCore, own: NodeInfo, control: ControlThread, transfer: TransferManager
) -> Node:
    """A decode scheduler and a receiving end; queues: preallocation → transfer → waiting → running
    (→ retracted → running)."""
    decode = DecodeScheduler(core)
    receiving = ReceivingEnd(core, transfer, own, control, decode, _make_digests(core))
    scheduler = CombinedScheduler(core, None, decode)
    return Node(core, own, control, scheduler, receiving=receiving, transfers=[transfer])


def unified_node(core: NodeCore, own: NodeInfo, control: ControlThread) -> Node:
    """Build a node with both schedulers and no hand-offs; queues: waiting → prefill → running
    (→ retracted → running).

    We compare a pair of a prefill and a decode node with this node.
    """
    decode = DecodeScheduler(core)
    waiting = WaitingQueue.from_config(core.config, core.memory.radix)
    admission = AdmissionPolicy(core.memory, decode)
    prefill = PrefillScheduler(core.engine, core.memory, waiting, admission)
    return Node(core, own, control, CombinedScheduler(core, prefill, decode))


def elastic_node(core: NodeCore, control: ControlThread, bootstrap_url: str) -> Assembled:
    """A node with both schedulers and both ends over one pool. Each request says what of it is done
    here; the role is only where the node starts.

    A backend tells the two ends of a link apart by their roles, so each end has a manager of its
    own, and introduces the node in its own role.
    """
    outward, inward = _make_transfer(core), _make_transfer(core)
    own = _describe_node(core, control, outward, bootstrap_url)
    as_prefill = msgspec.structs.replace(own, role="prefill")
    as_decode = msgspec.structs.replace(own, role="decode", transfers=inward.addresses())
    waiting = WaitingQueue.from_config(core.config, core.memory.radix, core.costs)
    sending, registry = _sending_end(core, as_prefill, outward, waiting)
    decode = DecodeScheduler(core)
    receiving = ReceivingEnd(
        core,
        inward,
        as_decode,
        control,
        decode,
        _make_digests(core),
        sending,
        owes_memory=lambda arrived: prefill.owes_memory(arrived),
    )
    admission = AdmissionPolicy(core.memory, decode, sending, receiving)
    prefill = PrefillScheduler(core.engine, core.memory, waiting, admission)
    scheduler = CombinedScheduler(core, prefill, decode, sending, receiving)
    node = Node(
        core,
        own,
        control,
        scheduler,
        sending=sending,
        receiving=receiving,
        transfers=[outward, inward],
    )
    return Assembled(node, registry)


def _make_digests(core: NodeCore) -> Digests | None:
    return Digests(core.engine.pool, on_done=core.request_poll) if core.config.kv_digest else None


def _make_transfer(core: NodeCore) -> TransferManager:
    config = core.config
    return make_transfer_manager(
        config.transfer_backend,
        core.engine.pool,
        core.instance_id,
        config.host,
        advertise_host=config.advertise_host,
        cluster_key=config.cluster_key,
        trust_network=config.trust_network,
        fake_script=config.fake_script,
    )


def _describe_node(
    core: NodeCore,
    control: ControlThread,
    transfer: TransferManager | None = None,
    bootstrap_url: str = "",
) -> NodeInfo:
    """The node as it introduces itself."""
    config, host = core.config, core.config.public_host
    return NodeInfo(
        instance_id=core.instance_id,
        role=cast("Role", config.role),
        model_id=core.engine.model_id,
        identity=core.engine.identity,
        kv=core.engine.layout,
        endpoint=config.message_endpoint or f"tcp://{format_host(host)}:{control.port}",
        bootstrap=bootstrap_url,
        transfers={} if transfer is None else transfer.addresses(),
        kv_digest=config.kv_digest,
        sampling_defaults=read_sampling_defaults(config.model, config.generation_config),
        drafter=describe_drafter(config, core.engine),
    )
