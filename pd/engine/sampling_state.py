"""The state of sampling for one choice of a request."""

from __future__ import annotations

import time
from copy import copy
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pd.core.errors import InvalidRequestError, NodeFailedError, PDError
from pd.core.messages import Finish
from pd.core.sampling_params import choice_seed
from pd.engine.token_rules import MASK_SECONDS, most_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import numpy.typing as npt

    from pd.core.sampling_params import SamplingParams
    from pd.engine.draft_tree import DraftTree
    from pd.engine.token_rules import TokenRules

    IntArray = npt.NDArray[np.int32]


class Draw(NamedTuple):
    """Tokens that one choice draws in a step: one row of logits, or one more for each guess of a
    draft.

    Attributes:
        follows: row of the previous step's samples whose token comes before and was not observed
            yet, or None.
        tree: guesses, after each of which a token is drawn as if it were right; None without any.
        first: where these guesses are among the step's drafted tokens.
        drawn: guesses from there on that are taken to come before the only row; without a tree.
        unread: guesses of the previous step that may have been accepted, with one more token behind
            them; how many were, only the device knows. ``follows`` is None then.
        work: index of their work in that step.
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
        """Tokens between those observed and the first row's, without accepted guesses."""
        return self.drawn + (self.follows is not None or self.unread > 0)

    @property
    def num_rows(self) -> int:
        """Number of rows of logits."""
        return 1 if self.tree is None else 1 + self.tree.size


