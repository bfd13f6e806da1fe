"""One forward pass over chunks of sequences, and the sampling after it.

On a GPU, :func:`launch_step` only queues both. We can plan and queue the next step meanwhile,
because its input tokens stay on the GPU.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.core.errors import NodeFailedError
from pd.core.messages import TokenLogprobs
from pd.engine.device_copy import DeviceTimer, HostCopy, to_device
from pd.engine.forward_item import ForwardItem
from pd.engine.sampling_state import Draw
from pd.speculative.drafter import DraftRequest, StepOnDevice
from pd.util.warning_limit import WarningLimit

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from pd.engine.model_runner import ModelRunner
    from pd.engine.sampler import PromptLogprobs, SampledToken, Sampler, Samples
    from pd.engine.sampling_state import SamplingState
    from pd.engine.step_outcome import StepOutcome
    from pd.engine.tensor_parallel.leader import LeadingRunner
    from pd.scheduling.request import LaunchedWork, Sequence
    from pd.speculative.draft import Draft, DraftedTokens
    from pd.speculative.drafter import Drafter

    IntArray = npt.NDArray[np.int32]

_no_drafts = WarningLimit(logging.getLogger(__name__))


@dataclass(eq=False, slots=True)
class Work:
    """Tokens ``[start, stop)`` of one sequence, to be computed in one step.

    Attributes:
        samples: sampling states for the next token; empty if the work does not end at the last
            known token.
        logprobs_from: position of the first token with a prompt log probability.
        previous: launched work whose sample is the first token of this one; None if the tokens are
            known.
        num_unread: maximum number of accepted guesses of ``previous``. Until :meth:`settle_unread`,
            ``start`` and ``stop`` count none of them.
        draft_limit: maximum tokens to draft for this step. The sequence has pages for them, and
            ``samples`` has at most one entry.
        draft: guesses to verify. We compute them after the known tokens, and sample a token after
            each one. Set when launched, unless they were drafted ahead.
        ahead_limit: maximum tokens to draft after this step, for the next one.
        ahead_stop: number of tokens for which the sequence has pages. Its output goes no further.
        reread: whether to compute the token before ``start`` once more, see ``ForwardItem.reread``.
        num_forced: number of guesses to accept whatever the model samples, for benchmarks and after
            a failure of the drafter. None if the samples decide.
        row: index of the first sample in the step; set when launched.
        place: index of the work in the step; set when launched if the device counts accepted
            guesses, else -1.
        is_late: whether a mask came too late. Then we ignore ``sampled``, and compute the last
            token again. Set when launched.
        sampled: result, one token for each entry of ``samples``. With a draft, the token after the
            last known one, and one after each guess.
        prompt_logprobs: result for tokens ``max(start + 1, logprobs_from) .. stop`` of the prompt.
        drafter_state: returns the state of the last token for another node's drafter, once the step
            is complete; None if there is none.
    """

    sequence: Sequence
    start: int
    stop: int
    samples: list[SamplingState] = field(default_factory=list)
    logprobs_from: int | None = None
    previous: LaunchedWork | None = None
    num_unread: int = 0
    draft_limit: int = 0
    draft: Draft | None = None
    ahead_limit: int = 0
    ahead_stop: int = 0
    reread: bool = False
    num_forced: int | None = None
    row: int = -1
    place: int = -1
    is_late: bool = False
    sampled: list[SampledToken] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    drafter_state: Callable[[], bytes] | None = None

    @property
    def max_stop(self) -> int:
        """``stop`` if all unread guesses are accepted."""
        return self.stop + self.num_unread

    def settle_unread(self, accepted: int) -> None:
        """Move the work after its accepted unread guesses."""
        if self.num_unread:
            self.start += accepted
            self.stop += accepted
            self.num_unread = 0

    @property
    def num_drafted(self) -> int:
        """Number of guesses."""
        return 0 if self.draft is None else self.draft.tree.size

    @property
    def max_accepted(self) -> int:
        """Maximum number of accepted guesses: the longest branch of the draft."""
        if self.draft is None:
            return 0
        return self.draft.tree.depth if self.num_forced is None else self.num_forced

    @property
    def max_drafted(self) -> int:
        """Maximum number of guesses, including guesses still to be drafted at the launch."""
        return max(self.num_drafted, self.draft_limit)

    @property
    def num_logits(self) -> int:
        """Number of positions at the end of the range with logits."""
        if self.logprobs_from is not None:
            return max(0, min(self.stop - self.start, self.stop - max(self.logprobs_from - 1, 0)))
        return 1 + self.num_drafted if self.samples else 0

    @property
    def num_sampled(self) -> int:
        """Number of entries of ``sampled`` after the step."""
        return len(self.samples) + self.num_drafted

    @property
    def accepted(self) -> list[int]:
        """Indices of the accepted guesses, each following the one before it."""
        if self.draft is None:
            return []
        if self.num_forced is not None:
            return list(range(self.num_forced))
        return self.draft.find_accepted([sampled.token_id for sampled in self.sampled])

    @property
    def is_decode(self) -> bool:
        """Whether the work computes one token of a running sequence to sample the next one."""
        is_last = self.stop - self.start == 1 and bool(self.samples)
        return is_last and self.sequence.is_decoding

    def make_item(self, root: int, first_draft: int) -> ForwardItem:
        """Make the model runner's item for this work.

        Args:
            root: index of the first token among the tokens on the device; used with ``previous``.
            first_draft: index of the first drafted token among them.
        """
        sequence, start = self.sequence, self.start - self.reread
        parts = [sequence.tokens[start : self.stop]]
        if self.previous is not None:
            parts = [sequence.tokens[start : self.start], np.array([-1 - root], np.int32)]
        tree = None if self.draft is None else self.draft.tree
        if tree is not None:
            parts.append(np.arange(-1 - first_draft, -1 - first_draft - tree.size, -1, np.int32))
        return ForwardItem(
            parts[0] if len(parts) == 1 else np.concatenate(parts),
            start,
            sequence.tables,
            self.num_logits,
            tree,
            self.reread,
            carried=0 if sequence.carried_state is None else sequence.carried_state.row,
            unread=self.num_unread,
            work=self.previous.place if self.previous is not None and self.num_unread else -1,
        )


@dataclass(eq=False, slots=True)
class LaunchedStep:
    """A step whose forward pass and sampling are launched.

    Attributes:
        works: do not change these until :meth:`complete` has returned.
        samples: samples of all works, in their order.
        outcome: accepted guesses, counted by the device; None if it does not count them.
        drafted: drafted tokens missing on the host, and their copies.
        prompt_logprobs: log probabilities of the works that need them.
        began: monotonic time at which drafting or else the launch began.
        draft_seconds: time for which the host drafted, before and after the step.
        timer: measures the device. With drafts it has three parts: drafting before the step, the
            step, and drafting after it.
    """

    works: list[Work]
    samples: Samples
    outcome: StepOutcome | None
    drafted: tuple[list[DraftedTokens], HostCopy]
    prompt_logprobs: list[tuple[Work, PromptLogprobs]]
    began: float
    draft_seconds: float
    timer: DeviceTimer

    @property
    def is_over(self) -> bool:
        """Whether :meth:`complete` would not wait."""
        return self.samples.is_ready

    def complete(self) -> None:
        """Wait for the step, and fill in the results of its works."""
        sampled = self.samples.read_tokens()
        batches, copies = self.drafted
        for batch, tokens in zip(batches, copies.wait(), strict=True):
            batch.host = tokens.numpy().astype(np.int32)
        for work in self.works:
            work.sampled = sampled[work.row : work.row + work.num_sampled]
        for work, logprobs in self.prompt_logprobs:
            work.prompt_logprobs += logprobs.read_logprobs()


class _DeviceTokens:
    """The tokens of a step known only to the device.

    The ends of accepted guesses and the samples of the previous step come first, then drafts.

    Attributes:
        tokens: int64 ``[n]`` on the device, or None if there are none.
        drafts: the drafted tokens among them, or None.
        missing: drafted tokens missing on the host.
    """

    def __init__(self, previous: LaunchedStep | None, works: list[Work]) -> None:
        parts: list[torch.Tensor] = []
        if previous is not None and any(work.num_unread for work in works):
            assert previous.outcome is not None, "only the host finds out what is accepted"
            parts.append(previous.outcome.ends)
        self._first_sample = sum(len(part) for part in parts)
        if any(work.previous is not None for work in works):
            assert previous is not None
            parts.append(previous.samples.tokens)
        self._places: dict[DraftedTokens, int] = {}
        batches = {work.draft.batch: None for work in works if work.draft is not None}
        self._first_draft = sum(len(part) for part in parts) if batches else 0
        place = 0
        for batch in batches:
            self._places[batch] = place
            place += len(batch.tokens)
        drafts = [batch.tokens for batch in batches]
        self._batches = list(batches)
        self.drafts = _join_tokens(drafts)
        self.tokens = _join_tokens([*parts, *drafts])
        self.missing = [batch for batch in batches if batch.host is None]

    def find_place(self, draft: Draft) -> int:
        """Return the index of a draft's first token in ``drafts``."""
        return self._places[draft.batch] + draft.first

    def start_copies(self) -> HostCopy:
        """Queue copies of ``missing``."""
        return HostCopy([batch.tokens for batch in self.missing])

    def wait_for_drafts(self, copies: HostCopy) -> IntArray:
        """Wait for the copies of ``missing``, and return all drafted tokens, int32."""
        for batch, tokens in zip(self.missing, copies.wait(), strict=True):
            batch.host = tokens.numpy().astype(np.int32)
        drafted = [batch.host for batch in self._batches if batch.host is not None]
        return np.concatenate([np.empty(0, np.int32), *drafted])

    def make_item(self, work: Work) -> ForwardItem:
        """See :meth:`Work.make_item`."""
        place = 0 if work.draft is None else self.find_place(work.draft)
        root, follows = 0, work.previous
        if follows is not None:
            root = follows.place if work.num_unread else self._first_sample + follows.row
        return work.make_item(root, self._first_draft + place)


