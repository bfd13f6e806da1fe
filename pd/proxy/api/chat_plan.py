"""Plans the answers to a chat: the grammar to constrain them, and the parser to read them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from pd.core.errors import InvalidRequestError
from pd.proxy.requests.grammar_fields import GrammarFields
from pd.proxy.text.reasoning import ReasoningParser, Stage
from pd.proxy.text.reasoning_count import ReasoningStart
from pd.proxy.text.tools import harmony, tags
from pd.proxy.text.tools.events import Content, Reasoning
from pd.proxy.text.tools.families import OPENAI
from pd.proxy.text.tools.functions import name_parameters_field
from pd.proxy.text.tools.reader import CallOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.grammar import Grammar
    from pd.proxy.api.chat_prompt import RenderedChat
    from pd.proxy.requests.chat import ChatRequest
    from pd.proxy.text.chat_template import ChatTemplate
    from pd.proxy.text.reasoning import ReasoningTags
    from pd.proxy.text.tokenizer import TextModel
    from pd.proxy.text.tools.events import Event, OutputParser
    from pd.proxy.text.tools.families import ToolFamily
    from pd.proxy.text.tools.functions import Function
    from pd.proxy.text.tools.tags import Format

# Clients get reasoning piece by piece, in one piece after its end, or not at all.
ReasoningForm = Literal["streamed", "whole", "hidden"]


class OutputPlan(NamedTuple):
    """Constraint and parser of the answers to a request.

    Attributes:
        grammar_fields: the request's fields from which we made the grammar.
        kept_tokens: special tokens that the parser needs to see.
        new_parser: makes the parser of one answer; None if all text is content.
        calls_end: an answer that ends after calls has the reason ``tool_calls``.
        reasoning: how clients get the reasoning.
        start: where the answer begins, relative to the model's reasoning; None if the model is not
            known to reason.
    """

    grammar: Grammar | None
    grammar_fields: GrammarFields
    kept_tokens: frozenset[str] = frozenset()
    new_parser: Callable[[], OutputParser] | None = None
    calls_end: bool = True
    reasoning: ReasoningForm = "streamed"
    start: ReasoningStart | None = None


def plan_output(body: ChatRequest, text: TextModel, prompt: RenderedChat) -> OutputPlan:
    """Plan the answers to a chat.

    Raises InvalidRequestError if the request wants calls, but we do not know how to ask this model
    for them.
    """
    template = text.find_template(with_tools=body.tools is not None)
    family = _find_family(body, text, template)
    reasoning = text.find_reasoning_tags(template)
    stage: Stage = "after"
    start = None
    if reasoning is not None:
        continued = str(body.messages[-1]["content"]) if body.continue_final_message else None
        stage = reasoning.find_stage(prompt.tail, continued)
        start = ReasoningStart(reasoning, stage)
    options = None
    if family is not None and body.tools is not None:
        kinds = {each.name: each.classify_parameters() for each in body.tools.functions}
        max_calls = None if body.parallel_tool_calls and body.call_choice.name is None else 1
        options = CallOptions(kinds, max_calls)
    kept_tokens = set(family.special) if family else set()
    new_parser: Callable[[], OutputParser] | None = None
    if family is OPENAI or (reasoning is not None and reasoning.in_channels):
        kept_tokens |= set(harmony.TAGS)
        new_parser = partial(
            harmony.HarmonyParser,
            options,
            begins_message=stage == "before" or reasoning is None,
            verbatim=reasoning is None or not body.separate_reasoning,
        )
    if stage == "after":
        reasoning = None
    if reasoning is not None:
        kept_tokens |= set(reasoning.tokens)
    if new_parser is None and (reasoning or options):
        new_calls = None if family is None or options is None else partial(family.parser, options)
        new_parser = partial(_ChatParser, reasoning, stage, new_calls, body.separate_reasoning)
    reasoning_form: ReasoningForm = "streamed" if body.stream_reasoning else "whole"
    return OutputPlan(
        grammar=_make_grammar(body, family, reasoning, stage),
        grammar_fields=GrammarFields.from_field(body.grammar_field)
        if family is None
        else _find_tool_fields(body, family),
        kept_tokens=frozenset(kept_tokens),
        new_parser=new_parser,
        calls_end=body.call_choice.name is None,
        reasoning=reasoning_form if body.include_reasoning else "hidden",
        start=start,
    )


def _make_grammar(
    body: ChatRequest, family: ToolFamily | None, reasoning: ReasoningTags | None, stage: Stage
) -> Grammar | None:
    """Make the grammar of the whole answer, including its reasoning.

    Raises InvalidRequestError.
    """
    wanted = body.response_grammar
    functions = [] if family is None else _select_functions(body)
    if family is not None and functions:
        _check_arguments(body, family, functions)
        content = _make_call_format(body, family, functions)
    elif wanted is None or reasoning is None:
        return wanted
    else:
        content = reasoning.begin_answer(tags.make_format(wanted))
    if reasoning is not None:
        content = reasoning.prepend_reasoning(stage, content)
    try:
        return tags.make_grammar(content, "tools" if functions else body.grammar_field)
    except InvalidRequestError:
        for function in functions:  # name the function if one alone is too large
            assert family is not None
            field = name_parameters_field(_number_functions(body)[function.name])
            tags.make_grammar(family.form.make_arguments(function), field)
        raise


def _number_functions(body: ChatRequest) -> dict[str, int]:
    """Map the functions' names to their positions in the request."""
    assert body.tools is not None
    return {function.name: number for number, function in enumerate(body.tools.functions)}


