"""``pd-launch`` and ``pd-bench``. Heavy imports happen only when a command needs them."""

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
from pd.core.exit import leave
from pd.core.logs import configure_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

# The machine or the user's rights are to blame for an operation that fails with one of these.
_LACKS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO}
_LACKS |= {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}

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
    if argv is None:
        _open_standard_streams()
        faulthandler.enable()  # a library that crashes would leave no word in the log
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, commands = launch_parser()
    name = arguments[0] if arguments and arguments[0] in commands else ""
    return _guarded(f"pd-launch {name}".strip(), lambda: _launch(parser, commands, arguments), argv)


def launch_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and those of its commands by name."""
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


def _launch(parser: Parser, commands: dict[str, Parser], arguments: list[str]) -> int:
    args = parse(parser, commands, arguments)
    level = getattr(args, "log_level", "info")
    configure_logging(logging.getLevelNamesMapping()[level.upper()])
    if args.command == "demo":
        from pd.commands import demo

        return demo.run(args)
    if args.command == "admin":
        from pd.commands import admin

        return admin.run(args)
    if args.command == "cluster":
        from pd.commands import cluster

        return cluster.run(args)
    if args.command == "batch":
        from pd.commands import batch

        return batch.run(args)
    from pd.commands import node, proxy

    return proxy.run(args) if args.command == "proxy" else node.run(args)


def parse(parser: Parser, commands: dict[str, Parser], arguments: list[str]) -> argparse.Namespace:
    """Flags and the file they name. Ends the process for what cannot be understood.

    Raises UsageError for a file that cannot be used.
    """
    if not arguments or arguments[0] not in commands:
        return parser.parse_args(arguments)
    name, flags = arguments[0], arguments[1:]
    command = commands[name]
    if any(flag.split("=")[0] == "--config" for flag in flags):
        from pd.commands.yaml_config import with_config_file

        flags = with_config_file(command, flags)
    args, unknown = parser.parse_known_args([name, *flags])
    if unknown:
        command.unknown(unknown[0])
    return args


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
    from pd.bench import compare, engine, proxy, radix, serve, sweep, transfer
    from pd.bench.page import command as report

    parser = Parser(prog="pd-bench", description="Measure parts of the system, or all of it.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="BENCHMARK")
    programs: dict[str, tuple[Benchmark, str]] = {
        "compare": (compare, "whether one version is faster than another"),
        "engine": (engine, "speed of one node's prefill and decode"),
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

    return _guarded(f"pd-bench {name}".strip(), measure, argv)


def _guarded(program: str, run: Callable[[], int], argv: Sequence[str] | None) -> int:
    """The exit status of ``run``, with which a process of ours (``argv`` None) ends here. Errors
    made for people end with one line; others keep their traceback."""
    status = _status(program, run)
    if argv is None:
        leave(status)
    return status


def _status(program: str, run: Callable[[], int]) -> int:
    try:
        return run()
    except PDError as error:
        print(f"{program}: {' '.join(error.message.split())}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has left; Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        # OSError, and errors of libraries that have its number, such as those of ZMQ.
        if getattr(error, "errno", None) not in _LACKS:
            raise
        logger.debug("%s", program, exc_info=True)
        where = getattr(error, "filename", None)
        why = getattr(error, "strerror", error)
        print(f"{program}: {f'{where}: ' if where else ''}{why}", file=sys.stderr)
        return SetupError.exit_status


def _open_standard_streams() -> None:
    """Open those of standard input, output and error that are closed, so that no socket or file
    gets their descriptors, to which libraries and other processes of ours write."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # It gets the lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


if __name__ == "__main__":
    sys.exit(launch())
