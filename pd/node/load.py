"""The load that an elastic node reports to proxies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.node_load import MAX_SECONDS, NodeLoad
from pd.core.step_cost import StepShape
from pd.scheduling.cost_model import with_answers

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
    """The load at present; None on a node that is not elastic. The caller holds the node's lock.

    Args:
        under_way: seconds until the step that computes prompts now is over.
    """
    slices, prefill, decode = scheduler.slices, scheduler.prefill, scheduler.decode
    if core.costs is None or slices is None or prefill is None or decode is None:
        return None
    generated = list(decode.queued())
    attended = sum(sequence.num_tokens for sequence in generated)
    beside = StepShape(streams=len(generated), context=attended)
    streams = beside
    if receiving is not None:
        beside = with_answers(beside, receiving.expected(slices.horizon))
        streams = with_answers(streams, (each.request for each in receiving.queued()))
    own = (each.request for each in prefill.queued() if each.request.outgoing is None)
    streams = with_answers(streams, own)
    waiting = sum(len(each.prompt) for each in prefill.waiting if each.outgoing is None)
    if receiving is not None:
        waiting += receiving.queued_tokens
    tokens, pairs = prefill.uncached()
    cost = core.costs.cost
    middle = int(pairs / tokens) if tokens else 0
    chunk = slices.usual(beside, middle, tokens)
    queue = under_way + cost.queue_seconds(tokens, pairs, chunk, beside)
    return NodeLoad(
        cost=cost,
        itl=min(slices.itl, MAX_SECONDS),
        queued_tokens=tokens,
        queue_seconds=min(queue, MAX_SECONDS),
        streams=streams.streams,
        answering=beside.streams,
        awaits=receiving is not None and receiving.awaits,
        context=int(streams.context),
        free_tokens=max(0, core.memory.available * core.memory.page_size - waiting),
        chunk=core.config.chunked_prefill_size,
        prompt_share=scheduler.prompt_share.value(queue),
    )
