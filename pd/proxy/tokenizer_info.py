"""Facts about a tokenizer for clients that render chats themselves, in the shape of vLLM's
``/tokenizer_info``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# A tokenizer_config.json may say anything of any length.
MAX_SETTINGS = 256
MAX_CHARACTERS = 4096
_MAX_NUMBER = 1e300
_MAX_EXACT = 1 << 63
_DEFAULT_CLASS = "PreTrainedTokenizerFast"
# Settings that name files of whoever made the tokenizer, or of this host.
_OF_FILES = ("_file", "_path", "_dir", "name_or_path")


def tokenizer_info(
    config: Mapping[str, Any], special_tokens: Mapping[str, str | None], template: str | None
) -> dict[str, object]:
    """The class of a tokenizer, its special tokens as texts, its chat template, and those of its
    other settings that are no lists and no objects.

    Args:
        config: contents of ``tokenizer_config.json``.
        special_tokens: names of special tokens, and their texts.
        template: source of the chat template, if there is one.
    """
    settings: dict[str, object] = {}
    for name, value in config.items():
        if len(settings) == MAX_SETTINGS:
            break
        if _is_told(name, value):
            settings[name] = _rounded(value)
    kind = settings.get("tokenizer_class")
    named = {"tokenizer_class": kind if isinstance(kind, str) else _DEFAULT_CLASS}
    told = settings | named | dict(special_tokens) | {"chat_template": template}
    return {_whole(name): _whole(value) for name, value in told.items()}


def _whole(value: Any) -> Any:
    """The same; half a character, which JSON files can name and answers cannot, as a question
    mark."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _is_told(name: str, value: object) -> bool:
    """Whether a setting is short, a scalar that JSON has, and no name of a file."""
    if len(name) > MAX_CHARACTERS or name.endswith(_OF_FILES):
        return False
    if isinstance(value, str):
        return len(value) <= MAX_CHARACTERS
    if isinstance(value, int | float):
        return abs(value) <= _MAX_NUMBER
    return value is None


def _rounded(value: object) -> object:
    """The same value; an integer of more than 64 bits, as which transformers writes a length
    without a limit, as a float."""
    return float(value) if isinstance(value, int) and abs(value) >= _MAX_EXACT else value
