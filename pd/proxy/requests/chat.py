"""Bodies with a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from pd.core.errors import InvalidRequestError
from pd.core.sampling_params import MAX_TOP_LOGPROBS
from pd.proxy.chat_messages import Messages
from pd.proxy.chat_template import RESERVED_VARIABLES
from pd.proxy.fields import Bounds, Integer, problem, show
from pd.proxy.request_model import RequestModel
from pd.proxy.requests.openai import UNSUPPORTED_OPENAI, OpenAIRequest
from pd.proxy.tools.definitions import MAX_TOOLS, ToolChoice, ToolChoiceValue, ToolList

if TYPE_CHECKING:
    from pd.core.grammar import Grammar


def _check_variables(value: dict[str, object]) -> dict[str, object]:
    for name in value:
        if name in RESERVED_VARIABLES:
            raise problem(f"may not set {name!r}, which the proxy sets")
    return value


class TemplateFields(RequestModel):
    """Settings by which a chat becomes a prompt."""

    add_generation_prompt: bool | None = Field(
        None,
        description="Ends the prompt with the opening of the assistant's turn. Unless given, true "
        "without `continue_final_message`.",
    )
    continue_final_message: bool = Field(
        False, description="Ends the prompt inside the last message, which the answer continues."
    )
    chat_template_kwargs: Annotated[dict[str, object], AfterValidator(_check_variables)] = Field(
        {},
        description="Further variables of the chat template, such as `enable_thinking`; none of "
        "those that the proxy sets.",
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        Field(
            None,
            description="A variable of this name for the chat template; one that does not know it "
            "shows the same prompt. With `none`, `enable_thinking` is false unless given.",
        )
    )
    tools: ToolList = Field(
        None,
        description="Functions that the model may call.",
        json_schema_extra={"maxItems": MAX_TOOLS},
    )

    @property
    def template_variables(self) -> dict[str, object]:
        """Variables of the template beside messages and tools."""
        effort = self.reasoning_effort
        given: dict[str, object] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            given["enable_thinking"] = False
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
    """A request for the next message of a chat."""

    # The template writes the special tokens itself.
    unsupported = UNSUPPORTED_OPENAI | {
        "prompt": (),
        "prompt_token_ids": (),
        "add_special_tokens": (False,),
    }

    messages: Messages = Field(description="The chat so far.")
    logprobs: bool = Field(False, description="Adds the log probability of each token.")
    top_logprobs: Annotated[Integer, Bounds(0, MAX_TOP_LOGPROBS)] | None = Field(
        None, description="With `logprobs`: so many of the likeliest tokens beside each."
    )

    tool_choice: ToolChoiceValue | None = Field(
        None,
        description="`none`: text; `auto`: text or calls; `required`: calls; an object: one call "
        "of the function that it names. Unless given, `auto` with `tools`.",
    )
    parallel_tool_calls: bool = Field(True, description="With false at most one call is made.")
    separate_reasoning: bool = Field(
        True,
        description="Reasoning comes as `reasoning_content`, and under its newer name `reasoning`; "
        "with false it stays in `content`, with its tags.",
    )
    include_reasoning: bool = Field(
        True, description="With false, reasoning that is apart from `content` is left out."
    )
    stream_reasoning: bool = Field(
        True, description="With false, a stream has the reasoning in one piece when it is over."
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
    def echoed(self) -> str:
        """The text that goes before the answer."""
        last = self.messages[-1]
        return str(last["content"]) if self.echo and last["role"] == "assistant" else ""

    @property
    def response_grammar(self) -> Grammar | None:
        """The grammar of ``response_format``."""
        return self._grammar

    @property
    def choice(self) -> ToolChoice:
        """Whether the model may or has to call functions."""
        if self.tools is None:
            return ToolChoice("none")
        return self.tool_choice or ToolChoice("auto")

    @model_validator(mode="after")
    def _calls_can_be_made(self) -> Self:
        asked, functions = self.tool_choice, self.tools.functions if self.tools else []
        if asked is None or asked.mode != "required":
            return self
        if not functions:
            raise InvalidRequestError(
                "tool_choice needs a list of tools of which one can be called", param="tool_choice"
            )
        if asked.name is not None and all(each.name != asked.name for each in functions):
            raise InvalidRequestError(
                f"tool_choice names the function {show(asked.name)}, which is not among the tools",
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
