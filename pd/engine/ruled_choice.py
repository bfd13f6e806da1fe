"""A choice whose next tokens are restricted by rules on the host."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from pd.core.errors import NodeFailedError, PDError
from pd.engine.token_rules import fill_masks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from pd.engine.draft_tree import DraftTree
    from pd.engine.token_rules import TokenRules

    IntArray = npt.NDArray[np.int32]

# A choice is slow from this processor time on, for a mask or an added token.
SLOW_SECONDS = 4e-3
# Number of tokens to follow before we check the time or charge the budget.
_FOLLOWED = 32
# Number of quick masks in a row that make a choice trusted.
PROOFS = 16
# Number of tokens before forced ones. They determine how the tokenizer writes the forced text.
_CONTEXT = 8


class RuledChoice:
    """The rules of a choice. They follow its output with a delay.

    The thread that draws tokens only notes them. A thread of
    :class:`pd.engine.rule_lanes.RuleLanes` later advances the rules and fills the next mask, so
    nobody else waits if that takes long. While :attr:`is_busy` is set, only that thread may touch
    the choice.

    A choice is trusted (:attr:`is_trusted`) if its masks were quick when the grammar was tried. The
    thread that launches steps handles trusted choices together and hardly times them. After a slow
    mask, a choice must prove that it is quick, with more masks each time.

    Args:
        rules: for an empty output.
        kind: kind of the grammar, for messages.
        prompt: int32.
        trim: returns the part of the forced tokens that may come.

    Attributes:
        mask: which tokens may come next, if known; read-only.
        error: the reason why the request has to end.
        forced: tokens that must come next.
        is_slow: whether masks or tokens take long. A slow choice takes part in a step only if its
            mask is known.
        is_late: whether its mask was late for the last step, which then drew nothing for it.
        has_ended: whether the output is complete.
        has_followed: whether the rules have followed any token.
        has_jumped: whether the last noted tokens were forced.
    """

    def __init__(
        self,
        rules: TokenRules,
        kind: str,
        prompt: IntArray,
        trim: Callable[[list[int]], list[int]],
    ) -> None:
        self.rules, self.budget, self._jumps = rules, rules.budget, rules.jumps_forward
        self._kind, self._prompt, self._trim = kind, prompt, trim
        self._recent: list[int] = prompt[-_CONTEXT:].tolist() if self._jumps else []
        self._noted: list[int] = []
        self.mask = rules.first_mask
        self.error: PDError | None = None
        self.forced: list[int] = []
        self._forced_later: list[int] = []
        self.is_busy = self.is_slow = self.is_late = self.has_ended = False
        self.has_followed = self.has_jumped = False
        # Quick masks since the choice was last slow, and how many it needs to be trusted.
        self._proofs, self._proofs_wanted = 0, 0 if rules.is_quick else PROOFS
        # Tokens that were not yet charged to the budget.
        self._uncounted = 0

    def fork_choice(self, trim: Callable[[list[int]], list[int]]) -> RuledChoice:
        """Make another choice of the request with the same rules and no output."""
        return RuledChoice(self.rules.fork_rules(), self._kind, self._prompt, trim)

    @property
    def is_new(self) -> bool:
        """Whether no token was noted so far."""
        return not self.has_followed and not self._noted

    @property
    def is_trusted(self) -> bool:
        """Whether masks of this choice may be filled together with others, which then wait for
        them."""
        return self._proofs >= max(self._proofs_wanted, self.budget.proofs) and not self.is_slow

    @property
    def may_jump(self) -> bool:
        """Whether rules may force tokens that we do not know yet."""
        return self._jumps and self.mask is None and not self.has_jumped

    def add_token(self, token: int) -> bool:
        """Add a token to the output. Returns whether the output is complete."""
        self._noted.append(token)
        self.mask, self.has_jumped = None, False
        if self._jumps:
            self._recent = [*self._recent[1 - _CONTEXT :], token]
        self.has_ended = self.rules.ends_with(token)
        return self.has_ended

    def follow_output(self) -> None:
        """Advance the rules over the noted tokens. Their exceptions end up in :attr:`error`."""
        noted, self._noted, self.has_followed = self._noted, [], True
        for start in range(0, len(noted), _FOLLOWED):
            tokens = noted[start : start + _FOLLOWED]
            began = time.thread_time()
            self._advance_rules(tokens, is_last=start + _FOLLOWED >= len(noted))
            seconds = time.thread_time() - began
            self.charge_time(seconds, len(tokens) + len(self.forced), len(tokens))
            if self.error is not None:
                return

    def follow_untimed(self) -> int:
        """Do the same without timing, for a caller that checks the time itself.

        Returns:
            The number of tokens that were followed or found to be forced.
        """
        noted, self._noted, self.has_followed = self._noted, [], True
        self._advance_rules(noted, is_last=True)
        self._uncounted += len(noted)
        if self._uncounted >= _FOLLOWED:
            self.charge_time(0.0, 1)
        return len(noted) + len(self.forced)

    def draw_forced(self, mask: IntArray) -> None:
        """Have the next step sample the first forced token, if any, and force the others after it.

        A step that computes a prompt samples a token in any case, so we cannot append all of them
        before it.

        Args:
            mask: where tokens are forced, only the first one remains allowed.
        """
        if not self.forced:
            return
        first, *self._forced_later = self.forced
        self.forced = []
        mask[:] = 0
        mask.view(np.uint32)[first // 32] = 1 << first % 32

    def _advance_rules(self, tokens: list[int], *, is_last: bool) -> None:
        try:
            for token in tokens:
                if not self.rules.accept_token(token):
                    raise NodeFailedError(f"the grammar forbids token {token}")
            if is_last and self._jumps:
                later, self._forced_later = self._forced_later, []
                self.forced = later or self._trim(
                    self.rules.find_forced(np.array(self._recent, np.int32))
                )
        except PDError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - whatever the rules' library raises
            self.error = NodeFailedError(f"the grammar could not follow the output: {error!r}")

    def fill_masks(
        self, masks: IntArray, tree: DraftTree | None = None, guesses: Sequence[int] = ()
    ) -> None:
        """Fill the masks of the next token and after each guess of a draft; see
        :func:`pd.engine.token_rules.fill_masks`."""
        began = time.thread_time()
        self.fill_untimed(masks, tree, guesses)
        self._proofs += 1
        self.charge_time(time.thread_time() - began, len(masks))

    def fill_untimed(
        self, masks: IntArray, tree: DraftTree | None = None, guesses: Sequence[int] = ()
    ) -> None:
        """Do the same without timing, for a caller that checks the time itself."""
        try:
            fill_masks(self.rules, masks, tree, guesses)
        except Exception as error:  # noqa: BLE001 - whatever the rules' library raises
            self.error = NodeFailedError(f"the grammar could not say what may come: {error!r}")

    def charge_time(self, seconds: float, steps: int, tokens: int = 0) -> None:
        """Charge the budget for this many masks or tokens (``steps``)."""
        if seconds > SLOW_SECONDS * steps:
            self.mark_untrusted(PROOFS)
            self.budget.proofs = PROOFS
        self.budget.add_usage(seconds, tokens + self._uncounted)
        self._uncounted = 0
        if self.error is None:
            self.error = self.budget.check_limit(self._kind)

    def mark_untrusted(self, proofs: int = 1) -> None:
        """Treat the choice as slow until it proves otherwise. It needs at least ``proofs`` quick
        masks, and twice as many as last time."""
        self.is_slow = True
        self._proofs, self._proofs_wanted = 0, max(proofs, 2 * self._proofs_wanted)
