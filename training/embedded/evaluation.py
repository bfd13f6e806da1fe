"""Scores on the held-out sets, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from embedded.generation import generate
from embedded.heldout import Example, is_right
from embedded.text import TURN_END, Message, render

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from embedded.model import Qwen3


@dataclass
class Result:
    """The model's last answer to one example.

    Attributes:
        prompt, output: token ids of the last turn.
    """

    example: Example
    answer: str
    prompt: list[int]
    output: list[int]

    @property
    def right(self) -> bool:
        return is_right(self.example, self.answer)


def evaluate(
    model: Qwen3,
    tokenizer: Tokenizer,
    examples: list[Example],
    dtype: torch.dtype,
    batch_tokens: int = 400_000,
) -> list[Result]:
    """Answer all examples. Later turns see the model's own earlier answers."""
    stop = tokenizer.token_to_id(TURN_END)
    messages = [list(example.before) for example in examples]
    results: list[Result | None] = [None] * len(examples)
    for turn in range(max(len(example.turns) for example in examples)):
        active = [i for i, example in enumerate(examples) if turn < len(example.turns)]
        for i in active:
            messages[i].append(Message("user", examples[i].turns[turn].question))
        texts = [render(messages[i]) for i in active]
        prompts = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
        outputs = generate(model, prompts, stop, dtype=dtype, batch_tokens=batch_tokens)
        for i, prompt, output in zip(active, prompts, outputs, strict=True):
            answer = tokenizer.decode(output)
            messages[i].append(Message("assistant", answer))
            results[i] = Result(examples[i], answer, prompt, output)
    return [result for result in results if result is not None]
