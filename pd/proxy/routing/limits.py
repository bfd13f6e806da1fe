"""Limits of requests, derived from all nodes able to serve them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pd.core.errors import ContextLengthError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd.core.sampling_params import SamplingDefaults
    from pd.proxy.nodes.node_handle import NodeHandle


# Clients look for these words, the words of :attr:`Limits.longest_context` and the kind of the
# error to shorten a chat and try again: LangChain, LiteLLM, coding agents.
TOO_LONG = "the prompt is too long"


class Capacity(NamedTuple):
    """The largest requests the nodes of one route can serve, in tokens.

    Attributes:
        context_length: context of both nodes.
        prompt: longest prompt. Both nodes must hold it and have room for an answer.
        pool_tokens: capacity of the generating node for prompt and answer.
    """

    context_length: int
    prompt: int
    pool_tokens: int

    def can_hold(self, prompt_tokens: int, max_tokens: int) -> bool:
        """Whether the nodes could serve such a request."""
        # We never need the KV of the last token.
        held = prompt_tokens + max_tokens - 1
        return (
            prompt_tokens <= self.prompt and held < self.context_length and held <= self.pool_tokens
        )

    @property
    def total(self) -> int:
        """Maximum number of tokens of prompt and answer together."""
        return min(self.context_length, self.pool_tokens)


def measure_capacity(group: Sequence[NodeHandle]) -> Capacity:
    """Return the capacity of a route through these nodes, the last of which generates."""
    infos = [node.info for node in group if node.info is not None]
    context_length = min(info.context_length for info in infos)
    prompt = min(context_length - 1, *(info.pool_tokens for info in infos))
    return Capacity(context_length, prompt, infos[-1].pool_tokens)


class Limits(NamedTuple):
    """Limits of a model's requests.

    Attributes:
        routes: capacities of all routes, including routes through lost nodes.
        ready: capacities of routes through ready nodes.
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
    def _limit_names(self) -> str:
        """Name the resources that limit requests, for error messages."""
        contexts = {route.context_length for route in self.routes}
        return "KV pools" if len(contexts) == 1 else "contexts and KV pools"

    def check_prompt(self, num_tokens: int, max_tokens: int, *, explicit: bool) -> None:
        """Reject a prompt too large for every node. Raises ContextLengthError.

        Args:
            explicit: the client chose ``max_tokens``.
        """
        if num_tokens >= self.context_length:
            raise ContextLengthError(
                f"{TOO_LONG}: it has {num_tokens} tokens, but {self.longest_context}, of which the "
                "answer needs at least one",
                param="prompt",
            )
        longest_prompt = max(route.prompt for route in self.routes)
        if num_tokens > longest_prompt:
            raise ContextLengthError(
                f"{TOO_LONG}: it has {num_tokens} tokens; the nodes' {self._limit_names} hold "
                f"{longest_prompt}",
                param="prompt",
            )
        if explicit and num_tokens + max_tokens > self.context_length:
            raise ContextLengthError(
                f"prompt ({num_tokens} tokens) and max_tokens ({max_tokens}) are too much: "
                f"{self.longest_context}",
                param="max_tokens",
            )
        if explicit and not any(route.can_hold(num_tokens, max_tokens) for route in self.routes):
            raise ContextLengthError(
                f"prompt ({num_tokens} tokens) and max_tokens ({max_tokens}) need more KV than the "
                f"nodes' {self._limit_names} hold: {_max_total(num_tokens, self.routes)} tokens",
                param="max_tokens",
            )

    def choose_max_tokens(self, num_tokens: int, wanted: int | None) -> int:
        """Choose ``max_tokens`` for a client without one: ``wanted``, limited by ready nodes.

        If no ready node holds the prompt, lost nodes set the limit, because they may return.
        """
        limit = _max_total(num_tokens, self.ready) or _max_total(num_tokens, self.routes)
        room = max(1, limit - num_tokens)
        return room if wanted is None else min(wanted, room)


def _max_total(num_tokens: int, routes: Iterable[Capacity]) -> int:
    """Return the most tokens of such a prompt and its answer; 0 if no route holds the prompt."""
    return max((route.total for route in routes if num_tokens <= route.prompt), default=0)
