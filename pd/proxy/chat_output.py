"""Form that the answer to a chat request has to have, and the parser that reads it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from pd.core.errors import InvalidRequestError
from pd.proxy.grammar_fields import GrammarFields, parameters_field
from pd.proxy.reasoning import ReasoningParser, Stage
from pd.proxy.reasoning_count import ReasoningStart
from pd.proxy.tools import tags
from pd.proxy.tools.events import Content, Reasoning
from pd.proxy.tools.reader import CallOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.grammar import Grammar
    from pd.proxy.chat_messages import RenderedChat
    from pd.proxy.chat_template import ChatTemplate
    from pd.proxy.reasoning import ReasoningTags
    from pd.proxy.requests.chat import ChatRequest
    from pd.proxy.tokenizer import TextModel
    from pd.proxy.tools.definitions import Function
    from pd.proxy.tools.events import Event, OutputParser
    from pd.proxy.tools.families import ToolFamily
    from pd.proxy.tools.tags import Format

_BEHIND: Stage = "behind"
# In parts as it comes, all at once when it is over, or not at all.
ReasoningForm = Literal["streamed", "whole", "hidden"]


class OutputPlan(NamedTuple):
    """Constraint and parser of the answers to a request.

    Attributes:
        grammar_fields: the fields of the request that the grammar was made from.
        kept: special tokens that the parser needs to see.
        new_parser: makes the parser of one answer; None where all of it is content.
        calls_end: an answer that ends after calls ends because of them (``tool_calls``).
        reasoning: how clients get it.
        start: the model's reasoning, and where the answer begins in it (possibly behind); None if
            the model is not known to reason.
    """

    grammar: Grammar | None
    grammar_fields: GrammarFields
    kept: frozenset[str] = frozenset()
    new_parser: Callable[[], OutputParser] | None = None
    calls_end: bool = True
    reasoning: ReasoningForm = "streamed"
    start: ReasoningStart | None = None


def plan_output(asked: ChatRequest, text: TextModel, prompt: RenderedChat) -> OutputPlan:
    """Raises InvalidRequestError for calls that this model cannot be asked for."""
    template = text.template(with_tools=asked.tools is not None)
    family = _family(asked, text, template)
    reasoning, stage = text.reasoning_tags(template), _BEHIND
    start = None
    if reasoning is not None:
        stage = reasoning.stage(prompt.tail, _continued(asked))
        start = ReasoningStart(reasoning, stage)
    if stage == _BEHIND:
        reasoning = None
    new_calls = None if family is None else _call_parser(asked, family)
    kept = set(family.special) if family else set()
    if reasoning is not None:
        kept |= {reasoning.open, reasoning.close}
    return OutputPlan(
        grammar=_grammar(asked, family, reasoning, stage),
        grammar_fields=GrammarFields.of(asked.grammar_field)
        if family is None
        else _fields_of_tools(asked, family),
        kept=frozenset(kept),
        new_parser=partial(_ChatParser, reasoning, stage, new_calls, asked.separate_reasoning)
        if reasoning or new_calls
        else None,
        calls_end=asked.choice.name is None,
        reasoning=_reasoning_form(asked),
        start=start,
    )


def _reasoning_form(asked: ChatRequest) -> ReasoningForm:
    if not asked.include_reasoning:
        return "hidden"
    return "streamed" if asked.stream_reasoning else "whole"


def _grammar(
    asked: ChatRequest, family: ToolFamily | None, reasoning: ReasoningTags | None, stage: Stage
) -> Grammar | None:
    """The grammar of the whole answer, with its reasoning. Raises InvalidRequestError."""
    wanted = asked.response_grammar
    functions = [] if family is None else _constrained(asked)
    if family is not None and functions:
        _check_arguments(asked, family, functions)
        content = _with_calls(asked, family, functions)
    elif wanted is None or reasoning is None:
        return wanted
    else:
        content = tags.format_of(wanted)
    if reasoning is not None:
        content = reasoning.then(stage, content)
    try:
        return tags.grammar_of(content, "tools" if functions else asked.grammar_field)
    except InvalidRequestError:
        for function in functions:  # one alone may be too much
            assert family is not None
            field = parameters_field(_numbers(asked)[function.name])
            tags.grammar_of(family.form.arguments(function), field)
        raise


def _numbers(asked: ChatRequest) -> dict[str, int]:
    """Return the position of each function in the request, by name."""
    assert asked.tools is not None
    return {function.name: number for number, function in enumerate(asked.tools.functions)}


def _fields_of_tools(asked: ChatRequest, family: ToolFamily) -> GrammarFields:
    """The field that an error about the whole grammar names: the parameters of the only function
    whose arguments are constrained, else all functions."""
    assert asked.tools is not None
    numbers = _numbers(asked)
    if asked.choice.mode == "required":
        constrained = [n for name, n in numbers.items() if asked.choice.name in (None, name)]
    else:
        constrained = [numbers[f.name] for f in asked.tools.functions if f.strict]
    whole = parameters_field(constrained[0]) if len(constrained) == 1 else "tools"
    content = whole if asked.response_grammar is None else asked.grammar_field
    return GrammarFields(whole, content, numbers, family.form)


def _family(asked: ChatRequest, text: TextModel, template: ChatTemplate) -> ToolFamily | None:
    """Return the family of the model's calls; None if the request allows none. Raises
    InvalidRequestError."""
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


def _constrained(asked: ChatRequest) -> list[Function]:
    """The functions that a grammar lets the model call; none if it may write anything."""
    assert asked.tools is not None
    choice, functions = asked.choice, asked.tools.functions
    if choice.mode == "required":
        chosen = [f for f in functions if choice.name in (None, f.name)]
        return list(map(tags.without_what_is_misread, chosen))
    if asked.response_grammar is None and not any(f.strict for f in functions):
        return []
    return [f if f.strict else _any_arguments(f) for f in functions]


def _check_arguments(asked: ChatRequest, family: ToolFamily, functions: list[Function]) -> None:
    """Raise InvalidRequestError for a function whose arguments cannot be constrained."""
    numbers = _numbers(asked)
    tags.check_enforced(functions, numbers)
    for function in functions:
        try:
            family.form.arguments(function)
        except tags.UnfitError as error:
            reason = f"{error} cannot be enforced in the form in which this model writes calls"
            raise tags.refusal(function, numbers, reason, separator=":") from None


def _with_calls(asked: ChatRequest, family: ToolFamily, functions: list[Function]) -> Format:
    """The format of an answer that is calls, or may have some."""
    several = asked.parallel_tool_calls and asked.choice.name is None
    grammar = asked.response_grammar
    if asked.choice.mode == "required":
        return family.form.calls(functions, several=several)
    if grammar is not None:
        calls = family.form.calls(functions, several=several)
        return tags.one_of(calls, tags.format_of(grammar))
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
