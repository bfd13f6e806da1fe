"""Flags for the fields of a configuration class, whose defaults they share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pd.commands import parser as types

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable

    from _typeshed import DataclassInstance


class ConfigFlags:
    """Adds flags in groups. A flag ``--page-size`` has the default of the field ``page_size``.

    Args:
        config: a dataclass. The default is None for a flag without a field, and for a field that is
            an empty text by default.
    """

    def __init__(self, parser: argparse.ArgumentParser, config: type[DataclassInstance]) -> None:
        self._parser = parser
        self._fields = {field.name: field for field in dataclasses.fields(config)}
        self._group: argparse._ArgumentGroup = parser.add_argument_group()

    def start_group(self, title: str) -> None:
        """Put the following flags under this title in the help text."""
        self._group = self._parser.add_argument_group(title)

    def add_flag(
        self,
        flag: str,
        help: str,
        *,
        type: Callable[[str], object] = types.parse_text,
        choices: Iterable[str] | None = None,
        metavar: str | None = None,
        repeated: bool = False,
        **more: object,
    ) -> None:
        """Add one flag. A field that is False by default makes it a switch.

        Args:
            repeated: whether the flag may be given several times; its values form a list. With
                ``nargs`` it may also have several values at a time.
            more: further arguments of :meth:`argparse.ArgumentParser.add_argument`; ``default``
                replaces the field's if their types differ.
        """
        field = self._fields.get(flag.removeprefix("--").replace("-", "_"))
        default: object = None
        if field is not None and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        elif field is not None and field.default not in (dataclasses.MISSING, ""):
            # argparse would treat an empty text as a given one.
            default = field.default
        default = more.pop("default", default)
        if default is False:
            self._group.add_argument(flag, action="store_true", help=help)
            return
        several = "extend" if "nargs" in more else "append"
        self._group.add_argument(
            flag,
            action=several if repeated else "store",
            default=default,
            type=type,
            choices=choices,
            metavar=metavar,
            help=help,
            **more,  # type: ignore[arg-type]  # anything for argparse
        )