class SamplingState:
    """Number of output tokens, and those that the device does not count yet for penalties; an
    attribute of the request. One sampler draws all its tokens.

    Attributes:
        params: sampling parameters of the request.
        seed: seed of this choice; with a position it determines the noise.
        num_output_tokens: tokens observed so far.
        has_penalties: whether any penalty changes logits.
        bias_ids, bias: int64 and float32 arrays of the request's ``logit_bias``.
        stop_ids: int64 ids that end the choice, masked while :meth:`must_continue`.
        prompt_ids: distinct tokens of the prompt, int32, if a repetition penalty acts on them.
        uncounted: output tokens for :class:`pd.engine.penalties.Penalties` to count.
        counted_ahead: tokens which that has counted, and which were not observed yet.
        penalty_row: where it counts them, or None.
        is_counted: whether that row counts this choice's prompt, and its output but for
            ``uncounted``.
        rules: which tokens may come next, if the host decides; else None.
        mask_seconds: processor time that the rules took for each mask of the last step; 0 where it
            was in time.
        advance_seconds: processor time that the rules took for the tokens so far, without masks.
        is_timed: a step took long for masks together with this one, so that from then on it is
            known which of them do.
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
        """``seed`` defaults to ``params.seed``; ``prompt`` is int32 and not copied. ``make_rules``
        is given the tokens that end the choice, and those of the model in any case."""
        self.params = params
        self.seed = params.seed if seed is None else seed
        self._prompt_length = len(prompt)
        ending = set(params.stop_token_ids)
        if not params.ignore_eos:
            ending |= set(eos_token_ids)
        self._ending = frozenset(ending)
        # With ``ignore_eos``, too, an output that is complete for the rules needs a token to end.
        stopping = ending if make_rules is None else ending | set(eos_token_ids)
        inside = sorted(token for token in stopping if 0 <= token < vocab_size)
        self.stop_ids = np.array(inside, dtype=np.int64)
        self.bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self.bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        repeats = params.repetition_penalty != 1.0
        self.has_penalties = repeats or bool(params.frequency_penalty or params.presence_penalty)
        # Sorted and never written to, because all choices of a request share it.
        self.prompt_ids = np.unique(prompt) if repeats else np.empty(0, np.int32)
        self._forget_output()
        self.rules = None if make_rules is None else make_rules(inside)
        self.mask_seconds = 0.0
        self.is_timed = False

    def position(self, ahead: int = 0) -> int:
        """Return the index, in prompt and output together, of the token after the next ``ahead``
        ones."""
        return self._prompt_length + self.num_output_tokens + ahead

    def must_continue(self, ahead: int = 0) -> bool:
        """Whether the token after the next ``ahead`` may not end the choice (``min_tokens``)."""
        if len(self.stop_ids) == 0:
            return False
        return self.num_output_tokens + ahead < self.params.min_tokens

    def may_stop_within(self, first: int, last: int) -> bool | None:
        """Say of the tokens after the next ``first`` to ``last`` whether they may end the choice:
        all of them (True) or none (False); None if some may and some may not."""
        if self.must_continue(last):
            return False
        return None if self.must_continue(first) else True

    def observe(self, token: int) -> Finish | None:
        """Count an output token. Returns the reason if the choice ends with it, else None.

        Raises:
            NodeFailedError: the rules forbid it.
            InvalidRequestError: the rules take too long.
        """
        self.num_output_tokens += 1
        if self.counted_ahead:
            self.counted_ahead -= 1
        elif self.has_penalties:
            self.uncounted.append(token)
        if self.rules is not None:
            if self.mask_seconds > MASK_SECONDS:
                self._refuse_masks()
            began = time.thread_time()
            allowed = self.rules.advance(token)
            self._count_advance(began, 1)
            if not allowed:
                raise NodeFailedError(f"the grammar forbids token {token}")
            if self.rules.ended:
                return Finish("stop", matched=token)
        if self.num_output_tokens > self.params.min_tokens and token in self._ending:
            return Finish("stop", matched=token)
        if self.num_output_tokens >= self.params.max_tokens:
            return Finish("length")
        return None

    def count_anew(self, ids: IntArray) -> None:
        """Have the device count the prompt and the whole output once more, since a step for which
        it was to count may have failed before it did.

        Args:
            ids: the prompt and the output so far, int32. All of it was observed.
        """
        if self.has_penalties:
            self.uncounted[:] = ids[len(ids) - self.num_output_tokens :].tolist()
            self.is_counted = False

    def _refuse_masks(self) -> None:
        grammar = self.params.grammar
        if grammar is not None:
            raise InvalidRequestError(
                f"{grammar.kind}: finding the tokens that may come next took "
                f"{self.mask_seconds:.2f} s of processor time; at most {MASK_SECONDS:g} may be "
                "taken",
                param=grammar.kind,
            )

    def _count_advance(self, began: float, tokens: int) -> None:
        """Count the time in which the rules tried so many tokens more.

        Args:
            began: processor time of this thread.

        Raises:
            InvalidRequestError: it is too much in all.
        """
        self.advance_seconds += time.thread_time() - began
        self._num_advanced += tokens
        grammar, most = self.params.grammar, most_seconds(self._num_advanced)
        if self.advance_seconds > most and grammar is not None:
            raise InvalidRequestError(
                f"{grammar.kind}: adding {self._num_advanced} tokens to the output took "
                f"{self.advance_seconds:.2f} s of processor time; at most {most:.2f} may be taken",
                param=grammar.kind,
            )

    def forced(self, ids: IntArray) -> list[int]:
        """Tokens that the rules force upon the output, whose last token is never among them; none
        where log probabilities or a bias act on each token.

        Args:
            ids: the prompt and the output so far, int32.

        Raises:
            InvalidRequestError: the rules take too long.
        """
        if self.rules is None or not self.rules.jumps_forward:
            return []
        if self.params.logprobs or self.params.logit_bias:
            return []
        most = self.params.max_tokens - self.num_output_tokens - 1
        began = time.thread_time()
        forced = self.rules.forced(ids)
        self._count_advance(began, 0)
        return list(takewhile(lambda token: token not in self._ending, forced[:most]))

    def failure(self, error: str) -> PDError:
        """Return the error of a request for which no token could be drawn; the sampler said
        ``error``."""
        if self.rules is None or self.params.grammar is None:
            return NodeFailedError(error)
        return InvalidRequestError(
            f"{self.params.grammar.kind}: it leaves no token that the model could go on with "
            f"(or {error})",
            param=self.params.grammar.kind,
        )

    def fork(self, index: int) -> SamplingState:
        """Make the state of choice ``index`` of the same request, with its own seed and no
        output."""
        made = copy(self)
        made.seed = choice_seed(self.params.seed, index)
        made._forget_output()
        made.rules = None if self.rules is None else self.rules.fresh()
        return made

    def _forget_output(self) -> None:
        self.num_output_tokens = 0
        self.advance_seconds, self._num_advanced = 0.0, 0
        self.uncounted: list[int] = []
        self.counted_ahead = 0
        self.penalty_row: int | None = None
        self.is_counted = False
