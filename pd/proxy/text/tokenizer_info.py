"""Describes a tokenizer to clients that render chats, like vLLM's ``/tokenizer_info``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# Limits, because a tokenizer_config.json may have any number of settings of any length.
MAX_SETTINGS = 256
MAX_CHARACTERS = 4096
_MAX_NUMBER = 1e300
_MAX_EXACT = 1 << 63
_DEFAULT_CLASS = "PreTrainedTokenizerFast"
# Settings that name files, either the author's or this host's.
_OF_FILES = ("_file", "_path", "_dir", "name_or_path")


def describe_tokenizer(
    config: Mapping[str, Any], special_tokens: Mapping[str, str | None], template: str | None
) -> dict[str, object]:
    """Describe a tokenizer: its class, special tokens, chat template and scalar settings.

    Args:
        config: contents of ``tokenizer_config.json``.
        special_tokens: texts of the special tokens by name.
        template: source of the chat template, if there is one.
    """
    settings: dict[str, object] = {}
    for name, value in config.items():
        if len(settings) == MAX_SETTINGS:
            break
        if _is_shown(name, value):
            # transformers writes a length without a limit as an integer of more than 64 bits.
            is_long = isinstance(value, int) and abs(value) >= _MAX_EXACT
            settings[name] = float(value) if is_long else value
    kind = settings.get("tokenizer_class")
    named = {"tokenizer_class": kind if isinstance(kind, str) else _DEFAULT_CLASS}
    facts = settings | named | dict(special_tokens) | {"chat_template": template}
    return {_replace_surrogates(name): _replace_surrogates(value) for name, value in facts.items()}


def _replace_surrogates(value: Any) -> Any:
    """Replace halves of surrogate pairs by question marks, because answers cannot hold them."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _is_shown(name: str, value: object) -> bool:
    """Tell whether a setting is a short scalar of JSON, and not the name of a file."""
    if len(name) > MAX_CHARACTERS or name.endswith(_OF_FILES):
        return False
    if isinstance(value, str):
        return len(value) <= MAX_CHARACTERS
    if isinstance(value, int | float):
        return abs(value) <= _MAX_NUMBER
    return value is None
