"""Keeps a model's reasoning apart from its answer."""

from __future__ import annotations

from pd.core.config import REASONING_PARSERS
from pd.core.errors import ProgramError
from pd.proxy.text.reasoning import find_reasoning_tags, make_reasoning_parser
from pd.proxy.text.tools.events import Content, Reasoning


def split_reasoning(text: str, prompt: str, template: str, family: str | None) -> tuple[str, str]:
    """Split an answer into its reasoning and the rest.

    Args:
        prompt: the text before the answer, which may open the reasoning.
        template: source of the chat template, whose tags we use without a ``family``.

    Raises ProgramError if we know no tags.
    """
    tags = find_reasoning_tags(family or "auto", template)
    if tags is None:
        raise ProgramError(
            f"separate_reasoning: no reasoning tags for {family!r}; use one of "
            + ", ".join(REASONING_PARSERS)
            if family
            else "separate_reasoning: the model's chat template has no reasoning tags; name a "
            "model_type"
        )
    # Some models repeat a tag that their prompt implies.
    opens = text.lstrip().startswith(tags.open)
    stage = "before" if opens else tags.find_stage(prompt, None)
    parser = make_reasoning_parser(tags, stage, verbatim=False)
    events = [*parser.add_text(text), *parser.close()]
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Content))
    return reasoning, content