def _join_tokens(parts: list[torch.Tensor]) -> torch.Tensor | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return torch.cat(parts)


def launch_step(
    runner: ModelRunner | LeadingRunner,
    sampler: Sampler,
    works: list[Work],
    on_layers_done: Callable[[int, int], None] | None = None,
    previous: LaunchedStep | None = None,
    drafter: Drafter | None = None,
    drafts: bool = True,
    simulate: Callable[[int], int] | None = None,
    account: Callable[[], None] | None = None,
) -> LaunchedStep:
    """Launch all works in one forward pass.

    If works have rules for the next token, we fill their masks while the pass runs, and launch the
    sampling after that.

    Args:
        on_layers_done: called when KV of layers is in the pool or queued.
        previous: the launched step continued by works with ``previous``.
        drafter: drafts tokens for works with a ``draft_limit``, if ``drafts``.
        simulate: returns how many tokens of a draft to accept, given its size; for benchmarks.
        account: accounts for ``previous``. We call it if any work has rules, because rules must
            know all tokens before.
    """
    began = time.monotonic()
    timer = DeviceTimer(sampler.device)
    begun = True
    if drafter is not None:
        begun = _begin_step(drafter, works, reads_states=runner.eagle is not None)
        if drafts:
            _draft_tokens(drafter, works)
    has_drafts = any(work.draft is not None for work in works)
    if has_drafts:
        timer.start_part()
    draft_seconds = time.monotonic() - began
    known = _DeviceTokens(previous, works)
    items = [known.make_item(work) for work in works]
    if not begun:
        for work in works:
            work.sequence.carried_state = None
    if simulate is not None:
        for work in works:
            if work.draft is not None:
                work.num_forced = simulate(work.draft.tree.size)
    rows, roots, draws = _plan_draws(works, items, known)
    before = None
    if previous is not None and any(work.num_unread for work in works):
        before = previous.outcome
    # Copies, because accounting for the previous step changes them.
    stops, most_unread = [work.stop for work in works], [work.num_unread for work in works]
    followed = [item.work for item in items]
    ruled = any(draw.state.rules is not None for draw in draws)
    # Rules need the drafted tokens before the pass ends.
    drafted = known.start_copies() if ruled else None
    logits = runner.forward(items, on_layers_done, known.tokens, before)
    # After the launch of the pass, because the GPU may be waiting for it.
    sampled = None if previous is None else previous.samples.tokens
    prepared = sampler.prepare_draws(draws, sampled, known.drafts, before)
    prompt_logprobs = _launch_prompt_logprobs(sampler, works, items, logits)
    if rows != list(range(len(logits))):
        logits = logits.index_select(0, to_device(rows, torch.int64, logits.device))
    for work in works:
        work.previous = None  # a chain of works would keep all earlier ones in memory
    # We sample even if no work needs a token, because the samples tell us when the step is over.
    # Until then pages must not change their owner.
    masks = None
    if drafted is not None:
        if account is not None:
            account()
        masks = sampler.fill_masks(prepared, known.wait_for_drafts(drafted))
        for work in works:
            rules = (state.rules for state in work.samples)
            work.is_late = any(each is not None and each.is_late for each in rules)
    samples = sampler.launch_draws(logits, prepared, masks)
    drafted = drafted or known.start_copies()
    if has_drafts:
        timer.start_part()
    outcome = None
    if drafter is not None and drafter.drafts_ahead:
        drafting_since = time.monotonic()
        firsts = [0 if work.draft is None else known.find_place(work.draft) for work in works]
        made = samples.tokens, known.drafts, firsts
        unread = stops, most_unread, followed
        outcome = _follow_step(drafter, StepOnDevice(works, roots, *made, *unread, before=before))
        draft_seconds += time.monotonic() - drafting_since
    copies = known.missing, drafted
    timer.stop()
    for place, work in enumerate(works):
        work.place = -1 if outcome is None else place
    return LaunchedStep(
        works, samples, outcome, copies, prompt_logprobs, began, draft_seconds, timer
    )


