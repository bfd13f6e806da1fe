"""Limits of requests, which follow from the nodes that could serve them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pd.core.errors import ContextLengthError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd.core.sampling_params import SamplingDefaults
    from pd.proxy.node_handle import NodeHandle


# These words, those of :attr:`Limits.longest_context`, and the error's kind are what clients look
# for, to shorten the chat and ask again: LangChain, LiteLLM, agents that write programs.
TOO_LONG = "the prompt is too long"


class Capacity(NamedTuple):
    """Tokens of the largest requests that the nodes of one route can serve.

    Attributes:
        context_length: of both nodes.
        prompt: tokens of a prompt, which both must hold, and have room for an answer.
        pool_tokens: tokens of prompt and answer, which the node that generates must hold.
    """

    context_length: int
    prompt: int
    pool_tokens: int

    def holds(self, prompt_tokens: int, max_tokens: int) -> bool:
        """Whether the nodes could serve such a request."""
        # The last token is generated, but its KV is never needed.
        held = prompt_tokens + max_tokens - 1
        return (
            prompt_tokens <= self.prompt and held < self.context_length and held <= self.pool_tokens
        )

    @property
    def total(self) -> int:
        """Tokens of prompt and answer, at most."""
        return min(self.context_length, self.pool_tokens)


def capacity_of(group: Sequence[NodeHandle]) -> Capacity:
    """Return the capacity of a route through these nodes, of which the last one generates."""
    infos = [node.info for node in group if node.info is not None]
    context_length = min(info.context_length for info in infos)
    prompt = min(context_length - 1, *(info.pool_tokens for info in infos))
    return Capacity(context_length, prompt, infos[-1].pool_tokens)


class Limits(NamedTuple):
    """Limits of a model's requests.

    Attributes:
        routes: what requests may need, by the nodes that are there or were.
        ready: the same by those that are ready.
    """

    model: str
    routes: frozenset[Capacity]
    ready: frozenset[Capacity]
    vocab_size: int | None
    model_path: str | None
    sampling_defaults: SamplingDefaults

    @property
    def context_length(self) -> int:
        """The longest context of a route."""
        return max(route.context_length for route in self.routes)

    @property
    def longest_context(self) -> str:
        """The longest context, in OpenAI's words."""
        return f"this model's maximum context length is {self.context_length} tokens"

    @property
    def _bounds(self) -> str:
        """Bounds, for people, of requests that fit into the longest context."""
        contexts = {route.context_length for route in self.routes}
        return "KV pools" if len(contexts) == 1 else "contexts and KV pools"

    def check_prompt(self, num_tokens: int, max_tokens: int, *, explicit: bool) -> None:
        """Refuse a prompt that no node could ever serve. ``explicit``: the client chose
        ``max_tokens``. Raises ContextLengthError."""
        if num_tokens >= self.context_length:
            raise ContextLengthError(
                f"{TOO_LONG}: it has {num_tokens} tokens, but {self.longest_context}, of which the "
                "answer needs at least one",
                param="prompt",
            )
        longest_prompt = max(route.prompt for route in self.routes)
        if num_tokens > longest_prompt:
            raise ContextLengthError(
                f"{TOO_LONG}: it has {num_tokens} tokens; the nodes' {self._bounds} hold "
                f"{longest_prompt}",
                param="prompt",
            )
        if explicit and num_tokens + max_tokens > self.context_length:
            raise ContextLengthError(
                f"prompt ({num_tokens} tokens) and max_tokens ({max_tokens}) are too much: "
                f"{self.longest_context}",
                param="max_tokens",
            )
        if explicit and not any(route.holds(num_tokens, max_tokens) for route in self.routes):
            raise ContextLengthError(
                f"prompt ({num_tokens} tokens) and max_tokens ({max_tokens}) need more KV than the "
                f"nodes' {self._bounds} hold: {_most_for(num_tokens, self.routes)} tokens",
                param="max_tokens",
            )

    def default_max_tokens(self, num_tokens: int, wanted: int | None) -> int:
        """``max_tokens`` for a client that named none: ``wanted``, as far as there is room at
        present, or else where the nodes that are gone come back."""
        most = _most_for(num_tokens, self.ready) or _most_for(num_tokens, self.routes)
        room = max(1, most - num_tokens)
        return room if wanted is None else min(wanted, room)


def _most_for(num_tokens: int, routes: Iterable[Capacity]) -> int:
    """Tokens of a prompt of this size and its answer, at most; 0 if nothing holds the prompt."""
    return max((route.total for route in routes if num_tokens <= route.prompt), default=0)
