"""Flags that set the fields of a configuration class, whose defaults they take from there."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable

    from _typeshed import DataclassInstance


class ConfigFlags:
    """Adds flags in groups. A flag ``--page-size`` has the default of the field ``page_size``.

    Args:
        config: a dataclass; flags that none of its fields is named after are None when not given.
    """

    def __init__(self, parser: argparse.ArgumentParser, config: type[DataclassInstance]) -> None:
        self._parser = parser
        self._fields = {field.name: field for field in dataclasses.fields(config)}
        self._group: argparse._ArgumentGroup = parser.add_argument_group()

    def start_group(self, title: str) -> None:
        """Flags added from now on stand under this title in the help text."""
        self._group = self._parser.add_argument_group(title)

    def add(
        self,
        flag: str,
        help: str,
        *,
        type: Callable[[str], object] = str,
        choices: Iterable[str] | None = None,
        metavar: str | None = None,
        repeated: bool = False,
        **more: object,
    ) -> None:
        """Add one flag. A field that is False by default makes it a switch.

        Args:
            repeated: the flag may be given several times, and its values make a list.
            more: further settings of :meth:`argparse.ArgumentParser.add_argument`; ``default``
                replaces that of a field whose type differs from the flag's.
        """
        default = more.pop("default", self._default(flag))
        if default is False:
            self._group.add_argument(flag, action="store_true", help=help)
            return
        self._group.add_argument(
            flag,
            action="append" if repeated else "store",
            default=default,
            type=type,
            choices=choices,
            metavar=metavar,
            help=help,
            **more,  # type: ignore[arg-type]  # whatever argparse takes
        )

    def _default(self, flag: str) -> object:
        field = self._fields.get(flag.removeprefix("--").replace("-", "_"))
        if field is None:
            return None
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        return None if field.default is dataclasses.MISSING else field.default
