"""The body of a function, with its parameters."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from pd.core.errors import ProgramError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Arguments = Mapping[str, Any]


class FunctionBody:
    """A function of Python. It appends to the state ``s``, its first parameter.

    Attributes:
        arg_names: its parameters after ``s``.
        spec_tokens: see :mod:`pd.lang.speculation`; None for no speculation.
        bound: arguments set by :meth:`bind`.
    """

    def __init__(self, func: Callable[..., Any], spec_tokens: int | None, bound: Arguments) -> None:
        self.func = func
        self.name = func.__name__
        self.spec_tokens = spec_tokens
        self.bound = dict(bound)
        self._signature = inspect.signature(func)
        names = list(self._signature.parameters)
        if not names or names[0] != "s":
            raise UsageError(f"{self.name}: the first parameter of a function must be 's'")
        self.arg_names = names[1:]

    def bind(self, arguments: Arguments) -> FunctionBody:
        """Return the body with some arguments set."""
        for name in arguments:
            if name not in self.arg_names:
                raise UsageError(f"{self.name} has no parameter {name!r}")
        return FunctionBody(self.func, self.spec_tokens, {**self.bound, **arguments})

    def call(self, state: object, args: Sequence[Any], arguments: Arguments) -> Any:
        """Call the function, and return its value."""
        return self.func(state, *args, **{**arguments, **self.bound})

    def name_arguments(self, given: Arguments | Sequence[Any]) -> dict[str, Any]:
        """Return arguments by name. Raises UsageError for anything else than the parameters."""
        if isinstance(given, dict):
            return given
        if not isinstance(given, list | tuple) or len(given) > len(self.arg_names):
            raise UsageError(
                f"{self.name}: arguments {given!r} do not fit the parameters "
                f"({', '.join(self.arg_names)})"
            )
        return dict(zip(self.arg_names, given, strict=False))

    def complete_arguments(self, arguments: Arguments) -> dict[str, Any]:
        """Return the arguments of all parameters, with bound ones and defaults.

        Raises UsageError for an unknown or a missing argument.
        """
        try:
            complete = self._signature.bind(None, **{**arguments, **self.bound})
        except TypeError as error:
            raise UsageError(f"{self.name}: {error}") from None
        complete.apply_defaults()
        return {name: complete.arguments[name] for name in self.arg_names}

    def name_error(self, error: BaseException) -> ProgramError:
        """Make the error of a state from one that ended the body."""
        if isinstance(error, ProgramError) and error.function is not None:
            return error
        message = f"{self.name}: {type(error).__name__}: {error}"
        named = ProgramError(message, function=self.name)
        named.__cause__ = error
        return named

    def refuse_settings(self, unknown: Arguments) -> None:
        """Refuse all keywords of a batch but sampling. Raises UsageError."""
        for name in unknown:
            raise UsageError(f"{self.name}: a batch has no setting {name!r}")
