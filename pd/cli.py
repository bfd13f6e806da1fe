"""``pd-launch`` and ``pd-bench``. Heavy imports happen only when a command needs them."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pd import __version__
from pd.core.errors import PDError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOG_LEVELS = ("debug", "info", "warning", "error")


class Parser(argparse.ArgumentParser):
    """Ends with one line that says what to do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def launch(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``pd-launch``."""
    from pd.commands import node, proxy

    parser = Parser(
        prog="pd-launch",
        description="Serve a language model with prefill and decode on separate nodes.",
        epilog="Start with `pd-launch demo`; then see configs/ for deployments.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for role, text in node.ROLES.items():
        node.add_arguments(_command(commands, role, text), role)
    proxy.add_arguments(_command(commands, "proxy", "route requests to nodes; the HTTP endpoint"))
    demo_parser = _command(
        commands, "demo", "one prefill node, one decode node and a proxy on this machine"
    )
    demo_parser.add_argument("--serve", action="store_true", help="keep serving after the answer")
    demo_parser.add_argument("--prompt", default="What does the prefill node do?", help="question")
    arguments = list(sys.argv[1:] if argv is None else argv)
    return _guarded("pd-launch", lambda: _launch(parser, arguments))


def _launch(parser: Parser, arguments: list[str]) -> int:
    from pd.commands import node, proxy
    from pd.commands.yaml_config import with_config_file

    args = parser.parse_args(with_config_file(parser, arguments))
    level = getattr(args, "log_level", "info")
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    for noisy in ("httpx", "httpcore", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if args.command == "demo":
        from pd.commands import demo

        return demo.run(args)
    if args.command == "proxy":
        return proxy.run(args)
    return node.run(args)


def _command(commands: argparse._SubParsersAction[Parser], name: str, text: str) -> Parser:
    parser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    if name != "demo":
        parser.add_argument(
            "--config", type=Path, metavar="FILE", help="YAML file with the same keys; flags win"
        )
        parser.add_argument(
            "--log-level", choices=LOG_LEVELS, default="info", help="how much to log"
        )
    return parser


def bench(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``pd-bench``."""
    from pd.bench import radix

    parser = Parser(prog="pd-bench", description="Measure parts of the system, or all of it.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="BENCHMARK")
    radix.add_arguments(_bench(commands, "radix", "speed of the radix cache"))
    arguments = list(sys.argv[1:] if argv is None else argv)
    return _guarded("pd-bench", lambda: radix.run(parser.parse_args(arguments)))


def _bench(commands: argparse._SubParsersAction[Parser], name: str, text: str) -> Parser:
    return commands.add_parser(name, help=text, description=text)


def _guarded(program: str, run: Callable[[], int]) -> int:
    """Errors made for people end with one line; others keep their traceback."""
    try:
        return run()
    except PDError as error:
        print(f"{program}: {error.message}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130


def existing_file(text: str) -> Path:
    """An argument that names a file."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"no such file: {text}")
    return path


def usage_error(message: str) -> NoReturn:
    """End with exit status 2."""
    raise UsageError(message)


if __name__ == "__main__":
    sys.exit(launch())
