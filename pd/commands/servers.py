"""Parsers of the commands for nodes and proxies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pd.commands import node_flags, proxy
from pd.commands.parser import Parser

if TYPE_CHECKING:
    import argparse

LOG_LEVELS = ("debug", "info", "warning", "error")


def add_command(added: argparse._SubParsersAction[Parser], name: str, text: str) -> Parser:
    """Add a command of ``pd-launch``; return its parser."""
    return added.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")


def add_servers(added: argparse._SubParsersAction[Parser]) -> None:
    """Add the commands for a node of each role and for a proxy."""
    for role, text in node_flags.ROLES.items():
        node_flags.add_arguments(_add_server(added, role, text), role)
    proxy.add_arguments(_add_server(added, "proxy", proxy.TEXT))


def _add_server(added: argparse._SubParsersAction[Parser], name: str, text: str) -> Parser:
    parser = add_command(added, name, text)
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file with the flags as keys; flags on the command line win",
    )
    parser.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default="info",
        help="how much to log (default: info)",
    )
    return parser


def list_server_flags() -> dict[str, list[str]]:
    """List the flags of each of these commands, without their dashes."""
    added = Parser().add_subparsers()
    add_servers(added)
    return {
        name: [flag.removeprefix("--") for flag in command.flags]
        for name, command in added.choices.items()
    }
