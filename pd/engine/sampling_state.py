"""The sampling state of one choice of a request."""

from __future__ import annotations

from copy import copy
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pd.core.errors import InvalidRequestError, NodeFailedError, PDError
from pd.core.messages import Finish
from pd.core.sampling_params import choice_seed
from pd.engine.ruled_choice import RuledChoice
from pd.engine.token_limits import LimitTable, TokenLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import numpy.typing as npt

    from pd.core.sampling_params import SamplingParams
    from pd.engine.draft_tree import DraftTree
    from pd.engine.token_rules import TokenRules

    IntArray = npt.NDArray[np.int32]


class Draw(NamedTuple):
    """Tokens that one choice draws in a step: one row of logits, and one more for each guess of a
    draft.

    Attributes:
        follows: row of the previous step whose token precedes this draw and was not observed yet,
            or None.
        tree: guesses. After each one a token is drawn as if the guess were right. None without a
            draft.
        first: index of the first guess among the step's drafted tokens.
        drawn: number of guesses from there on that precede the only row; used without a tree.
        unread: number of guesses of the previous step that may have been accepted, followed by one
            more token. Only the device knows how many were. ``follows`` is None then.
        work: index of the work with these guesses in the previous step.
    """

    state: SamplingState
    follows: int | None = None
    tree: DraftTree | None = None
    first: int = 0
    drawn: int = 0
    unread: int = 0
    work: int = -1

    @property
    def ahead(self) -> int:
        """Number of tokens between the observed ones and the first row, not counting accepted
        guesses."""
        return self.drawn + (self.follows is not None or self.unread > 0)

    @property
    def num_rows(self) -> int:
        """Number of rows of logits."""
        return 1 if self.tree is None else 1 + self.tree.size


def find_ending_tokens(
    params: SamplingParams, eos_token_ids: tuple[int, ...], vocab_size: int
) -> list[int]:
    """Return the tokens that end a choice with rules. These include the model's own even with
    ``ignore_eos``, because an output that is complete for the rules needs some token to end."""
    ending = {*params.stop_token_ids, *eos_token_ids}
    return sorted(token for token in ending if 0 <= token < vocab_size)


