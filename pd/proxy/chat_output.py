"""What the answer to a chat request has to look like, and how it is read."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from pd.core.errors import InvalidRequestError
from pd.proxy.reasoning import ReasoningParser, Stage
from pd.proxy.tools import tags
from pd.proxy.tools.events import Content, Reasoning
from pd.proxy.tools.reader import CallOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.grammar import Grammar
    from pd.proxy.chat_messages import Prompt
    from pd.proxy.chat_template import ChatTemplate
    from pd.proxy.reasoning import ReasoningTags
    from pd.proxy.requests.chat import ChatRequest
    from pd.proxy.tokenizer import TextModel
    from pd.proxy.tools.definitions import Function
    from pd.proxy.tools.events import Event, OutputParser
    from pd.proxy.tools.families import ToolFamily
    from pd.proxy.tools.tags import Format

_BEHIND: Stage = "behind"


class OutputPlan(NamedTuple):
    """How answers to a request are constrained and read.

    Attributes:
        grammar_field: the field of the request that a structural tag was made from.
        kept: special tokens that the parser needs to see.
        new_parser: makes the parser of one answer; None where all of it is content.
        calls_end: an answer that ends after calls ends because of them (``tool_calls``).
    """

    grammar: Grammar | None
    grammar_field: str
    kept: frozenset[str] = frozenset()
    new_parser: Callable[[], OutputParser] | None = None
    calls_end: bool = True


def plan_output(asked: ChatRequest, text: TextModel, prompt: Prompt) -> OutputPlan:
    """Raises InvalidRequestError for calls that this model cannot be asked for."""
    template = text.template(with_tools=asked.tools is not None)
    family = _family(asked, text, template)
    reasoning, stage = text.reasoning_tags(template), _BEHIND
    if reasoning is not None:
        stage = reasoning.stage(prompt.tail, _continued(asked))
    if stage == _BEHIND:
        reasoning = None
    new_calls = None if family is None else _call_parser(asked, family)
    kept = set(family.special) if family else set()
    if reasoning is not None:
        kept |= {reasoning.open, reasoning.close}
    return OutputPlan(
        grammar=_grammar(asked, family, reasoning, stage),
        grammar_field="response_format" if family is None else _field_of_tools(asked),
        kept=frozenset(kept),
        new_parser=partial(_ChatParser, reasoning, stage, new_calls, asked.separate_reasoning)
        if reasoning or new_calls
        else None,
        calls_end=asked.choice.name is None,
    )


def _grammar(
    asked: ChatRequest, family: ToolFamily | None, reasoning: ReasoningTags | None, stage: Stage
) -> Grammar | None:
    """The grammar of the whole answer, with its reasoning. Raises InvalidRequestError."""
    wanted = asked.response_grammar
    content = None if family is None else _constrained(asked, family)
    if content is None:
        if wanted is None or reasoning is None:
            return wanted
        content = tags.json_value(json.loads(wanted.text))
    if reasoning is not None:
        content = reasoning.then(stage, content)
    return tags.grammar_of(content, "response_format" if family is None else "tools")


def _field_of_tools(asked: ChatRequest) -> str:
    """The parameters of the only function whose arguments are constrained; else all functions."""
    assert asked.tools is not None
    functions = list(enumerate(asked.tools.functions))
    if asked.choice.mode == "required":
        constrained = [i for i, f in functions if asked.choice.name in (None, f.name)]
    else:
        constrained = [i for i, f in functions if f.strict]
    return f"tools[{constrained[0]}].function.parameters" if len(constrained) == 1 else "tools"


def _family(asked: ChatRequest, text: TextModel, template: ChatTemplate) -> ToolFamily | None:
    """How calls are written, if the model may call functions. Raises InvalidRequestError."""
    if asked.choice.mode == "none":
        return None
    family = text.tool_family(template)
    if family is None:
        raise InvalidRequestError(
            "tools: it is not known how this model writes calls; start the proxy with "
            '--tool-call-parser NAME, or set tool_choice to "none"',
            param="tools",
        )
    return family


def _continued(asked: ChatRequest) -> str | None:
    if not asked.continue_final_message:
        return None
    return str(asked.messages[-1]["content"])


def _constrained(asked: ChatRequest, family: ToolFamily) -> Format | None:
    """The format of an answer with calls; None for any. Raises InvalidRequestError."""
    assert asked.tools is not None
    choice, functions = asked.choice, asked.tools.functions
    numbers = {function.name: number for number, function in enumerate(functions)}
    several = asked.parallel_tool_calls and choice.name is None
    grammar = asked.response_grammar
    if choice.mode == "required":
        functions = [f for f in functions if choice.name in (None, f.name)]
    elif grammar is None and not any(f.strict for f in functions):
        return None
    else:
        functions = [f if f.strict else _any_arguments(f) for f in functions]
    tags.check_enforced(functions, numbers)
    for function in functions:
        try:
            family.form.arguments(function)
        except tags.UnfitError as error:
            reason = f"{error} cannot be enforced in the form in which this model writes calls"
            raise tags.refusal(function, numbers, reason, separator=":") from None
    if choice.mode == "required":
        return family.form.calls(functions, several=several)
    if grammar is not None:
        instance = tags.json_value(json.loads(grammar.text))
        return tags.one_of(family.form.calls(functions, several=several), instance)
    return family.form.calls_or_text(functions, several=several)


def _any_arguments(function: Function) -> Function:
    """A function whose arguments may be anything, beside others whose arguments may not."""
    names = {
        name: {"type": "string"} if kind == "text" else {}
        for name, kind in function.kinds().items()
    }
    required = function.schema.get("required")
    schema = {"type": "object", "properties": names, "additionalProperties": True}
    if isinstance(required, list):
        schema["required"] = [name for name in required if name in names]
    return function._replace(schema=schema, strict=False)


def _call_parser(asked: ChatRequest, family: ToolFamily) -> Callable[[], OutputParser]:
    assert asked.tools is not None
    kinds = {function.name: function.kinds() for function in asked.tools.functions}
    several = asked.parallel_tool_calls and asked.choice.name is None
    return partial(family.parser, CallOptions(kinds, None if several else 1))


class _ChatParser:
    """Reads reasoning first, then calls in what is left."""

    def __init__(
        self,
        reasoning: ReasoningTags | None,
        stage: Stage,
        new_calls: Callable[[], OutputParser] | None,
        separate: bool,
    ) -> None:
        self._separate = separate
        self._calls = None if new_calls is None else new_calls()
        self._reasoning = None
        if reasoning is not None:
            self._reasoning = ReasoningParser(reasoning, stage, verbatim=not separate)

    def push(self, text: str) -> list[Event]:
        events = [Content(text)] if self._reasoning is None else self._reasoning.push(text)
        return [found for event in events for found in self._read(event)]

    def close(self) -> list[Event]:
        events = [] if self._reasoning is None else self._reasoning.close()
        found = [each for event in events for each in self._read(event)]
        return found if self._calls is None else found + self._calls.close()

    def _read(self, event: Event) -> list[Event]:
        if isinstance(event, Reasoning):
            return [event if self._separate else Content(event.text)]
        if isinstance(event, Content) and self._calls is not None:
            return self._calls.push(event.text)
        return [event]
