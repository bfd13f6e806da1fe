"""Makes the drafter that ``--speculative-algorithm`` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd.core.config import NodeConfig
    from pd.engine.draft_model import DraftModel
    from pd.engine.engine import Engine
    from pd.speculative.adaptation import DraftLengths
    from pd.speculative.drafter import Drafter


def load_draft_model(config: NodeConfig) -> DraftModel | None:
    """Load the model that drafts, before the KV cache takes the memory that is left; None if none
    does.

    Raises:
        UsageError: its vocabulary is not that of the model, or it cannot be loaded.
    """
    if config.speculative_draft_model is None or config.role == "prefill":
        return None
    from pd.engine.draft_model import DraftModel

    return DraftModel.load(config, config.speculative_draft_model)


def make_drafter(
    config: NodeConfig, engine: Engine, draft_model: DraftModel | None
) -> Drafter | None:
    """Make the drafter; None without one, and on a prefill node, which decodes nothing."""
    if config.speculative_algorithm == "none" or config.role == "prefill":
        return None
    if draft_model is not None:
        from pd.speculative.draft_model import ModelDrafter

        return ModelDrafter(draft_model.runner(engine.pool.num_pages), engine.sampler)
    from pd.speculative.ngram import NgramDrafter

    return NgramDrafter(engine.pool.buffer.device)


def draft_lengths(config: NodeConfig, engine: Engine, drafter: Drafter | None) -> DraftLengths:
    """Measure steps, if draft lengths are to follow their cost."""
    from pd.speculative.adaptation import DraftLengths
    from pd.speculative.costs import measure_costs

    if drafter is None or config.speculative_adaptive == "off":
        return DraftLengths(None)
    return DraftLengths(measure_costs(engine, drafter, config))