class SamplingState:
    """The sampling state of a choice. One sampler draws all its tokens.

    Attributes:
        params: sampling parameters of the request.
        seed: seed of this choice. Seed and position determine the noise.
        num_output_tokens: number of tokens observed so far.
        has_penalties: whether any penalty changes logits.
        bias_ids, bias: int64 and float32 arrays of the request's ``logit_bias``.
        stop_ids: int64 ids that end the choice, masked while :meth:`must_continue` holds.
        prompt_ids: distinct tokens of the prompt, int32, if a repetition penalty acts on them.
        uncounted: output tokens for :class:`pd.engine.penalties.Penalties` to count.
        counted_ahead: number of tokens counted there before they were observed.
        penalty_row: row of the table that counts them, or None.
        is_counted: whether that row has counted the prompt and the output, except ``uncounted``.
        rules: rules for the next tokens, if there are any, else None.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: IntArray,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        seed: int | None = None,
        make_rules: Callable[[Collection[int]], TokenRules] | None = None,
    ) -> None:
        """``seed`` defaults to ``params.seed``. ``prompt`` is int32 and not copied. ``make_rules``
        gets the tokens that end the choice, always including the model's own."""
        self.params = params
        self.seed = params.seed if seed is None else seed
        self._prompt_length = len(prompt)
        ending = set(params.stop_token_ids)
        if not params.ignore_eos:
            ending |= set(eos_token_ids)
        self._ending = frozenset(ending)
        inside = sorted(token for token in ending if 0 <= token < vocab_size)
        if make_rules is not None:
            # NOTE: limits alone end no output, so they leave ``ignore_eos`` as it is.
            inside = find_ending_tokens(params, eos_token_ids, vocab_size)
        self._vocab_size = vocab_size
        self.stop_ids = np.array(inside, dtype=np.int64)
        self.bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self.bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        repeats = params.repetition_penalty != 1.0
        self.has_penalties = repeats or bool(params.frequency_penalty or params.presence_penalty)
        # All choices of a request share this, so nobody may write to it.
        self.prompt_ids = np.unique(prompt) if repeats else np.empty(0, np.int32)
        self._forget_output()
        self.rules: RuledChoice | None = None
        rules = None if make_rules is None else make_rules(inside)
        if params.limits_tokens:
            rules = TokenLimits(LimitTable(params, vocab_size), rules)
        if rules is not None:
            kind = self._limits_name if params.grammar is None else params.grammar.kind
            self.rules = RuledChoice(rules, kind, prompt, self._trim_forced)

    @property
    def _limits_name(self) -> str:
        """The client's field that limits tokens, for messages."""
        return "allowed_token_ids" if self.params.allowed_token_ids else "bad_words"

    def find_position(self, ahead: int = 0) -> int:
        """Return the position, in prompt and output together, of the token after the next ``ahead``
        ones."""
        return self._prompt_length + self.num_output_tokens + ahead

    def must_continue(self, ahead: int = 0) -> bool:
        """Whether the token after the next ``ahead`` ones may not end the choice
        (``min_tokens``)."""
        if len(self.stop_ids) == 0:
            return False
        return self.num_output_tokens + ahead < self.params.min_tokens

    def may_stop_within(self, first: int, last: int) -> bool | None:
        """Return whether the tokens after the next ``first`` to ``last`` ones may end the choice:
        True if all may, False if none may, None otherwise."""
        if self.must_continue(last):
            return False
        return None if self.must_continue(first) else True

    def observe_token(self, token: int) -> Finish | None:
        """Count an output token. Returns the reason if the choice ends with it, else None."""
        self.num_output_tokens += 1
        if self.counted_ahead:
            self.counted_ahead -= 1
        elif self.has_penalties:
            self.uncounted.append(token)
        if self.rules is not None and self.rules.add_token(token):
            return Finish("stop", matched=token)
        if self.num_output_tokens > self.params.min_tokens and token in self._ending:
            return Finish("stop", matched=token)
        if self.num_output_tokens >= self.params.max_tokens:
            return Finish("length")
        return None

    def recount_output(self, ids: IntArray) -> None:
        """Have the device count the prompt and the whole output again, because a step may have
        failed before it counted.

        Args:
            ids: prompt and output so far, int32. All of it was observed.
        """
        if self.has_penalties:
            self.uncounted[:] = ids[len(ids) - self.num_output_tokens :].tolist()
            self.is_counted = False

    def follow_rules(self) -> None:
        """Advance the rules over the output and fill the next mask.

        Raises:
            PDError: the rules forbid a token or take too long.
        """
        rules = self.rules
        if rules is None:
            return
        rules.follow_output()
        if rules.error is None and not rules.has_ended:
            mask = np.full(-(-self._vocab_size // 32), -1, np.int32)
            rules.fill_masks(mask[None])
            rules.draw_forced(mask)
            rules.mask = mask
        if rules.error is not None:
            raise rules.error

    def take_forced(self) -> list[int]:
        """Return the forced tokens that were not taken before."""
        if self.rules is None:
            return []
        forced, self.rules.forced = self.rules.forced, []
        return forced

    def _trim_forced(self, forced: list[int]) -> list[int]:
        """Drop forced tokens after which the output would end. If log probabilities or a bias need
        every token drawn, drop all."""
        if self.params.logprobs or self.params.logit_bias:
            return []
        limit = self.params.max_tokens - self.num_output_tokens - 1
        return list(takewhile(lambda token: token not in self._ending, forced[:limit]))

    def make_error(self, error: str) -> PDError:
        """Make the error of a request for which no token could be drawn. ``error`` is the sampler's
        message."""
        grammar = self.params.grammar
        if self.rules is None or not (grammar or self.params.limits_tokens):
            return NodeFailedError(error)
        field = self._limits_name if grammar is None else grammar.kind
        return InvalidRequestError(
            f"{field}: it leaves no token that the model could go on with (or {error})",
            param=field,
        )

    def fork_state(self, index: int) -> SamplingState:
        """Make the state of choice ``index`` of the same request, with its own seed and no
        output."""
        made = copy(self)
        made.seed = choice_seed(self.params.seed, index)
        made._forget_output()
        made.rules = None if self.rules is None else self.rules.fork_choice(made._trim_forced)
        return made

    def _forget_output(self) -> None:
        self.num_output_tokens = 0
        self.uncounted: list[int] = []
        self.counted_ahead = 0
        self.penalty_row: int | None = None
        self.is_counted = False
