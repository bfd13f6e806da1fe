"""``--config FILE.yaml``: the same keys as the flags, which win."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pd.core.errors import UsageError

if TYPE_CHECKING:
    import argparse


def with_config_file(parser: argparse.ArgumentParser, arguments: list[str]) -> list[str]:
    """Put the file's settings before the flags of the command line, so that flags override them.

    A flag that may be repeated replaces the file's list as a whole.

    Raises:
        UsageError: the file cannot be read or is not a mapping of flags to values.
    """
    path = _config_path(arguments)
    if path is None or not arguments:
        return arguments
    settings = _read(path)
    given = {a.split("=")[0] for a in arguments if a.startswith("--")}
    extra: list[str] = []
    for key, value in settings.items():
        flag = "--" + str(key).replace("_", "-")
        if flag not in given:
            extra += _as_flags(flag, value, path)
    return [arguments[0], *extra, *arguments[1:]]


def _config_path(arguments: list[str]) -> Path | None:
    for index, argument in enumerate(arguments):
        if argument == "--config" and index + 1 < len(arguments):
            return Path(arguments[index + 1])
        if argument.startswith("--config="):
            return Path(argument.removeprefix("--config="))
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise UsageError(f"cannot read --config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"--config {path} must map flags to values, not {settings!r}")
    return settings


def _as_flags(flag: str, value: Any, path: Path) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list):
        return [part for item in value for part in _as_flags(flag, item, path)]
    if isinstance(value, dict):
        raise UsageError(f"--config {path}: {flag} must be a value or a list, not {value!r}")
    return [f"{flag}={value}"]
