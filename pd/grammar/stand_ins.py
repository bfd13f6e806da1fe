"""Stand-ins for torch and transformers in a process that only compiles grammars.

xgrammar imports both, but compiling needs only the methods of :class:`TokenizerFile`. Without the
real libraries, the process starts much sooner and needs less memory.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from tokenizers import Tokenizer


class _Anything:
    def __init__(self, *args: object, **kwargs: object) -> None:
        pass


class _StandIn(ModuleType):
    """Returns a class that accepts any arguments, for every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Anything,), {})
        setattr(self, name, made)
        return made


class TokenizerFile:
    """The part of transformers' ``PreTrainedTokenizerFast`` that xgrammar uses."""

    def __init__(self, tokenizer_file: str) -> None:
        self.backend_tokenizer = Tokenizer.from_file(tokenizer_file)

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        encoded = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [self.backend_tokenizer.id_to_token(token) for token in ids]


def install_stand_ins() -> None:
    """Make later imports of torch and transformers find the stand-ins."""
    for name in ("torch", "transformers"):
        module = _StandIn(name)
        module.__path__ = []
        sys.modules[name] = module
    # The type of a module lacks this attribute.
    sys.modules["transformers"].PreTrainedTokenizerFast = TokenizerFile  # type: ignore[attr-defined]
    # Otherwise a library under xgrammar would compile an extension for torch.
    os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"