def _find_tool_fields(body: ChatRequest, family: ToolFamily) -> GrammarFields:
    """Find the fields to name in errors about the grammar.

    This is the parameters of a function if only its arguments are constrained, else ``tools``.
    """
    assert body.tools is not None
    numbers = _number_functions(body)
    if body.call_choice.mode == "required":
        constrained = [n for name, n in numbers.items() if body.call_choice.name in (None, name)]
    else:
        constrained = [numbers[f.name] for f in body.tools.functions if f.strict]
    whole = name_parameters_field(constrained[0]) if len(constrained) == 1 else "tools"
    content = whole if body.response_grammar is None else body.grammar_field
    return GrammarFields(whole, content, numbers, family.form)


def _find_family(body: ChatRequest, text: TextModel, template: ChatTemplate) -> ToolFamily | None:
    """Find the family of the model's calls; None if the request allows no calls.

    Raises InvalidRequestError if the family is unknown.
    """
    if body.call_choice.mode == "none":
        return None
    family = text.find_tool_family(template)
    if family is None:
        raise InvalidRequestError(
            "tools: it is not known how this model writes calls; start the proxy with "
            '--tool-call-parser NAME, or set tool_choice to "none"',
            param="tools",
        )
    return family


def _select_functions(body: ChatRequest) -> list[Function]:
    """Select the functions for the grammar; none if the model may write anything."""
    assert body.tools is not None
    choice, functions = body.call_choice, body.tools.functions
    if choice.mode == "required":
        chosen = [f for f in functions if choice.name in (None, f.name)]
        return list(map(tags.drop_ambiguous_keywords, chosen))
    if body.response_grammar is None and not any(f.strict for f in functions):
        return []
    return [f if f.strict else _allow_any_arguments(f) for f in functions]


def _check_arguments(body: ChatRequest, family: ToolFamily, functions: list[Function]) -> None:
    """Raise InvalidRequestError for a function whose arguments cannot be constrained."""
    numbers = _number_functions(body)
    tags.check_enforced(functions, numbers)
    for function in functions:
        try:
            family.form.make_arguments(function)
        except tags.UnfitError as error:
            reason = f"{error} cannot be enforced in the form in which this model writes calls"
            raise tags.make_refusal(function, numbers, reason, separator=":") from None


def _make_call_format(body: ChatRequest, family: ToolFamily, functions: list[Function]) -> Format:
    """Make the format of an answer that consists of calls, or may have some."""
    several = body.parallel_tool_calls and body.call_choice.name is None
    grammar = body.response_grammar
    if body.call_choice.mode == "required":
        return family.form.make_calls(functions, several=several)
    if grammar is not None:
        calls = family.form.make_calls(functions, several=several)
        answer = tags.make_format(grammar)
        if family.form.answer:
            answer = tags.make_sequence(tags.make_text(family.form.answer), answer)
        return tags.make_choice(calls, answer)
    return family.form.make_calls_or_text(functions, several=several)


def _allow_any_arguments(function: Function) -> Function:
    """Allow any arguments for a function that is not strict, next to others that are."""
    names = {
        name: {"type": "string"} if kind == "text" else {}
        for name, kind in function.classify_parameters().items()
    }
    required = function.schema.get("required")
    schema = {"type": "object", "properties": names, "additionalProperties": True}
    if isinstance(required, list):
        schema["required"] = [name for name in required if name in names]
    return function._replace(schema=schema, strict=False)


class _ChatParser:
    """Separates the reasoning from an answer, and then the calls from its content."""

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

    @property
    def call_is_open(self) -> bool:
        return self._calls is not None and self._calls.call_is_open

    def add_text(self, text: str) -> list[Event]:
        events = [Content(text)] if self._reasoning is None else self._reasoning.add_text(text)
        return [each for event in events for each in self._read_calls(event)]

    def close(self) -> list[Event]:
        events = [] if self._reasoning is None else self._reasoning.close()
        parsed = [each for event in events for each in self._read_calls(event)]
        return parsed if self._calls is None else parsed + self._calls.close()

    def _read_calls(self, event: Event) -> list[Event]:
        if isinstance(event, Reasoning):
            return [event if self._separate else Content(event.text)]
        if isinstance(event, Content) and self._calls is not None:
            return self._calls.add_text(event.text)
        return [event]
