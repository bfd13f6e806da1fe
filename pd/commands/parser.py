"""Command lines that teach: grouped flags with examples, and errors of one line."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pd.core.addresses import check_node_url
from pd.core.errors import InvalidRequestError, UsageError
from pd.core.kv_events_config import KVEventsConfig, parse_kv_events_config

if TYPE_CHECKING:
    from collections.abc import Iterable

DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
# Waits of more than nine times as long raise OverflowError.
_MAX_SECONDS = 1e9
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|K|M|G|T)(?:i?B)?", re.IGNORECASE)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of examples, and shows a default where there is one worth knowing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        uninteresting = action.default in (None, "", False, [], argparse.SUPPRESS)
        if uninteresting or "default" in text:
            return text
        if action.type is size:
            return f"{text} (default: {show_size(action.default)})"
        return f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line with the remedy. Flags cannot be abbreviated."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", HelpFormatter)
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    @property
    def flags(self) -> dict[str, argparse.Action]:
        """The long flags that a user may give, with what they do."""
        actions = self._option_string_actions
        return {f: a for f, a in actions.items() if f.startswith("--") and f != "--help"}

    def unknown(self, argument: str) -> NoReturn:
        """End the process because of an argument that no flag takes."""
        if not argument.startswith("-"):
            self.error(f"unexpected argument {argument!r}: everything is a flag")
        flag = argument.split("=")[0]
        self.error(f"unknown flag {flag}{did_you_mean(flag, self.flags)}")


# A step of more sequences than this gains nothing from a CUDA graph.
MAX_BATCH_SIZE = 4096


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at the likeliest of the known names, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def port(text: str) -> int:
    """0 to 65535."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"a port is 0 to 65535, not {text}")
    return int(text)


def node_url(text: str) -> str:
    """``http://host:port``; ``host:port`` is taken for that."""
    try:
        return check_node_url(text if "://" in text else f"http://{text}")
    except InvalidRequestError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def path(text: str) -> Path:
    """A file or directory; ``~`` is the home directory, in a settings file too."""
    return Path(text).expanduser()


def seconds(text: str) -> float:
    """A time that ends, and for which the system can wait."""
    number = seconds_or_zero(text)
    if not number:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text}")
    return number


def seconds_or_zero(text: str) -> float:
    """Such a time, or no time at all."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= _MAX_SECONDS:
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds from 0 to {_MAX_SECONDS:g}, not {text}"
        )
    return number


def size(text: str) -> int:
    """Bytes, from a number with an optional unit (powers of 1024)."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"a size is a number of bytes or like 512MiB, not {text}")
    power = ["", "K", "M", "G", "T"].index(found[2].upper())
    return int(float(found[1]) * 1024**power)


def show_size(num_bytes: int) -> str:
    """A number of bytes as :func:`size` reads it, in the largest unit that divides it."""
    for power, unit in reversed(list(enumerate(("", "KiB", "MiB", "GiB", "TiB")))):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{unit}"
    return "0"


def batch_sizes(text: str) -> tuple[int, ...]:
    """Numbers separated by commas; 0 stands for none."""
    try:
        sizes = tuple(int(part) for part in text.replace(" ", ",").split(",") if part)
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 0 or max(sizes) > MAX_BATCH_SIZE:
        raise argparse.ArgumentTypeError(
            f"must be numbers up to {MAX_BATCH_SIZE} such as 1,8,64, or 0 for none, not {text!r}"
        )
    return sizes


def kv_events_config(text: str) -> KVEventsConfig:
    """Parse the JSON object that says which events a node publishes."""
    try:
        return parse_kv_events_config(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def device(text: str) -> str:
    """A device's name; whether it is there turns out later."""
    if not DEVICE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"a device is auto, cpu, cuda or cuda:N, not {text}")
    return text
