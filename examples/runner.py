"""Shared by all examples: running their functions, and the command line."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

import pd.lang as pl
from pd import Engine
from pd.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from pd.lang.program import ProgramFunction
    from pd.lang.state import ProgramState

# Findings of an example, by title.
Result = dict[str, Any]

PEOPLE = ("Anna Berg", "Boris Costa", "Clara Dahl", "David Evans", "Elena Fischer", "Felix Garcia")
CITIES = ("Oslo", "Rome", "Lima", "Paris", "Tokyo", "Riga", "Prague", "Madrid")
JOBS = ("nurse", "baker", "pilot", "judge", "writer", "teacher")


class Runner:
    """Runs functions greedily, interpreted or compiled."""

    def __init__(self, backend: object, *, compiled: bool = False) -> None:
        self._backend = backend
        self._compiled = compiled

    def run(self, function: ProgramFunction, **arguments: Any) -> ProgramState:
        state = self._prepare(function).run(backend=self._backend, temperature=0, **arguments)
        return check(state)

    def run_batch(
        self, function: ProgramFunction, batch: Sequence[Mapping[str, Any]]
    ) -> list[ProgramState]:
        states = self._prepare(function).run_batch(batch, backend=self._backend, temperature=0)
        return [check(state) for state in states]

    def _prepare(self, function: ProgramFunction) -> Any:
        return function.compile() if self._compiled else function


def check(state: ProgramState) -> ProgramState:
    """Return a state that has not failed. Raises its error."""
    if (error := state.error()) is not None:
        raise error
    return state


def make_notes(rng: random.Random, count: int) -> dict[str, str]:
    """Make codes for keys, which the embedded model can look up in a text."""
    every = [f"{letter}{number}" for letter in "ABCDEFG" for number in range(10, 40)]
    keys = rng.sample(every, count)
    return {key: str(rng.randint(1000, 9999)) for key in keys}


def describe_notes(notes: Mapping[str, str]) -> str:
    return "\n".join(f"the code for {key} is {code}" for key, code in notes.items())


def start(example: Callable[[Runner], Result]) -> None:
    """Run an example from the command line, and print its result."""
    parser = argparse.ArgumentParser(description=example.__doc__)
    parser.add_argument("--url", help="a running pd; by default, the embedded model runs here")
    parser.add_argument("--compiled", action="store_true", help="compile the functions first")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        backend: object
        if options.url:
            backend = pl.RuntimeEndpoint(options.url)
        else:
            backend = stack.enter_context(Engine(EMBEDDED_MODEL))
        for name, value in example(Runner(backend, compiled=options.compiled)).items():
            lines = value if isinstance(value, list) else [value]
            print(f"{name}:", *(f"\n  {line}" for line in lines), sep="")
