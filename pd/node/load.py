"""The load that an elastic node reports to proxies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.node_load import MAX_SECONDS, NodeLoad
from pd.core.step_cost import StepShape

if TYPE_CHECKING:
    from pd.scheduling.combined import CombinedScheduler
    from pd.scheduling.core import NodeCore
    from pd.scheduling.transfer_end import PromptReceiver


def node_load(
    core: NodeCore, scheduler: CombinedScheduler, receiving: PromptReceiver | None
) -> NodeLoad | None:
    """The load at present; None on a node that is not elastic. The caller holds the node's lock."""
    slices, prefill, decode = scheduler.slices, scheduler.prefill, scheduler.decode
    if core.costs is None or slices is None or prefill is None or decode is None:
        return None
    sequences = list(decode.queued())
    answers = sequences.copy()
    if receiving is not None:
        sequences += receiving.queued()
        answers += [request.sequence for request in receiving.expected(slices.horizon)]
    context = sum(sequence.num_tokens for sequence in sequences)
    attended = sum(sequence.num_tokens for sequence in answers)
    beside = StepShape(streams=len(answers), context=attended)
    tokens, pairs = prefill.uncached()
    cost = core.costs.cost
    queue = cost.queue_seconds(tokens, pairs, slices.tokens(beside, queued=tokens), beside)
    return NodeLoad(
        cost=cost,
        itl=min(slices.itl, MAX_SECONDS),
        queued_tokens=tokens,
        queue_seconds=min(queue, MAX_SECONDS),
        streams=len(sequences),
        answering=len(answers),
        context=context,
        free_tokens=core.memory.available * core.memory.page_size,
        chunk=core.config.chunked_prefill_size,
        prompt_share=scheduler.prompt_share.value(queue),
    )
