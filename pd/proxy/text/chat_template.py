"""Renders chat templates of model directories in jinja2's sandbox."""

from __future__ import annotations

import json
import secrets
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pd.core.brief import short_repr, shorten_text
from pd.core.errors import InvalidRequestError, UsageError
from pd.proxy.text.shown_calls import (
    PROBE,
    PROBE_TOOLS,
    has_calls,
    has_several_calls,
    has_text_beside_calls,
    order_forms,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from jinja2 import nodes
    from jinja2.parser import Parser

    from pd.proxy.text.shown_calls import HistoryForm

# We shorten a template's error, because it may quote messages.
_MAX_REFUSAL_CHARACTERS = 500
# Limit on a rendered prompt. A template gets at most a request's body, and its loops run at most
# once per member of that, or as often as jinja2's sandbox allows for a range (100,000).
MAX_PROMPT_CHARACTERS = 64 << 20
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


# Variables that rendering sets, so clients may not.
RESERVED_VARIABLES = frozenset(
    (*SPECIAL_TOKENS, "messages", "tools", "add_generation_prompt", "continue_final_message")
) | {"raise_exception", "strftime_now"}


class _GenerationBlock(Extension):
    """Ignores ``{% generation %}``, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _dump_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, but models were not trained on that. Templates expect
    # the arguments in the order of transformers.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(template: str) -> str:
    return datetime.now().strftime(template)


class _RefusalError(InvalidRequestError):
    """A template refuses messages. It may accept them in another form."""


class ChatTemplate:
    """A chat template with the model's special tokens.

    Attributes:
        knows_developer: the template handles the role ``developer``.
        takes_tools: the template shows tools to the model.
        takes_documents: the template shows documents to the model.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Compile a template. Raises UsageError for a wrong one."""
        self._special_tokens = special_tokens
        self.source = source
        self.knows_developer = "developer" in source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _dump_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            used = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise UsageError(f"the model's chat template does not compile: {error}") from error
        self.takes_tools = "tools" in used
        self.takes_documents = "documents" in used

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> str:
        """Render a prompt, including its special tokens.

        Args:
            continue_final_message: end the prompt inside the last message, so that the model
                continues it.
            extra: further variables for the template (``chat_template_kwargs``).

        Raises:
            InvalidRequestError: the template refuses the messages, or leaves a call out.
        """
        # We define `documents` in any case, because a template may treat null and undefined
        # differently.
        variables = self._special_tokens | {"documents": None} | (extra or {})
        variables |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        content, mark = "", ""
        if continue_final_message:
            content, mark = messages[-1]["content"], secrets.token_hex(16)
            messages = [*messages[:-1], messages[-1] | {"content": content + mark}]
            if has_calls(messages[-1]):
                raise InvalidRequestError(
                    "continue_final_message: the last message has calls, which end it, so its "
                    "content cannot be continued",
                    param="continue_final_message",
                )
        if any(map(has_calls, messages)):
            text = self._render_calls(messages, variables)
        else:
            text = self._run_template(messages, variables)
        return _end_prompt(text, content, mark) if continue_final_message else text

    def _render_calls(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """Render a prompt that shows every call in the messages."""
        refusal: InvalidRequestError | None = None
        forms = self._forms
        if any(map(has_text_beside_calls, messages)):
            forms = [*forms, *(form._replace(apart=True) for form in forms)]
        if any(map(has_several_calls, messages)):
            forms = [*forms, *(form._replace(single=True) for form in forms)]
        for form in forms:
            prepared, functions = form.prepare_messages(messages)
            try:
                text = self._run_template(prepared, variables)
            except _RefusalError as error:
                refusal = error if form is forms[0] else refusal
                continue
            if all(function.was_read() for function in functions):
                return text
        raise refusal or InvalidRequestError(
            "messages: the model's chat template does not show the calls of earlier messages "
            "(tool_calls) to the model; leave them out, or use another template",
            param="messages",
        )

    @cached_property
    def _forms(self) -> list[HistoryForm]:
        """All forms of messages with calls, the best one for this template first."""
        variables: dict[str, Any] = self._special_tokens | {"documents": None}
        variables |= {"tools": PROBE_TOOLS, "add_generation_prompt": True}

        def render_probe(form: HistoryForm) -> str | None:
            try:
                return self._run_template(form.prepare_messages(PROBE)[0], variables)
            except InvalidRequestError:
                return None

        return order_forms(render_probe)

    def _run_template(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        try:
            return _join_parts(self._template.generate(variables, messages=messages))
        except InvalidRequestError:
            raise
        except Exception as error:  # a template is a program and may fail in any way
            raise _RefusalError(
                "the model's chat template refuses these messages: "
                + shorten_text(str(error), _MAX_REFUSAL_CHARACTERS),
                param="messages",
            ) from error


def _join_parts(parts: Iterable[str]) -> str:
    """Join the parts of a prompt. Raises InvalidRequestError if they are too long."""
    taken, size = [], 0
    for part in parts:
        size += len(part)
        if size > MAX_PROMPT_CHARACTERS:
            raise InvalidRequestError(
                f"the chat template makes more than {MAX_PROMPT_CHARACTERS} characters of these "
                "messages; send less",
                param="messages",
            )
        taken.append(part)
    return "".join(taken)


def _end_prompt(text: str, content: str, mark: str) -> str:
    """End the prompt after the last message's content, without trailing white space.

    A mark after the content tells us where it ends. We do not search for the content itself,
    because that may hold up all threads for seconds, and the template's own text may contain it,
    too.
    """
    begin, separator, _ = text.rpartition(mark)
    if not separator or not begin.endswith(content.lstrip()):
        raise InvalidRequestError(
            "continue_final_message: the chat template does not show the last message's content "
            "as it is, so it cannot be continued",
            param="continue_final_message",
        )
    return begin[: len(begin) - len(content.lstrip()) + len(content.strip())]


def read_config(directory: Path) -> dict[str, Any]:
    """Read the settings of a directory's tokenizer; empty without any. Raises UsageError."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read_file(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} must be an object, not {short_repr(config)}")
    return config


def load_templates(directory: Path, config: dict[str, Any]) -> dict[str, ChatTemplate]:
    """Load the templates of a directory by name. ``default`` is the usual one.

    ``config``: result of :func:`read_config`.

    Raises UsageError, naming the file, for one that cannot be read and for a wrong template.
    """
    sources: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        sources["default"] = inline
    elif isinstance(inline, list):
        try:
            sources.update({entry["name"]: entry["template"] for entry in inline})
        except (KeyError, TypeError):
            path = directory / CONFIG_FILE
            raise UsageError(f"{path}: chat_template must list names and templates") from None
    # The separate file is newer, because transformers saves templates there now.
    file = directory / "chat_template.jinja"
    if file.is_file():
        sources["default"] = _read_file(file)
    for extra in sorted(directory.glob("additional_chat_templates/*.jinja")):
        sources[extra.stem] = _read_file(extra)
    tokens = find_special_tokens(config)
    return {name: ChatTemplate(source, tokens) for name, source in sources.items()}


def _read_file(path: Path) -> str:
    """Read a file's text. Raises UsageError if it is out of reach or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not UTF-8: {error}") from error


def find_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Find the texts of the special tokens in a tokenizer's settings."""
    texts = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            texts[name] = token
    return texts
