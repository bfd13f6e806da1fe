"""``--config FILE.yaml``: the same keys as the flags, which win."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from pd.commands.parser import batch_sizes, did_you_mean, kv_events_config
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from pd.commands.parser import Parser


def with_config_file(parser: Parser, arguments: list[str]) -> list[str]:
    """Put the file's settings before the flags of the command line, so that flags override them.

    A flag that may be repeated replaces the file's list as a whole.

    Args:
        parser: parser of the command.
        arguments: those after the command's name.

    Raises:
        UsageError: the file cannot be read, or has a key or value that the command cannot take.
    """
    path = _config_path(arguments)
    if path is None:
        return arguments
    given = {argument.split("=")[0] for argument in arguments if argument.startswith("--")}
    extra: list[str] = []
    for key, value in _read(path).items():
        flag = _flag(parser, str(key), path)
        if flag not in given:
            extra += _as_arguments(parser.flags[flag], flag, value, path)
    return [*extra, *arguments]


def _config_path(arguments: list[str]) -> Path | None:
    for index, argument in enumerate(arguments):
        if argument == "--config" and index + 1 < len(arguments):
            return Path(arguments[index + 1])
        if argument.startswith("--config="):
            return Path(argument.removeprefix("--config="))
    return None


def _read(path: Path) -> dict[object, object]:
    try:
        settings = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise UsageError(f"cannot read --config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {path} is not a text file: {error}") from error
    except RecursionError:
        raise UsageError(f"--config {path} is nested too deeply") from None
    # yaml lets errors of Python escape for values such as 2024-13-45 and !!int ''.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        raise UsageError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"--config {path} must map flags to values, not {settings!r:.80}")
    return settings


def _flag(parser: Parser, key: str, path: Path) -> str:
    flag = "--" + key.replace("_", "-")
    known = [name for name in parser.flags if name != "--config"]
    if flag not in known:
        hint = did_you_mean(flag, known).replace("--", "")
        raise UsageError(f"--config {path}: unknown key {key!r}{hint}")
    return flag


def _as_arguments(action: argparse.Action, flag: str, value: object, path: Path) -> list[str]:
    if value is None:
        return []
    if isinstance(action, argparse._StoreTrueAction):
        if not isinstance(value, bool):
            raise UsageError(f"--config {path}: {flag[2:]} must be true or false, not {value!r}")
        return [flag] if value else []
    if isinstance(value, list) and action.type is batch_sizes:
        value = ",".join(map(str, value))
    if isinstance(value, dict) and action.type is kv_events_config:
        value = json.dumps(value)
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not isinstance(action, argparse._AppendAction):
        raise UsageError(f"--config {path}: {flag[2:]} takes one value, not {value!r}")
    for item in values:
        if isinstance(item, dict | list | bool | None):
            raise UsageError(f"--config {path}: {flag[2:]} cannot be {item!r}")
    return [f"{flag}={item}" for item in values]
