"""Bodies of requests that tokenize texts, or detokenize tokens."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from pd.core.errors import InvalidRequestError
from pd.proxy.requests.chat import TemplateFields
from pd.proxy.requests.common import ModelName
from pd.proxy.requests.fields import Texts, TokenLists
from pd.proxy.requests.known_fields import DETOKENIZE, TOKENIZE, FieldPlace
from pd.proxy.requests.messages import Messages
from pd.proxy.requests.request_model import RequestModel


class TokenizeRequest(TemplateFields):
    """Asks for the tokens of a text or chat."""

    place = FieldPlace((TOKENIZE,))

    model: ModelName | None = Field(None, description="Name of a served model.")
    prompt: Texts | None = Field(
        None, description="The text, or a list of them. It or `messages` is needed."
    )
    text: Texts | None = Field(None, description="The same as `prompt`.")
    return_token_strs: bool = Field(
        False, description="Adds `token_strs`, the names of the tokens in the vocabulary."
    )
    messages: Messages | None = Field(None, description="A chat, instead of a text.")
    add_special_tokens: bool | None = Field(
        None,
        description="Puts the tokenizer's special tokens, such as BOS, before the text. "
        "Default: true for a text, false for a chat.",
    )

    @model_validator(mode="after")
    def _one_thing_is_given(self) -> Self:
        names = ("prompt", "text", "messages")
        given = [name for name in names if getattr(self, name) is not None]
        if not given:
            raise InvalidRequestError(
                "send prompt (a string, or a list of them) or messages", param="prompt"
            )
        if len(given) > 1:
            raise InvalidRequestError(
                f"{given[0]} and {given[1]} cannot be combined; send a request for each",
                param=given[1],
            )
        for name in TemplateFields.model_fields.keys() & self.model_fields_set:
            if self.messages is None and getattr(self, name):
                raise InvalidRequestError(
                    f"{name} is for a chat; send messages instead of {given[0]}", param=name
                )
        return self

    @property
    def given_text(self) -> str | list[str] | None:
        """The text or texts, if there are any."""
        return self.text if self.prompt is None else self.prompt


class DetokenizeRequest(RequestModel):
    """Asks for the text of tokens."""

    place = FieldPlace((DETOKENIZE,))

    model: ModelName | None = Field(None, description="Name of a served model.")
    tokens: TokenLists = Field(description="Token ids, or a list of such lists.")
    skip_special_tokens: bool = Field(True, description="Leaves special tokens out of the text.")