def _plan_draws(
    works: list[Work], items: list[ForwardItem], known: _DeviceTokens
) -> tuple[list[int], list[int], list[Draw]]:
    """Plan which tokens to draw, and set the first row of each work.

    Returns:
        For each sampled token its row of logits; for each work the index of its last known token in
        the step; and the draws.
    """
    rows: list[int] = []
    roots: list[int] = []
    draws: list[Draw] = []
    offset = stop = 0
    for work, item in zip(works, items, strict=True):
        draft, unread = work.draft, work.num_unread
        follows = None if work.previous is None or unread else work.previous.row
        offset += item.num_logits
        stop += len(item.token_ids)
        work.row = len(rows)
        if draft is None:
            roots.append(stop - 1)
            rows += [offset - 1] * len(work.samples)
            draws += [Draw(state, follows, unread=unread, work=item.work) for state in work.samples]
        else:
            roots.append(stop - draft.tree.size - 1)
            rows += range(offset - item.num_logits, offset)
            place = known.find_place(draft)
            draws.append(
                Draw(work.samples[0], follows, draft.tree, place, unread=unread, work=item.work)
            )
    return rows, roots, draws


# A drafter may raise anything, for example if memory runs out. Then the model continues without
# drafts, and the output stays the same.


def _begin_step(drafter: Drafter, works: list[Work], *, reads_states: bool) -> bool:
    """Let the drafter prepare the works. If it raises, all works lose drafts and carried states.

    Args:
        reads_states: whether an EAGLE head writes KV from the state before each token. Others may
            share this KV, so it must stay right.

    Returns:
        False if the drafter raised.
    """
    try:
        drafter.begin_step(works)
    except Exception as error:  # noqa: BLE001
        _no_drafts.log_warning(f"the drafter failed; the step has no drafts: {error!r}")
        for work in works:
            work.draft = None
            # For a work with unread guesses only the device knows the start, and it has the state.
            work.reread = reads_states and work.start > 0 and not work.num_unread
            if not work.num_unread:
                work.sequence.carried_state = None
        return False
    return True


