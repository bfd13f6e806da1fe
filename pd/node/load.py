"""The load an elastic node reports to proxies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.node_load import MAX_SECONDS, NodeLoad
from pd.core.step_cost import StepShape
from pd.scheduling.cost_model import add_answers

if TYPE_CHECKING:
    from pd.scheduling.combined import CombinedScheduler
    from pd.scheduling.core import NodeCore
    from pd.scheduling.transfer_end import PromptReceiver


def node_load(
    core: NodeCore,
    scheduler: CombinedScheduler,
    receiving: PromptReceiver | None,
    under_way: float,
) -> NodeLoad | None:
    """Measure the node's load; None on a node that is not elastic. The caller holds its lock.

    Args:
        under_way: seconds until the running prefill step ends.
    """
    slices, prefill, decode = scheduler.slices, scheduler.prefill, scheduler.decode
    if core.costs is None or slices is None or prefill is None or decode is None:
        return None
    generated = list(decode.iter_queued())
    attended = sum(sequence.num_tokens for sequence in generated)
    beside = StepShape(streams=len(generated), context=attended)
    streams = beside
    if receiving is not None:
        beside = add_answers(beside, receiving.iter_expected(slices.horizon))
        streams = add_answers(streams, (each.request for each in receiving.iter_queued()))
    own = (each.request for each in prefill.iter_queued() if each.request.outgoing is None)
    streams = add_answers(streams, own)
    waiting = sum(len(each.prompt) for each in prefill.waiting if each.outgoing is None)
    if receiving is not None:
        waiting += receiving.queued_tokens
    memory = core.memory
    free = memory.num_available
    tokens, pairs = prefill.count_uncached()
    cost = core.costs.cost
    middle = int(pairs / tokens) if tokens else 0
    chunk = slices.usual_tokens(beside, middle, tokens)
    queue = under_way + cost.queue_seconds(tokens, pairs, chunk, beside)
    return NodeLoad(
        cost=cost,
        itl=min(slices.itl, MAX_SECONDS),
        queued_tokens=tokens,
        queue_seconds=min(queue, MAX_SECONDS),
        streams=streams.streams,
        answering=beside.streams,
        awaits=receiving is not None and receiving.awaits_kv,
        context=int(streams.context),
        free_tokens=max(0, free // memory.num_tables * memory.page_size - waiting),
        chunk=core.config.chunked_prefill_size,
        prompt_share=scheduler.prompt_share.estimate_share(queue),
    )
