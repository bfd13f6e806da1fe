"""One forward pass over chunks of sequences, and the sampling after it.

On a GPU both are only queued when :func:`launch` returns, so that the next step can be planned and
queued meanwhile; the tokens that it needs stay on the GPU.
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
from pd.core.seldom import Seldom
from pd.engine.device_copy import DeviceTimer, HostCopy, to_device
from pd.engine.model_runner import ForwardItem
from pd.engine.sampling_state import Draw
from pd.speculative.drafter import DraftRequest, StepOnDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from pd.core.request import Sequence
    from pd.engine.model_runner import ModelRunner
    from pd.engine.sampler import PromptLogprobs, SampledToken, Sampler, Samples
    from pd.engine.sampling_state import SamplingState
    from pd.engine.step_outcome import StepOutcome
    from pd.engine.tensor_parallel.leader import LeadingRunner
    from pd.speculative.draft import Draft, DraftedTokens
    from pd.speculative.drafter import Drafter

    IntArray = npt.NDArray[np.int32]

_no_drafts = Seldom(logging.getLogger(__name__))


@dataclass(eq=False, slots=True)
class Work:
    """Tokens ``[start, stop)`` of one sequence, to be computed in one step.

    Attributes:
        samples: sampling states that draw a token from the last known position; empty for a chunk
            that does not end at the last known token.
        draft_limit: tokens that may be drafted after the last known one; the sequence has pages for
            them. At most one of ``samples`` then.
        draft: guesses, which are computed after the known tokens; a token is sampled after each of
            them, too. Set when launched, unless they were drafted ahead.
        ahead_limit: tokens that may be drafted behind this step for the next one. The sequence has
            pages for its first ``ahead_stop`` tokens, and none behind them will be output.
        reread: the token before ``start`` is computed once more (see ``ForwardItem.reread``).
        forced: with a draft, how many of its leading tokens count as accepted whatever is sampled,
            for benchmarks and where the drafter failed. None where the sampled tokens decide.
        logprobs_from: prompt log probabilities are wanted of tokens from this position on.
        follows: a work that is launched and not accounted for, whose sample is the first token to
            compute; None where the tokens are known.
        unread: guesses of that work which may have been accepted; ``start`` and ``stop`` are as if
            none were until :meth:`settle` is called.
        row: index of this work's first sample among the step's; set when launched.
        place: index of this work among the step's; set when launched, where the device finds out
            what is accepted. Else -1.
        sampled: result, one per entry of ``samples``; with a draft, the token after the last known
            one and the tokens after each guess.
        prompt_logprobs: result, of tokens ``max(start + 1, logprobs_from) .. stop`` of the prompt.
        drafter_state: returns what a drafter elsewhere needs of the last token, once the step is
            complete; None if nothing.
    """

    sequence: Sequence
    start: int
    stop: int
    samples: list[SamplingState] = field(default_factory=list)
    logprobs_from: int | None = None
    follows: Work | None = None
    unread: int = 0
    draft_limit: int = 0
    draft: Draft | None = None
    ahead_limit: int = 0
    ahead_stop: int = 0
    reread: bool = False
    forced: int | None = None
    row: int = -1
    place: int = -1
    sampled: list[SampledToken] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    drafter_state: Callable[[], bytes] | None = None

    @property
    def most_stop(self) -> int:
        """``stop``, if all unread guesses were accepted."""
        return self.stop + self.unread

    def settle(self, accepted: int) -> None:
        """Note how many of the unread guesses were accepted."""
        if self.unread:
            self.start += accepted
            self.stop += accepted
            self.unread = 0

    @property
    def num_drafted(self) -> int:
        """Number of guesses."""
        return 0 if self.draft is None else self.draft.tree.size

    @property
    def most_accepted(self) -> int:
        """Number of guesses that are accepted at most: those of the longest branch."""
        if self.draft is None:
            return 0
        return self.draft.tree.depth if self.forced is None else self.forced

    @property
    def most_drafted(self) -> int:
        """Number of guesses at most, where these are drafted as the step is launched."""
        return max(self.num_drafted, self.draft_limit)

    @property
    def num_logits(self) -> int:
        """Number of positions at the end of the range whose logits are needed."""
        if self.logprobs_from is not None:
            return max(0, min(self.stop - self.start, self.stop - max(self.logprobs_from - 1, 0)))
        return 1 + self.num_drafted if self.samples else 0

    @property
    def num_sampled(self) -> int:
        """Number of entries of ``sampled`` once the step is complete."""
        return len(self.samples) + self.num_drafted

    @property
    def accepted(self) -> list[int]:
        """Indices of the guesses that are accepted, each following the one before it."""
        if self.draft is None:
            return []
        if self.forced is not None:
            return list(range(self.forced))
        return self.draft.path([sampled.token_id for sampled in self.sampled])

    @property
    def is_decode(self) -> bool:
        """Whether the work computes a running sequence's last token, to sample the next one."""
        is_last = self.stop - self.start == 1 and bool(self.samples)
        return is_last and self.sequence.decodes

    def item(self, root: int, first_draft: int) -> ForwardItem:
        """The work as the model runner takes it.

        Args:
            root: with ``follows``, where its token is among those that only the device has.
            first_draft: where the tokens of the draft are among them.
        """
        sequence, start = self.sequence, self.start - self.reread
        parts = [sequence.tokens[start : self.stop]]
        if self.follows is not None:
            parts = [sequence.tokens[start : self.start], np.array([-1 - root], np.int32)]
        tree = None if self.draft is None else self.draft.tree
        if tree is not None:
            parts.append(np.arange(-1 - first_draft, -1 - first_draft - tree.size, -1, np.int32))
        return ForwardItem(
            parts[0] if len(parts) == 1 else np.concatenate(parts),
            start,
            sequence.pages,
            self.num_logits,
            tree,
            self.reread,
            carried=0 if sequence.carried is None else sequence.carried.row,
            unread=self.unread,
            work=self.follows.place if self.follows is not None and self.unread else -1,
        )


