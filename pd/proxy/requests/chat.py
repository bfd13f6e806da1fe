"""Bodies of requests with a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from pd.core.errors import InvalidRequestError
from pd.core.sampling_params import MAX_TOP_LOGPROBS
from pd.proxy.requests.fields import Bounds, Integer, describe_value, make_problem
from pd.proxy.requests.known_fields import CHAT, FieldPlace
from pd.proxy.requests.messages import Messages
from pd.proxy.requests.openai import OpenAIRequest
from pd.proxy.requests.request_model import RequestModel
from pd.proxy.requests.tools import MAX_TOOLS, ToolChoiceValue, ToolList
from pd.proxy.text.chat_template import RESERVED_VARIABLES
from pd.proxy.text.tools.functions import ToolChoice

if TYPE_CHECKING:
    from pd.core.grammar import Grammar


def _check_variables(value: dict[str, object]) -> dict[str, object]:
    for name in value:
        if name in RESERVED_VARIABLES:
            raise make_problem(f"may not set {name!r}, which the proxy sets")
    return value


class TemplateFields(RequestModel):
    """Fields that control how a chat becomes a prompt."""

    add_generation_prompt: bool | None = Field(
        None,
        description="Ends the prompt with the opening of the assistant's turn. Default: true, "
        "unless `continue_final_message` is true.",
    )
    continue_final_message: bool = Field(
        False, description="Ends the prompt inside the last message, which the answer continues."
    )
    chat_template_kwargs: Annotated[dict[str, object], AfterValidator(_check_variables)] = Field(
        {},
        description="Further variables for the chat template, such as `enable_thinking`. "
        "Variables that the proxy sets are refused.",
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        Field(
            None,
            description="A variable for the chat template. Templates that do not know it "
            "ignore it. With `none`, `enable_thinking` is false by default.",
        )
    )
    documents: list[dict[str, object]] | None = Field(
        None,
        description="Documents for the model, usually with `title` and `text`, if its chat "
        "template shows them.",
    )
    tools: ToolList = Field(
        None,
        description="Functions that the model may call.",
        json_schema_extra={"maxItems": MAX_TOOLS},
    )

    @property
    def template_variables(self) -> dict[str, object]:
        """Variables for the template, in addition to messages and tools."""
        effort = self.reasoning_effort
        given: dict[str, object] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            given["enable_thinking"] = False
        if self.documents is not None:
            given["documents"] = self.documents
        return given | self.chat_template_kwargs

    @property
    def opens_turn(self) -> bool:
        """Whether the prompt ends with the opening of the assistant's turn."""
        opens = self.add_generation_prompt
        return not self.continue_final_message if opens is None else opens

    @model_validator(mode="after")
    def _turn_opens_or_continues(self) -> Self:
        if self.continue_final_message and self.opens_turn:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt cannot both be true",
                param="continue_final_message",
            )
        return self


class ChatRequest(TemplateFields, OpenAIRequest):
    """Asks for the next message of a chat."""

    place = FieldPlace((CHAT,))

    messages: Messages = Field(description="The chat so far.")
    logprobs: bool = Field(False, description="Adds the log probability of each token.")
    top_logprobs: Annotated[Integer, Bounds(0, MAX_TOP_LOGPROBS)] | None = Field(
        None, description="Number of likeliest tokens to show for each token. Needs `logprobs`."
    )

    tool_choice: ToolChoiceValue | None = Field(
        None,
        description="`none`: text; `auto`: text or calls; `required`: calls; an object: one "
        "call of the named function. Default: `auto` with `tools`.",
    )
    parallel_tool_calls: bool = Field(
        True, description="If false, the model makes at most one call."
    )
    separate_reasoning: bool = Field(
        True,
        description="Puts reasoning into `reasoning_content` and, under its newer name, "
        "`reasoning`. If false, it stays in `content` with its tags.",
    )
    include_reasoning: bool = Field(True, description="If false, separate reasoning is left out.")
    stream_reasoning: bool = Field(
        True, description="If false, a stream sends the reasoning in one piece after its end."
    )
    return_prompt_token_ids: bool = Field(
        False,
        description="Adds `prompt_token_ids` to the first chunk or the answer, as "
        "`return_token_ids` does.",
    )
    echo: bool = Field(
        False, description="Puts the last message before the answer if it is the assistant's."
    )

    @property
    def top_tokens(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def shows_prompt_ids(self) -> bool:
        return self.return_token_ids or self.return_prompt_token_ids

    @property
    def echoed_text(self) -> str:
        """The text to put before the answer."""
        last = self.messages[-1]
        return str(last["content"]) if self.echo and last["role"] == "assistant" else ""

    @property
    def response_grammar(self) -> Grammar | None:
        """The grammar of ``response_format``."""
        return self._grammar

    @property
    def call_choice(self) -> ToolChoice:
        """Whether the model may or must call functions."""
        if self.tools is None:
            return ToolChoice("none")
        return self.tool_choice or ToolChoice("auto")

    @model_validator(mode="after")
    def _calls_can_be_made(self) -> Self:
        choice, functions = self.tool_choice, self.tools.functions if self.tools else []
        if choice is None or choice.mode != "required":
            return self
        if not functions:
            raise InvalidRequestError(
                "tool_choice needs a function to call; send tools", param="tool_choice"
            )
        if choice.name is not None and all(each.name != choice.name for each in functions):
            raise InvalidRequestError(
                f"tool_choice names the function {describe_value(choice.name)}, which is not among "
                "the tools",
                param="tool_choice",
            )
        if self._grammar is not None:
            raise InvalidRequestError(
                f"{self.grammar_field} constrains a text, and tool_choice asks for calls instead; "
                "leave one of them out",
                param=self.grammar_field,
            )
        return self

    @model_validator(mode="after")
    def _likeliest_tokens_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs needs logprobs to be true", param="top_logprobs"
            )
        return self
