"""Describes the flags and exit statuses of programs that use argparse.

The parsers are taken from the programs themselves: whichever parser a program calls is its parser.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Program = Callable[[list[str]], int]

_BUILT_IN_TYPES = {str: "str", int: "int", float: "float", Path: "path"}
# Texts that show what a type of our own accepts, and what it makes of them. The names of these
# types are our own business.
_SAMPLES = (
    *("", " ", "0", "1", "-1", "7", "0.5", "5000", "65536", "1e9", "1e99", "inf", "nan"),
    *("auto", "cuda", "cuda:0", "cpu", "a b", "name", "name=value", "512MiB", "2G"),
    *("1,8,64", "0,8", "1 8", "4:2", "decode:1,16", "prefill:512", "0.5:1", "10-20", "1:2:3"),
    *("127.0.0.1", "127.0.0.1:1", "http://h:1", "https://h", "[::1]:1", "h:1", "dns:h:1"),
    *("{}", '{"a": 1}', "[]", "true", "p99=2", "ttft:500", "ttft_p99=0.5"),
)


class _Captured(BaseException):
    """Leaves a program when it calls its parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


class FlagTypes:
    """Collects the types of flags that are functions of ours, by what they accept.

    Attributes:
        accepted: for each type, the samples it accepts and what it makes of them. The key is a hash
            of these, because the name of the function is our own business.
    """

    def __init__(self) -> None:
        self.accepted: dict[str, list[str]] = {}

    def describe(self, convert: Any) -> str:
        """Return the name of a type if Python has it, otherwise its key in ``accepted``."""
        if convert is None:
            return "str"
        if convert in _BUILT_IN_TYPES:
            return _BUILT_IN_TYPES[convert]
        accepted = []
        for sample in _SAMPLES:
            try:
                value = _plain(convert(sample))
            except (argparse.ArgumentTypeError, TypeError, ValueError):
                continue  # argparse refuses the value for these three
            accepted.append(sample if value == sample else f"{sample} → {value}")
        key = f"type {hashlib.sha256(repr(accepted).encode()).hexdigest()[:8]}"
        self.accepted[key] = accepted
        return key


def describe_commands(programs: dict[str, Program]) -> dict[str, Any]:
    """Describe the flags and exit statuses of programs by their names."""
    found: dict[str, Any] = {}
    types = FlagTypes()
    for name, program in programs.items():
        parser = capture_parser(program)
        commands = dict(walk_commands(parser, ()))
        for path, command in commands.items():
            found[" ".join((name, *path))] = {
                "parser": describe_parser(command, types),
                "exit statuses": _exit_statuses(program, path),
            }
        found[name]["exit statuses"] |= _statuses_of_events(program)
    return {"programs": found, "types of flags": types.accepted}


def capture_parser(program: Program) -> argparse.ArgumentParser:
    """Return the parser of a program."""

    def capture(parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        raise _Captured(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", capture):
        try:
            program([])
        except _Captured as captured:
            return captured.parser
    raise AssertionError("the program does not use argparse")


def walk_commands(
    parser: argparse.ArgumentParser, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Yield a parser and those of its commands, with the words that lead to each."""
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from walk_commands(command, (*path, name))


def describe_parser(parser: argparse.ArgumentParser, types: FlagTypes) -> dict[str, Any]:
    """Describe the flags of one parser without their help texts."""
    flags: dict[str, Any] = {}
    positionals: list[dict[str, Any]] = []
    for action in parser._actions:
        if action.option_strings:
            flags[" ".join(action.option_strings)] = _describe_action(action, types)
        elif isinstance(action, argparse._SubParsersAction):
            positionals.append({"commands": sorted(action.choices), "required": action.required})
        else:
            positionals.append(_describe_action(action, types))
    groups = [
        {"required": group.required, "flags": [_name_of(each) for each in group._group_actions]}
        for group in parser._mutually_exclusive_groups
    ]
    return {
        "abbreviations": parser.allow_abbrev,
        "flags": flags,
        "positionals": positionals,
        "only one of": groups,
    }


def _name_of(action: argparse.Action) -> str:
    return " ".join(action.option_strings) or action.dest


def _describe_action(action: argparse.Action, types: FlagTypes) -> dict[str, Any]:
    kind = type(action).__name__.strip("_").removesuffix("Action").lower()
    facts: dict[str, Any] = {"action": kind, "dest": action.dest}
    if kind in ("help", "version"):
        return facts
    facts["default"] = _plain(action.default)
    if action.const is not None:
        facts["const"] = _plain(action.const)
    if kind != "storetrue":
        facts["type"] = types.describe(action.type)
        facts["nargs"] = action.nargs
    if action.choices is not None:
        facts["choices"] = [_plain(choice) for choice in action.choices]
    if action.required:
        facts["required"] = True
    return facts


def _plain(value: Any) -> Any:
    """Turn a value into JSON without the names of our classes."""
    return msgspec.to_builtins(value, enc_hook=str)


def _exit_statuses(program: Program, path: Sequence[str]) -> dict[str, Any]:
    arguments = {
        "--help": [*path, "--help"],
        "--no-such-flag": [*path, "--no-such-flag"],
        "a stray word": [*path, "stray-word"],
    }
    if not path:
        arguments |= {"no arguments": [], "--version": ["--version"]}
    return {name: _exit_status(program, words) for name, words in arguments.items()}


def _exit_status(program: Program, arguments: list[str]) -> object:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            return program(arguments)
        except SystemExit as end:
            return end.code


def _statuses_of_events(program: Program) -> dict[str, object]:
    """Return the exit statuses of a program to which these errors happen."""
    errors = {
        "interrupted": KeyboardInterrupt(),
        "no space left": OSError(errno.ENOSPC, "no space"),
        "permission denied": PermissionError(errno.EACCES, "no permission"),
    }
    found = {}
    for name, error in errors.items():
        with mock.patch.object(argparse.ArgumentParser, "parse_known_args", side_effect=error):
            found[name] = _exit_status(program, [])
    return found
