"""Bodies of SGLang's ``/v1/score``."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, PlainValidator, model_validator

from pd.core.errors import InvalidRequestError
from pd.core.sampling_params import MAX_LOGPROB_TOKEN_IDS
from pd.proxy.requests.common import RequestFields, Rid
from pd.proxy.requests.fields import (
    MAX_OPTIONS,
    Integers,
    are_all,
    make_mismatch,
    make_problem,
    read_integers,
)
from pd.proxy.requests.known_fields import SCORE, FieldPlace

Part = str | list[int]


def _read_part(value: object, *path: str | int) -> Part:
    """Read a text or a list of token ids."""
    if isinstance(value, str):
        return value
    integers = read_integers(value)
    if integers is None:
        raise make_mismatch("a text or a list of token ids", value, *path)
    return integers


def _read_items(value: object) -> list[Part]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise make_mismatch("a text, or a list of texts or of lists of token ids", value)
    if value and are_all(int, value):
        return [value]
    if not 0 < len(value) <= MAX_OPTIONS:
        raise make_problem(f"must have 1 to {MAX_OPTIONS} items, not {len(value)}")
    return [_read_part(item, number) for number, item in enumerate(value)]


class ScoreRequest(RequestFields):
    """Asks how likely certain tokens are after a query and each of several items."""

    place = FieldPlace((SCORE,))

    query: Annotated[Part, PlainValidator(_read_part, json_schema_input_type=Part)] = Field(
        description="A text or a list of token ids."
    )
    items: Annotated[
        list[Part], PlainValidator(_read_items, json_schema_input_type=str | list[Part])
    ] = Field(
        description="Texts, or lists of token ids, each scored after the query. They are texts if "
        "the query is one.",
        json_schema_extra={"minItems": 1, "maxItems": MAX_OPTIONS},
    )
    label_token_ids: Integers = Field(
        description="The tokens to score.",
        json_schema_extra={"minItems": 1, "maxItems": MAX_LOGPROB_TOKEN_IDS},
    )
    apply_softmax: bool = Field(
        False,
        description="Scores add up to 1 over the labels. If false, a score is the probability of "
        "the label among all tokens.",
    )
    item_first: bool = Field(False, description="Puts each item before the query.")
    add_special_tokens: bool = Field(
        True, description="Puts the tokenizer's special tokens, such as BOS, before a text."
    )
    rid: Rid | None = Field(None, description="Name of the request for `/abort_request`.")
    stream: bool = Field(False, description="Refused, because scores come as a whole.")

    def join_prompts(self) -> list[Part]:
        """Join the query and each item."""
        prompts: list[Part] = []
        for item in self.items:
            first, second = (item, self.query) if self.item_first else (self.query, item)
            prompts.append(first + second)  # type: ignore[operator]  # both are of one kind
        return prompts

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        kind = type(self.query)
        if any(type(item) is not kind for item in self.items):
            raise InvalidRequestError(
                "query and items must both be texts, or both lists of token ids", param="items"
            )
        if not self.label_token_ids:
            raise InvalidRequestError(
                "label_token_ids is empty; name the tokens to score", param="label_token_ids"
            )
        if self.stream:
            raise InvalidRequestError(
                "scores cannot be streamed; set stream to false", param="stream"
            )
        return self