@dataclass(eq=False, slots=True)
class LaunchedStep:
    """A step whose forward pass and sampling are under way.

    Attributes:
        works: not to be changed until :meth:`complete` has returned.
        samples: samples of all works, in their order.
        outcome: what was accepted, as the device finds out; None if it does not.
        drafted: the step's drafted tokens that the host does not have, and their copies.
        prompt_logprobs: log probabilities of works that want them.
        began: monotonic time at which drafting began, or else the launch.
        draft_seconds: how long the host drafted, before the step and behind it.
        timer: of the device's work. With drafts it has three parts: what is drafted for the
            step, the step, and what is drafted behind it.
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
        """Wait for the step and fill in its works' results."""
        sampled = self.samples.result()
        batches, copies = self.drafted
        for batch, tokens in zip(batches, copies.wait(), strict=True):
            batch.host = tokens.numpy().astype(np.int32)
        for work in self.works:
            work.sampled = sampled[work.row : work.row + work.num_sampled]
        for work, logprobs in self.prompt_logprobs:
            work.prompt_logprobs += logprobs.result()


class _DeviceTokens:
    """The tokens of a step that only the device has: of the step before the tokens after what was
    accepted, and the samples; then drafts.

    Attributes:
        tokens: int64 ``[n]`` on the device, or None if there are none.
        drafts: those that were drafted, or None.
        missing: drafted tokens that the host does not have.
    """

    def __init__(self, previous: LaunchedStep | None, works: list[Work]) -> None:
        parts: list[torch.Tensor] = []
        if previous is not None and any(work.unread for work in works):
            assert previous.outcome is not None, "only the host finds out what is accepted"
            parts.append(previous.outcome.ends)
        self._first_sample = sum(len(part) for part in parts)
        if any(work.follows is not None for work in works):
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
        self.drafts = _joined(drafts)
        self.tokens = _joined([*parts, *drafts])
        self.missing = [batch for batch in batches if batch.host is None]

    def place(self, draft: Draft) -> int:
        """Where a draft begins among ``drafts``."""
        return self._places[draft.batch] + draft.first

    def copies(self) -> HostCopy:
        """Queue copies of ``missing``."""
        return HostCopy([batch.tokens for batch in self.missing])

    def on_host(self, copies: HostCopy) -> IntArray:
        """The drafted tokens, int32. ``copies``: of ``missing``."""
        for batch, tokens in zip(self.missing, copies.wait(), strict=True):
            batch.host = tokens.numpy().astype(np.int32)
        found = [batch.host for batch in self._batches if batch.host is not None]
        return np.concatenate([np.empty(0, np.int32), *found])

    def item(self, work: Work) -> ForwardItem:
        """See :meth:`Work.item`."""
        place = 0 if work.draft is None else self.place(work.draft)
        root, follows = 0, work.follows
        if follows is not None:
            root = follows.place if work.unread else self._first_sample + follows.row
        return work.item(root, self._first_draft + place)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return torch.cat(parts)


