"""Bodies of requests that make tokens of text, or text of tokens."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from pd.core.errors import InvalidRequestError
from pd.proxy.chat_messages import Messages
from pd.proxy.fields import Texts, TokenLists
from pd.proxy.request_model import RequestModel
from pd.proxy.requests.chat import TemplateFields
from pd.proxy.requests.common import ModelName

_UNSUPPORTED_TOKENIZE: dict[str, tuple[object, ...]] = {
    "chat_template": (),
    "documents": ([],),
}


class TokenizeRequest(TemplateFields):
    """A text, or a chat, to make tokens of."""

    unsupported = _UNSUPPORTED_TOKENIZE

    model: ModelName | None = Field(None, description="Name of a served model.")
    prompt: Texts | None = Field(
        None, description="The text, or a list of them. It or `messages` is needed."
    )
    text: Texts | None = Field(None, description="The same as `prompt`, which goes first.")
    return_token_strs: bool = Field(
        False, description="Adds `token_strs`, the names of the tokens in the vocabulary."
    )
    messages: Messages | None = Field(None, description="A chat, which goes before a text.")
    add_special_tokens: bool | None = Field(
        None,
        description="Puts the tokenizer's special tokens, such as BOS, before the text. Unless "
        "given, true for a text and false for a chat.",
    )

    @model_validator(mode="after")
    def _something_is_given(self) -> Self:
        if self.messages is None and self.given is None:
            raise InvalidRequestError(
                "prompt (a string, or a list of them) or messages is needed", param="prompt"
            )
        return self

    @property
    def given(self) -> str | list[str] | None:
        """The text or texts, if there are any."""
        return self.text if self.prompt is None else self.prompt


class DetokenizeRequest(RequestModel):
    """Tokens to make text of."""

    model: ModelName | None = Field(None, description="Name of a served model.")
    tokens: TokenLists = Field(description="Token ids, or a list of such lists.")
    skip_special_tokens: bool = Field(True, description="Leaves special tokens out of the text.")
