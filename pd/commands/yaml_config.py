"""``--config FILE.yaml``: the same keys as the flags, which win.

Values are texts as the file has them, so each means the same as on the command line: ``off`` is a
choice, ``0123`` a key with four digits, and ``12:30`` no number.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from pd.commands.parser import parse_batch_sizes, parse_kv_events
from pd.core.errors import UsageError
from pd.util.hints import suggest_name
from pd.util.secret_files import find_exposure

if TYPE_CHECKING:
    from pd.commands.parser import Parser

# Plain scalars that mean null in YAML.
_NULLS = ("", "~", "null", "Null", "NULL")
_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# Flags with secret values.
_SECRETS = ("--api-key", "--admin-api-key")
_TEXT_TAG = "tag:yaml.org,2002:str"


class _ValueError(Exception):
    """A value that its flag cannot have. The message says why and does not show it."""


def with_config_file(parser: Parser, arguments: list[str]) -> tuple[list[str], list[str]]:
    """Put the file's settings before the flags of the command line, so flags override them.

    Also returns warnings for the operator, for instance if others can read a file with API keys. A
    flag that may be repeated replaces the file's whole list.

    Args:
        parser: parser of the command.
        arguments: arguments after the command's name.

    Raises:
        UsageError: the file cannot be read, or the command cannot have one of its keys or values.
    """
    path = _find_config_path(arguments)
    if path is None:
        return arguments, []
    given = {argument.split("=")[0] for argument in arguments if argument.startswith("--")}
    extra: list[str] = []
    settings = _read_settings(parser, path)
    for flag, node in settings.items():
        try:
            own = _as_arguments(parser.flags[flag], flag, node)
        except _ValueError as error:
            line = node.start_mark.line + 1
            raise UsageError(f"--config {path}, line {line}: {flag[2:]} {error}") from None
        if flag not in given:
            extra += own
    has_keys = any(flag in settings for flag in _SECRETS)
    warnings = find_exposure(path, f"the keys in --config {path}") if has_keys else []
    return [*extra, *arguments], warnings


def _find_config_path(arguments: list[str]) -> Path | None:
    for index, argument in enumerate(arguments):
        if argument == "--config" and index + 1 < len(arguments):
            return Path(arguments[index + 1])
        if argument.startswith("--config="):
            return Path(argument.removeprefix("--config="))
    return None


def _read_settings(parser: Parser, path: Path) -> dict[str, yaml.Node]:
    """Read the values of the file by flag."""
    root = _read_yaml(path)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"--config {path} must map flags to values, such as port: 8000")
    settings: dict[str, yaml.Node] = {}
    for key, value in root.value:
        if not isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            raise UsageError(f"--config {path}, line {line}: a key is the name of a flag")
        flag = _find_flag(parser, key.value, path)
        if flag in settings:
            before, line = settings[flag].start_mark.line + 1, key.start_mark.line + 1
            raise UsageError(
                f"--config {path}: {flag[2:]} is there twice, in lines {before} and {line}; a flag "
                "that may be repeated takes a list"
            )
        settings[flag] = value
    return settings


def _read_yaml(path: Path) -> yaml.Node | None:
    try:
        # The base loader leaves scalars as text.
        return yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise UsageError(f"cannot read --config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {path} is not a text file: {error}") from error
    except RecursionError:
        raise UsageError(f"--config {path} is nested too deeply") from None
    # yaml lets Python's errors escape for some malformed directives and escapes.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        raise UsageError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error


def _find_flag(parser: Parser, key: str, path: Path) -> str:
    flag = "--" + key.replace("_", "-")
    known = [name for name in parser.flags if name != "--config"]
    if flag not in known:
        hint = suggest_name(flag, known).replace("--", "")
        raise UsageError(f"--config {path}: unknown key {key!r}{hint}")
    return flag


def _as_arguments(action: argparse.Action, flag: str, node: yaml.Node) -> list[str]:
    """Return the arguments that a value stands for. Raises _ValueError for an invalid one."""
    if isinstance(action, argparse._StoreTrueAction):
        is_on = None
        if isinstance(node, yaml.ScalarNode):
            is_on = _SWITCHES.get(_read_text(node).lower())
        if is_on is None:
            raise _ValueError("must be true or false")
        return [flag] if is_on else []
    if isinstance(node, yaml.MappingNode) and action.type is parse_kv_events:
        return [f"{flag}={_as_json(node)}"]
    if isinstance(node, yaml.SequenceNode):
        if not node.value:
            raise _ValueError("is an empty list; give values, or remove the line")
        takes_many = isinstance(action, argparse._AppendAction) or action.type is parse_batch_sizes
        if not takes_many:
            raise _ValueError(f"takes one value, not a list of {len(node.value)}")
        texts = [_read_text(item) for item in node.value]
        if action.type is parse_batch_sizes:
            texts = [",".join(texts)]
        return [f"{flag}={text}" for text in texts]
    return [f"{flag}={_read_text(node)}"]


def _read_text(node: yaml.Node) -> str:
    """Return a scalar as the file has it."""
    if not isinstance(node, yaml.ScalarNode):
        kind = "mapping" if isinstance(node, yaml.MappingNode) else "list"
        raise _ValueError(f"cannot be a {kind} here")
    if node.tag != _TEXT_TAG:
        raise _ValueError("has a YAML tag; write the value without it")
    if _is_null(node) or not node.value.strip():
        raise _ValueError("has no value; give one, or remove the line")
    text: str = node.value
    return text


def _is_null(node: yaml.ScalarNode) -> bool:
    is_plain = node.style is None
    return is_plain and node.value in _NULLS


def _as_json(node: yaml.MappingNode) -> str:
    """Format a mapping as its flag takes it. Plain scalars keep their meaning in JSON."""
    settings: dict[str, object] = {}
    for key, value in node.value:
        name = _read_text(key)
        if name in settings:
            raise _ValueError(f"has {name!r} twice")
        if isinstance(value, yaml.ScalarNode) and value.style is None:
            settings[name] = None if _is_null(value) else _read_json(_read_text(value))
        elif isinstance(value, yaml.ScalarNode):
            settings[name] = value.value
        else:
            _read_text(value)
    return json.dumps(settings)


def _read_json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
