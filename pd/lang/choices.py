"""How ``select`` compares its choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

# `[log probability, token id, text]` of each token of a choice. The first may have none.
TokenTriples = list[list[Any]]


@dataclass(frozen=True)
class ChoicesDecision:
    """The chosen text, and the facts the decision rests on."""

    decision: str
    meta_info: dict[str, Any]


class ChoicesSamplingMethod(Protocol):
    """Picks one of several choices by the log probabilities of their tokens."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """Whether the method compares with log probabilities without the prompt."""

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[TokenTriples],
        output_token_logprobs: list[TokenTriples],
        unconditional_token_logprobs: list[TokenTriples] | None = None,
    ) -> ChoicesDecision:
        """Pick a choice.

        Args:
            normalized_prompt_logprobs: mean log probability of the tokens of each choice.
            input_token_logprobs: the tokens of each choice after the prompt.
            output_token_logprobs: empty lists, because nothing is generated.
            unconditional_token_logprobs: the same tokens without the prompt, if required.
        """


@dataclass(frozen=True)
class ServerMethod:
    """A method of pd itself, applied next to the model.

    Attributes:
        name: ``choices_method`` of ``POST /generate``.
    """

    name: str


# The choice with the highest mean log probability of its tokens.
token_length_normalized = ServerMethod("token_length_normalized")
# The choice whose first token is likeliest; among equals the next token decides, and so on.
greedy_token_selection = ServerMethod("greedy_token")
# The choice whose mean log probability the prompt raises most.
unconditional_likelihood_normalized = ServerMethod("unconditional_likelihood")

AnyMethod = ServerMethod | ChoicesSamplingMethod
