"""The tokenizer of an offline model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Tokenizer:
    """Converts between texts and tokens as the proxy does, under transformers' names.

    Args:
        post: sends a body to a path of the proxy and returns the answer.
        get: asks for a path of the proxy.
        model: name of the model; None for the first.
    """

    def __init__(
        self,
        post: Callable[[str, dict[str, Any]], Any],
        get: Callable[[str], Any],
        model: str | None,
    ) -> None:
        self._post = post
        self._named = {} if model is None else {"model": model}
        self._facts: dict[str, Any] = get("/tokenizer_info")

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template."""
        return self._facts.get("chat_template")

    @property
    def eos_token(self) -> str | None:
        return self._facts.get("eos_token")

    @property
    def bos_token(self) -> str | None:
        return self._facts.get("bos_token")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text."""
        body = self._named | {"prompt": text, "add_special_tokens": add_special_tokens}
        tokens: list[int] = self._post("/tokenize", body)["tokens"]
        return tokens

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        if not token_ids:
            return ""
        body = {"tokens": list(token_ids), "skip_special_tokens": skip_special_tokens}
        text: str = self._post("/detokenize", self._named | body)["text"]
        return text

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """Render a conversation as a prompt: its tokens, or its text without ``tokenize``.

        ``variables``: further variables of the template.
        """
        body: dict[str, Any] = self._named | {
            "messages": [dict(message) for message in conversation],
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        if variables:
            body["chat_template_kwargs"] = variables
        tokens: list[int] = self._post("/tokenize", body)["tokens"]
        return tokens if tokenize else self.decode(tokens)
