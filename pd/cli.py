"""``pd-launch`` and ``pd-bench``. Each command imports heavy modules only when it runs."""

from __future__ import annotations

import argparse
import errno
import faulthandler
import logging
import os
import sys
from typing import TYPE_CHECKING, Protocol

from pd import __version__
from pd.commands.parser import Parser
from pd.core.errors import PDError, SetupError
from pd.util.exit import exit_now
from pd.util.logs import configure_logging
from pd.util.output import printable_output, write_without_waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

# The machine or the user's rights are to blame for these errors of the operating system.
_LACKS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO}
_LACKS |= {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}

_SERVERS = ("prefill", "decode", "unified", "proxy")

_EXAMPLES = """\
to see it work:
  pd-launch demo

to serve a model, each in its own terminal:
  pd-launch prefill --model DIR
  pd-launch decode  --model DIR
  pd-launch proxy   --prefill http://127.0.0.1:30000 --decode http://127.0.0.1:30100

to have a file of requests answered:
  pd-launch batch requests.jsonl answers.jsonl --url http://127.0.0.1:8000

Every command has its own --help. configs/ has more deployments, docs/ explains how it works.
"""


def launch(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``pd-launch``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _open_standard_streams()
        faulthandler.enable()  # because a library that crashes would leave nothing in the log
        # Other commands print results, and a slow reader must get all of them.
        is_server = bool(arguments) and arguments[0] in _SERVERS
        write_without_waiting(*(("stdout", "stderr") if is_server else ("stderr",)))
    parser, commands = launch_parser()
    name = arguments[0] if arguments and arguments[0] in commands else ""
    program = f"pd-launch {name}".strip()
    return _run_guarded(program, lambda: _run_command(parser, commands, arguments), argv)


def launch_parser() -> tuple[Parser, dict[str, Parser]]:
    """Make the parser, and the parsers of its commands by name."""
    from pd.commands import admin, batch, cluster, demo
    from pd.commands.servers import add_command, add_servers

    parser = Parser(
        prog="pd-launch",
        description="Serve a language model with prefill and decode on separate nodes.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=__version__)
    added = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_servers(added)
    demo.add_arguments(add_command(added, "demo", demo.TEXT))
    admin.add_arguments(add_command(added, "admin", admin.TEXT))
    cluster.add_arguments(add_command(added, "cluster", cluster.TEXT))
    batch.add_arguments(add_command(added, "batch", batch.TEXT))
    return parser, dict(added.choices)


def _run_command(parser: Parser, commands: dict[str, Parser], arguments: list[str]) -> int:
    from pd.commands import admin, batch, cluster, demo, node, proxy

    args, warnings = _parse_arguments(parser, commands, arguments)
    level = getattr(args, "log_level", "info")
    configure_logging(logging.getLevelNamesMapping()[level.upper()])
    for warning in warnings:
        logger.warning("%s", warning)
    programs = {"admin": admin, "batch": batch, "cluster": cluster, "demo": demo, "proxy": proxy}
    status: int = programs.get(args.command, node).run(args)
    return status


def parse_arguments(
    parser: Parser, commands: dict[str, Parser], arguments: list[str]
) -> argparse.Namespace:
    """Parse the flags and their settings file. Ends the process for invalid flags.

    Raises UsageError for an invalid file.
    """
    return _parse_arguments(parser, commands, arguments)[0]


def _parse_arguments(
    parser: Parser, commands: dict[str, Parser], arguments: list[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Also return warnings about the file for the log."""
    if not arguments or arguments[0] not in commands:
        return parser.parse_args(arguments), []
    name, flags = arguments[0], arguments[1:]
    command = commands[name]
    warnings: list[str] = []
    if any(flag.split("=")[0] == "--config" for flag in flags):
        from pd.commands.yaml_config import with_config_file

        flags, warnings = with_config_file(command, flags)
    args, unknown = parser.parse_known_args([name, *flags])
    if unknown:
        command.reject_argument(unknown[0])
    return args, warnings


class Benchmark(Protocol):
    """A module of ``pd.bench``."""

    @property
    def add_arguments(self) -> Callable[[argparse.ArgumentParser], None]: ...

    @property
    def run(self) -> Callable[[argparse.Namespace], int]: ...


def bench(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``pd-bench``."""
    if argv is None:
        _open_standard_streams()
        write_without_waiting("stderr")
    from pd.bench import compare, engine, proxy, radix, serve, sweep, transfer
    from pd.bench.page import command as report
    from pd.bench.programs import command as bench_programs

    parser = Parser(prog="pd-bench", description="Measure parts of the system, or all of it.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="BENCHMARK")
    programs: dict[str, tuple[Benchmark, str]] = {
        "compare": (compare, "whether one version is faster than another"),
        "engine": (engine, "speed of one node's prefill and decode"),
        "programs": (bench_programs, "what the prefix cache gives programs"),
        "proxy": (proxy, "what the proxy costs"),
        "radix": (radix, "speed of the radix cache"),
        "report": (report, "a page about runs and sweeps"),
        "serve": (serve, "what clients of a server wait for"),
        "sweep": (sweep, "the highest rate that keeps its objectives"),
        "transfer": (transfer, "speed of KV transfers between two processes or hosts"),
    }
    for name, (program, text) in programs.items():
        program.add_arguments(commands.add_parser(name, help=text, description=program.__doc__))
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments and arguments[0] in programs else ""

    def measure() -> int:
        args = parser.parse_args(arguments, argparse.Namespace(command_line=arguments))
        return programs[args.command][0].run(args)

    return _run_guarded(f"pd-bench {name}".strip(), measure, argv)


def _run_guarded(program: str, run: Callable[[], int], argv: Sequence[str] | None) -> int:
    """Return the exit status of ``run``, or end the process with it if ``argv`` is None.

    Our own errors become one line; others keep their traceback.
    """
    with printable_output():
        status = _find_status(program, run)
    if argv is None:
        exit_now(status)
    return status


def _find_status(program: str, run: Callable[[], int]) -> int:
    try:
        return run()
    except PDError as error:
        print(f"{program}: {' '.join(error.message.split())}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has left. Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        # OSError, and errors of libraries with its number, such as ZMQ's.
        if getattr(error, "errno", None) not in _LACKS:
            raise
        logger.debug("%s", program, exc_info=True)
        where = getattr(error, "filename", None)
        why = getattr(error, "strerror", error)
        print(f"{program}: {f'{where}: ' if where else ''}{why}", file=sys.stderr)
        return SetupError.exit_status


def _open_standard_streams() -> None:
    """Open closed standard streams.

    Libraries and our other processes write to their descriptors, so no socket or file may get them.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The new descriptor gets the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


if __name__ == "__main__":
    sys.exit(launch())
