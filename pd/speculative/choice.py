"""Makes the drafter named by ``--speculative-algorithm``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pd.core.config import WITH_STATES

if TYPE_CHECKING:
    from pd.core.config import NodeConfig
    from pd.engine.draft_model import DraftModel
    from pd.engine.eagle import EagleWriter
    from pd.engine.engine import Engine
    from pd.kernels.attention import AttentionBackend
    from pd.speculative.adaptation import DraftLengths
    from pd.speculative.drafter import Drafter
    from pd.speculative.eagle import EagleDrafter
    from pd.speculative.shape import DraftShape


def load_draft_model(config: NodeConfig) -> DraftModel | None:
    """Load the draft model, before the KV cache takes the rest of the memory.

    Returns:
        None if the node does not draft with a model.

    Raises:
        UsageError: the draft model has another vocabulary, or we cannot load it.
    """
    if config.speculative_algorithm != "draft" or not config.decodes:
        return None
    assert config.speculative_draft_model is not None
    from pd.engine.draft_model import DraftModel

    return DraftModel.load(config, config.speculative_draft_model)


def make_drafter(
    config: NodeConfig, engine: Engine, draft_model: DraftModel | None
) -> Drafter | None:
    """Make the drafter, or return None without speculation.

    A node that does not decode only has a drafter with a draft head, because a head needs states of
    the prompt.
    """
    if config.speculative_algorithm in WITH_STATES:
        return _make_eagle_drafter(config, engine)
    if config.speculative_algorithm == "none" or not config.decodes:
        return None
    if draft_model is not None:
        from pd.speculative.draft_model import ModelDrafter

        return ModelDrafter(draft_model.make_runner(engine.pool.num_pages), engine.sampler)
    assert config.speculative_algorithm == "ngram", config.speculative_algorithm
    from pd.speculative.ngram import NgramDrafter
    from pd.speculative.ngram_cache import NgramCache

    cache = NgramCache() if config.speculative_ngram_cache == "on" else None
    return NgramDrafter(engine.pool.device, cache)


def choose_shape(config: NodeConfig) -> DraftShape:
    """Return the shape of the largest draft."""
    from pd.speculative.shape import DraftShape

    topk = config.speculative_topk if config.speculative_algorithm in WITH_STATES else 1
    return DraftShape.build_best(config.speculative_num_draft_tokens, topk)


def describe_drafter(config: NodeConfig, engine: Engine) -> str:
    """Describe a drafter for ``NodeInfo.drafter``."""
    eagle = engine.runner.eagle
    if eagle is None:
        return ""
    head = eagle.head.config
    name, layer = head.identify(config), head.layer
    widths = f"{layer.num_kv_heads} KV heads of {layer.head_dim}, states of {head.hidden_size}"
    return f"{name} ({widths}, {engine.layout.planes[0].dtype})"


def _make_eagle_drafter(config: NodeConfig, engine: Engine) -> EagleDrafter:
    from pd.engine.cuda_graphs import GraphRecorder
    from pd.engine.step_graphs import MAX_VERIFIED, choose_decode_sizes
    from pd.speculative.eagle import EagleDrafter

    writer = engine.runner.eagle
    assert writer is not None, "the engine loads the head"
    device, graphs = writer.carried.device, engine.runner.graphs
    attention = _choose_draft_attention(config, writer)
    # The plain backend plans on the host, so a CUDA graph would miss its plans.
    captured = graphs is not None and attention.name != "torch"
    shape = choose_shape(config)
    rows = (max(graphs.sizes) if graphs is not None else 0) * shape.width
    return EagleDrafter(
        writer,
        attention,
        shape,
        engine.runner.move_tokens,
        max_context=engine.context_length,
        sizes=choose_decode_sizes(min(rows, MAX_VERIFIED)) if captured else (),
        recorder=GraphRecorder(device) if captured else None,
    )


def _choose_draft_attention(config: NodeConfig, writer: EagleWriter) -> AttentionBackend:
    """Make the node's attention backend over the head's KV, or one that can draft."""
    from pd.kernels.attention import find_attention_backend

    layer, device, latent = writer.head.config.layer, writer.carried.device, writer.head.latent
    find = partial(
        find_attention_backend,
        device=device,
        dtype=writer.carried.dtype,
        head_dim=layer.head_dim,
        latent=latent is not None,
    )
    for name in (config.attention_backend, "triton"):
        if name == "triton" and device.type != "cuda":
            break
        backend = find(name)(writer.kv, layer.num_heads, latent)
        if backend.make_draft_graph(1, 2) is not None:
            return backend
    return find("torch")(writer.kv, layer.num_heads, latent)


def make_draft_lengths(config: NodeConfig, engine: Engine, drafter: Drafter | None) -> DraftLengths:
    """Make the chooser of draft lengths. If lengths adapt, we measure the cost of steps here."""
    from pd.speculative.adaptation import DraftLengths
    from pd.speculative.costs import measure_costs

    shape = choose_shape(config)
    if drafter is None or not config.decodes or config.speculative_adaptive == "off":
        return DraftLengths(None, shape)
    return DraftLengths(measure_costs(engine, drafter, config, shape), shape)