def _follow_step(drafter: Drafter, step: StepOnDevice) -> StepOutcome | None:
    """Draft after a step. If the drafter raises, we accept no guess of a tree, because its KV may
    not be where it belongs.

    Returns:
        See :meth:`Drafter.follow_step`.

    Raises:
        NodeFailedError: another rank is gone.
    """
    try:
        return drafter.follow_step(step)
    except NodeFailedError:
        raise
    except Exception as error:  # noqa: BLE001
        _no_drafts.log_warning(f"the drafter failed; the step has no drafts: {error!r}")
        # Passes queued by the drafter may still write to pages of these sequences.
        if step.sampled.is_cuda:
            torch.cuda.synchronize(step.sampled.device)
        for work in step.works:
            work.sequence.next_draft = work.sequence.carried_state = None
            if work.draft is not None and not work.draft.tree.is_chain:
                work.num_forced = 0
        return None


def _draft_tokens(drafter: Drafter, works: list[Work]) -> None:
    """Draft tokens for the works with a draft limit."""
    limited = [work for work in works if work.draft_limit]
    prompt_tokens = sum(work.stop - work.start for work in works if not work.sequence.is_decoding)
    if not limited and not prompt_tokens:
        return
    requests = [
        DraftRequest(work.sequence, work.samples[0], work.draft_limit, work) for work in limited
    ]
    try:
        drafts = drafter.draft_tokens(requests, prompt_tokens)
    except Exception as error:  # noqa: BLE001
        _no_drafts.log_warning(f"the drafter failed; the step has no drafts: {error!r}")
        # The drafter may have missed samples to count for penalties.
        for work in limited:
            work.samples[0].recount_output(work.sequence.ids)
        return
    for work, draft in zip(limited, drafts, strict=True):
        work.draft = draft


def _launch_prompt_logprobs(
    sampler: Sampler, works: list[Work], items: list[ForwardItem], logits: torch.Tensor
) -> list[tuple[Work, PromptLogprobs]]:
    """Launch the prompt log probabilities of all works with ``logprobs_from``.

    Row ``r`` of a work's ``n`` rows of logits predicts the token after position ``stop - n + r``.
    """
    launched = []
    offset = 0
    for work, item in zip(works, items, strict=True):
        first_row = offset
        offset += item.num_logits
        if work.logprobs_from is None:
            continue
        request = work.sequence.request
        if work.logprobs_from == 0 and work.start == 0:
            work.prompt_logprobs.append(TokenLogprobs(int(request.prompt[0]), None))
        targets = request.prompt[work.stop - item.num_logits + 1 : work.stop + 1]
        if len(targets):
            rows = logits[first_row : first_row + len(targets)]
            top, named = request.params.top_logprobs, request.params.logprob_token_ids
            launched.append((work, sampler.compute_prompt_logprobs(rows, targets, top, named)))
    return launched