def launch(
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
    """Begin to compute all works in one forward pass.

    Where rules of the host say which tokens may come next, they are asked while the pass runs, and
    sampling is launched when they have answered.

    Args:
        previous: the step that works with ``follows`` continue; launched, maybe not complete.
        drafter: drafts tokens for works with a ``draft_limit``, if ``drafts``.
        simulate: says how many tokens of a draft of so many count as accepted; for benchmarks.
        account: accounts for ``previous``, whose tokens such rules have to know. It is called if
            any work has rules.
    """
    began = time.monotonic()
    timer = DeviceTimer(sampler.device)
    begun = True
    if drafter is not None:
        begun = _begin(drafter, works, reads_states=runner.eagle is not None)
        if drafts:
            _draft(drafter, works)
    has_drafts = any(work.draft is not None for work in works)
    if has_drafts:
        timer.split()
    draft_seconds = time.monotonic() - began
    known = _DeviceTokens(previous, works)
    items = [known.item(work) for work in works]
    if not begun:
        for work in works:
            work.sequence.carried = None
    if simulate is not None:
        for work in works:
            if work.draft is not None:
                work.forced = simulate(work.draft.tree.size)
    rows, roots, draws = _draws(works, items, known)
    before = None
    if previous is not None and any(work.unread for work in works):
        before = previous.outcome
    # NOTE: as they are here. Accounting for the step before, which rules ask for, settles them.
    stops, most_unread = [work.stop for work in works], [work.unread for work in works]
    followed = [item.work for item in items]
    ruled = any(draw.state.rules is not None for draw in draws)
    # Rules need the drafted tokens before the pass is over.
    drafted = known.copies() if ruled else None
    logits = runner.forward(items, on_layers_done, known.tokens, before)
    # NOTE: after the launch of the pass, for which a GPU may be waiting.
    sampled = None if previous is None else previous.samples.tokens
    prepared = sampler.prepare(draws, sampled, known.drafts, before)
    prompt_logprobs = _prompt_logprobs(sampler, works, items, logits)
    if rows != list(range(len(logits))):
        logits = logits.index_select(0, to_device(rows, torch.int64, logits.device))
    for work in works:
        work.follows = None  # a chain of works would keep all earlier ones in memory
    # NOTE: sampling is launched even if no work samples. Pages must not change their owner before
    # the step is over, which the host sees by the samples.
    masks = None
    if drafted is not None:
        if account is not None:
            account()
        masks = sampler.fill_masks(prepared, known.on_host(drafted))
    samples = sampler.launch(logits, prepared, masks)
    drafted = drafted or known.copies()
    if has_drafts:
        timer.split()
    outcome = None
    if drafter is not None and drafter.drafts_ahead:
        behind = time.monotonic()
        firsts = [0 if work.draft is None else known.place(work.draft) for work in works]
        made = samples.tokens, known.drafts, firsts
        unread = stops, most_unread, followed
        outcome = _follow(drafter, StepOnDevice(works, roots, *made, *unread, before=before))
        draft_seconds += time.monotonic() - behind
    copies = known.missing, drafted
    timer.stop()
    for place, work in enumerate(works):
        work.place = -1 if outcome is None else place
    return LaunchedStep(
        works, samples, outcome, copies, prompt_logprobs, began, draft_seconds, timer
    )


def _draws(
    works: list[Work], items: list[ForwardItem], known: _DeviceTokens
) -> tuple[list[int], list[int], list[Draw]]:
    """The row of logits of each token that is sampled, the place of each work's last known token
    among the tokens of the step, and what is drawn. Sets the first row of each work."""
    rows: list[int] = []
    roots: list[int] = []
    draws: list[Draw] = []
    offset = stop = 0
    for work, item in zip(works, items, strict=True):
        draft, unread = work.draft, work.unread
        follows = None if work.follows is None or unread else work.follows.row
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
            place = known.place(draft)
            draws.append(
                Draw(work.samples[0], follows, draft.tree, place, unread=unread, work=item.work)
            )
    return rows, roots, draws


# A drafter may raise anything, for want of memory say. The model goes on without it, and the output
# stays the same.


def _begin(drafter: Drafter, works: list[Work], *, reads_states: bool) -> bool:
    """Prepare the works. A drafter that raises leaves all of them without drafts, and none may have
    a carried state behind this step. Returns False then.

    Args:
        reads_states: whether an EAGLE head's KV, which may be shared, is written from the state
            before each token.
    """
    try:
        drafter.begin(works)
    except Exception as error:  # noqa: BLE001
        _no_drafts.warn(f"the drafter failed; the step has no drafts: {error!r}")
        for work in works:
            work.draft = None
            # Where a work with unread guesses starts only the device knows, and it has the state.
            work.reread = reads_states and work.start > 0 and not work.unread
            if not work.unread:
                work.sequence.carried = None
        return False
    return True


def _follow(drafter: Drafter, step: StepOnDevice) -> StepOutcome | None:
    """Draft behind a step. If the drafter raises, no guess of a tree counts as accepted, since its
    KV may not be where it belongs.

    Returns:
        See :meth:`Drafter.follow`.

    Raises:
        NodeFailedError: another rank is gone.
    """
    try:
        return drafter.follow(step)
    except NodeFailedError:
        raise
    except Exception as error:  # noqa: BLE001
        _no_drafts.warn(f"the drafter failed; the step has no drafts: {error!r}")
        # Passes that were queued before may still write to pages of these sequences.
        if step.sampled.is_cuda:
            torch.cuda.synchronize(step.sampled.device)
        for work in step.works:
            work.sequence.ahead = work.sequence.carried = None
            if work.draft is not None and not work.draft.tree.is_chain:
                work.forced = 0
        return None


def _draft(drafter: Drafter, works: list[Work]) -> None:
    """Have tokens drafted for the works that may have some."""
    asked = [work for work in works if work.draft_limit]
    prompt_tokens = sum(work.stop - work.start for work in works if not work.sequence.decodes)
    if not asked and not prompt_tokens:
        return
    requests = [DraftRequest(work.sequence, work.samples[0], work.draft_limit) for work in asked]
    try:
        drafts = drafter.draft(requests, prompt_tokens)
    except Exception as error:  # noqa: BLE001
        _no_drafts.warn(f"the drafter failed; the step has no drafts: {error!r}")
        # What the drafter's samples were to count for penalties may not be counted.
        for work in asked:
            work.samples[0].count_anew(work.sequence.ids)
        return
    for work, draft in zip(asked, drafts, strict=True):
        work.draft = draft


def _prompt_logprobs(
    sampler: Sampler, works: list[Work], items: list[ForwardItem], logits: torch.Tensor
) -> list[tuple[Work, PromptLogprobs]]:
    """Launch the log probabilities of the works that want them. Row r of a work's ``n`` rows of
    logits predicts the token after position ``stop - n + r``."""
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
            top = request.params.top_logprobs
            launched.append((work, sampler.prompt_logprobs(rows, targets, top)))
    return launched
