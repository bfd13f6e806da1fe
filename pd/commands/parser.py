"""Command lines that teach: grouped flags with examples, and one-line errors with the remedy."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from pd.core.addresses import check_node_url, is_host
from pd.core.brief import short_repr
from pd.core.config import MAX_MODEL_CHARACTERS
from pd.core.errors import InvalidRequestError, UsageError
from pd.core.kv_events_config import KVEventsConfig, parse_kv_events_config
from pd.util.hints import suggest_name
from pd.util.printable import escape_text

DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
# Longer waits raise OverflowError from nine times as much on.
_MAX_SECONDS = 1e9
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|K|M|G|T)(?:i?B)?", re.IGNORECASE)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of examples, and shows interesting defaults."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        uninteresting = action.default in (None, "", False, [], argparse.SUPPRESS)
        if uninteresting or "default" in text:
            return text
        if action.type is parse_size:
            return f"{text} (default: {show_size(action.default)})"
        return f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """Parser with one-line errors and remedies. Flags cannot be abbreviated."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", HelpFormatter)
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {escape_text(message)}; see {self.prog} --help\n")

    @property
    def flags(self) -> dict[str, argparse.Action]:
        """The long flags for users, with their actions."""
        actions = self._option_string_actions
        return {f: a for f, a in actions.items() if f.startswith("--") and f != "--help"}

    def reject_argument(self, argument: str) -> NoReturn:
        """End the process because no flag takes an argument."""
        if not argument.startswith("-"):
            self.error(f"unexpected argument {argument!r}: everything is a flag")
        flag = argument.split("=")[0]
        self.error(f"unknown flag {flag}{suggest_name(flag, self.flags)}")


# A CUDA graph does not speed up steps of more sequences than this.
MAX_BATCH_SIZE = 4096


def parse_port(text: str) -> int:
    """Parse 0 to 65535."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"a port is 0 to 65535, not {text}")
    return int(text)


def parse_node_url(text: str) -> str:
    """Parse ``http://host:port`` or ``host:port``."""
    has_scheme = "://" in text
    try:
        url = check_node_url(text if has_scheme else f"http://{text}")
    except InvalidRequestError as error:
        raise argparse.ArgumentTypeError(error.message) from None
    parts = urlsplit(url)
    if not is_host(parts.hostname or "") or not (has_scheme or parts.port):
        raise argparse.ArgumentTypeError(
            f"a node's url must be like http://host:port, not {short_repr(text)}"
        )
    return url


def parse_host(text: str) -> str:
    """Parse a host's name or its address."""
    if not is_host(text):
        raise argparse.ArgumentTypeError(
            "a host is a name such as node-1, or an IP address without brackets, not "
            f"{short_repr(text)}"
        )
    return text


def parse_text(text: str) -> str:
    """Reject an empty text."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the value is empty; give one, or leave the flag out")
    return text


def parse_model_name(text: str) -> str:
    """Parse a name by which clients can ask for a model."""
    stripped = parse_text(text).strip()
    if text != stripped or not text.isprintable() or len(text) > MAX_MODEL_CHARACTERS:
        raise argparse.ArgumentTypeError(
            f"a name has 1 to {MAX_MODEL_CHARACTERS} printable characters, and no space at either "
            f"end, not {short_repr(text)}"
        )
    return text


def parse_path(text: str) -> Path:
    """Parse a file or directory; ``~`` is the home directory, in a settings file too."""
    return Path(parse_text(text)).expanduser()


def parse_seconds(text: str) -> float:
    """Parse a finite time above 0 for which the system can wait."""
    number = parse_seconds_or_zero(text)
    if not number:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text}")
    return number


def parse_seconds_or_zero(text: str) -> float:
    """Parse such a time, or 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= _MAX_SECONDS:
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds from 0 to {_MAX_SECONDS:g}, not {text}"
        )
    return number


def parse_size(text: str) -> int:
    """Parse bytes: a number with an optional unit (powers of 1024)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"a size is a number of bytes or like 512MiB, not {text}")
    power = ["", "K", "M", "G", "T"].index(match[2].upper())
    return int(float(match[1]) * 1024**power)


def show_size(num_bytes: int) -> str:
    """Format bytes as :func:`parse_size` reads them, in the largest possible unit."""
    for power, unit in reversed(list(enumerate(("", "KiB", "MiB", "GiB", "TiB")))):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{unit}"
    return "0"


def parse_batch_sizes(text: str) -> tuple[int, ...]:
    """Parse numbers separated by commas; 0 stands for none."""
    try:
        sizes = tuple(int(part) for part in text.replace(" ", ",").split(",") if part)
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 0 or max(sizes) > MAX_BATCH_SIZE:
        raise argparse.ArgumentTypeError(
            f"must be numbers up to {MAX_BATCH_SIZE} such as 1,8,64, or 0 for none, not {text!r}"
        )
    return sizes


def parse_kv_events(text: str) -> KVEventsConfig:
    """Parse the JSON object of a node's events."""
    try:
        return parse_kv_events_config(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def parse_device(text: str) -> str:
    """Parse a device's name. Whether it exists turns out later."""
    if not DEVICE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"a device is auto, cpu, cuda or cuda:N, not {text}")
    return text
