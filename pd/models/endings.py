"""Tokens that end an answer, collected from all files of a checkpoint that name some.

``config.json`` and ``generation_config.json`` give ids, and the tokenizer's settings give a text.
They often disagree. For example, a base model fine-tuned for chats ends its turns with
``<|im_end|>``, and only the tokenizer says so. So an answer ends with any of these tokens, as in
vLLM and SGLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pd.core.brief import short_repr
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from pd.models.checkpoint_tokenizer import TokenizerFiles
    from pd.models.settings import Settings

_KEY = "eos_token_id"


class Endings(NamedTuple):
    """Tokens that end an answer.

    Attributes:
        ids: ascending.
        problems: for people: tokens named in the files that can never be output.
    """

    ids: tuple[int, ...]
    problems: tuple[str, ...]


def find_endings(
    config: Settings,
    generation: Settings,
    tokenizer: TokenizerFiles,
    vocab_size: int,
    *,
    default: int | None,
) -> Endings:
    """Unite the ids named in the files.

    Args:
        config, generation: content of ``config.json`` and ``generation_config.json``.
        default: the id if neither has the key; None for none.

    Raises:
        UsageError: an ``eos_token_id`` is neither an integer nor a list of integers.
    """
    named = [
        (token, f"{_KEY} {token} of {file}")
        for settings, file in ((config, "config.json"), (generation, "generation_config.json"))
        for token in _parse_ids(settings.get(_KEY), file)
    ]
    if _KEY not in config and _KEY not in generation and default is not None:
        named.append((default, f"{_KEY} {default}, which the architecture assumes,"))
    if tokenizer.eos_token_id is not None:
        text = short_repr(tokenizer.eos_token)
        what = f"the tokenizer's eos_token {text} with the id {tokenizer.eos_token_id}"
        named.append((tokenizer.eos_token_id, what))
    problems = [
        f"{what} is not in the model's vocabulary of {vocab_size} tokens"
        for token, what in named
        if not 0 <= token < vocab_size
    ]
    if tokenizer.problem:
        problems.append(tokenizer.problem)
    ids = sorted({token for token, _ in named if 0 <= token < vocab_size})
    if named and not ids:
        problems.append("no token ends an answer, which ends at max_tokens or a stop string only")
    return Endings(tuple(ids), tuple(problems))


def _parse_ids(value: object, file: str) -> list[int]:
    """Parse the ids in a file. Raises UsageError for anything else."""
    found: list[int] = []
    for token in value if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(token, int) or isinstance(token, bool):
            raise UsageError(
                f"{file}: {_KEY} must be an integer or a list of them, not {short_repr(value)}"
            )
        found.append(token)
    return found
