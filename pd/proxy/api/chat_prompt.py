"""Renders the messages of a chat as one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pd.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from pd.proxy.requests.chat import TemplateFields
    from pd.proxy.requests.messages import ReadMessage
    from pd.proxy.text.tokenizer import TextModel

# Characters at the end of a prompt in which we look for the opening of the model's reasoning.
_TAIL = 128


class RenderedChat(NamedTuple):
    """A chat as a text for the tokenizer.

    Attributes:
        tail: the end of the prompt, with the original names of special tokens.
    """

    text: str
    tail: str


def render_prompt(
    fields: TemplateFields, text: TextModel, messages: list[ReadMessage]
) -> RenderedChat:
    """Render messages with the model's chat template. Raises InvalidRequestError."""
    shown = fields.tools.shown if fields.tools else None
    template, special = text.find_template(with_tools=shown is not None), text.special
    if fields.documents and not template.takes_documents:
        raise InvalidRequestError(
            "documents: the model's chat template does not show documents to the model; write them "
            "into a message",
            param="documents",
        )
    if shown is not None and not text.shows_tools(template):
        raise InvalidRequestError(
            "tools: the model's chat template does not show tools to the model; start the proxy "
            "with --tool-call-parser NAME if they are to be called all the same",
            param="tools",
        )
    if not template.knows_developer:
        # `developer` is OpenAI's newer name of `system`. A template without it would drop the
        # instructions.
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    extra = fields.template_variables
    hidden: list[str] = []
    if special is not None:
        try:
            messages, extra = (
                special.hide_messages(messages, hidden),
                special.hide_value(extra, hidden),
            )
            shown = special.hide_value(shown, hidden)
        except RecursionError:
            raise InvalidRequestError(
                "messages, tools or chat_template_kwargs are nested too deeply", param="messages"
            ) from None
    prompt = template.render(
        messages,
        add_generation_prompt=fields.opens_turn,
        continue_final_message=fields.continue_final_message,
        tools=shown,
        extra=extra,
    )
    tail = prompt[-_TAIL:]
    return RenderedChat(prompt if special is None else special.reveal_text(prompt, hidden), tail)
