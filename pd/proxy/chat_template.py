"""Chat templates as model directories ship them, rendered in jinja2's sandbox."""

from __future__ import annotations

import json
import secrets
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pd.core.brief import brief, shorten
from pd.core.errors import InvalidRequestError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from jinja2 import nodes
    from jinja2.parser import Parser

# A template may put messages into what it says of them.
_MAX_REFUSAL_CHARACTERS = 500
# Characters of a rendered prompt. A template is given at most a request's body, and its loops have
# no more rounds than what it is given has members, or jinja2's sandbox lets a range have (100,000).
MAX_PROMPT_CHARACTERS = 64 << 20
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


# Variables that no client may set: those that rendering sets.
RESERVED_VARIABLES = frozenset(
    (*SPECIAL_TOKENS, "messages", "tools", "add_generation_prompt", "continue_final_message")
) | {"raise_exception", "strftime_now"}


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what the assistant said, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    # jinja2's own filter escapes for HTML, which models were not trained on.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _strftime_now(template: str) -> str:
    return datetime.now().strftime(template)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One template with the model's special tokens.

    Attributes:
        knows_developer: it gives the role of this name a meaning.
        takes_tools: it shows tools to the model.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Raises UsageError if the template does not compile."""
        self._special_tokens = special_tokens
        self.source = source
        self.knows_developer = "developer" in source
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            used = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise UsageError(f"the model's chat template does not compile: {error}") from error
        self.takes_tools = "tools" in used

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> str:
        """The prompt, special tokens included.

        Args:
            continue_final_message: end inside the last message, so that the model goes on with it.
            extra: further variables for the template (``chat_template_kwargs``).

        Raises:
            InvalidRequestError: the template refuses these messages.
        """
        variables = self._special_tokens | (extra or {})
        content, mark = "", ""
        if continue_final_message:
            content, mark = messages[-1]["content"], secrets.token_hex(16)
            messages = [*messages[:-1], messages[-1] | {"content": content + mark}]
        try:
            text = _join(
                self._template.generate(
                    variables,
                    messages=messages,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except InvalidRequestError:
            raise
        except Exception as error:  # a template is a program and may fail in any way
            raise InvalidRequestError(
                "the model's chat template refuses these messages: "
                + shorten(str(error), _MAX_REFUSAL_CHARACTERS),
                param="messages",
            ) from error
        return _cut(text, content, mark) if continue_final_message else text


def _join(parts: Iterable[str]) -> str:
    """The parts of a prompt as one text, as long as they are not too long."""
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


def _cut(text: str, content: str, mark: str) -> str:
    """End the prompt with the last message's content, without white space after it.

    The content is not searched for, since that may take seconds in which no other thread runs, and
    what closes the message may hold it too. A mark behind it tells where it ends.
    """
    begin, found, _ = text.rpartition(mark)
    if not found or not begin.endswith(content.lstrip()):
        raise InvalidRequestError(
            "continue_final_message: the chat template does not show the last message's content "
            "as it is, so it cannot be continued",
            param="continue_final_message",
        )
    return begin[: len(begin) - len(content.lstrip()) + len(content.strip())]


def read_config(directory: Path) -> dict[str, Any]:
    """The settings of a directory's tokenizer; empty if it has none. Raises UsageError."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} must be an object, not {brief(config)}")
    return config


def load_templates(directory: Path, config: dict[str, Any]) -> dict[str, ChatTemplate]:
    """Templates by name (``default`` is the usual one); empty if the directory has none.

    ``config``: see :func:`read_config`.

    Raises UsageError, naming the file, for one that cannot be read, and for a template that does
    not compile.
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
    # A separate file is where transformers saves a template now, so it is the newer one.
    file = directory / "chat_template.jinja"
    if file.is_file():
        sources["default"] = _read(file)
    for extra in sorted(directory.glob("additional_chat_templates/*.jinja")):
        sources[extra.stem] = _read(extra)
    tokens = special_tokens(config)
    return {name: ChatTemplate(source, tokens) for name, source in sources.items()}


def _read(path: Path) -> str:
    """The text of a file. Raises UsageError for one that is out of reach or no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not UTF-8: {error}") from error


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Texts of the special tokens that a tokenizer's settings name."""
    found = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found
