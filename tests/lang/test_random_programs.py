"""Random programs equal a sequential reference, interpreted and compiled."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from sequential_reference import Program, Reference, make_program

import pd.lang as pl

if TYPE_CHECKING:
    from collections.abc import Iterator

METHODS = {
    "token_length_normalized": pl.token_length_normalized,
    "greedy_token": pl.greedy_token_selection,
    "unconditional_likelihood": pl.unconditional_likelihood_normalized,
}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def perform(s: Any, program: Program) -> None:
    """Perform a program as data on a state."""
    for kind, *operands in program:
        if kind == "say":
            s += operands[0]
        elif kind == "gen":
            name, max_tokens, stop = operands
            s += pl.gen(name, max_tokens, stop=stop, temperature=0)
        elif kind == "select":
            name, choices, method = operands
            s += pl.select(name, choices, choices_method=METHODS[method])
        elif kind == "read":
            name, index = operands
            s += s[name] if index is None else s[name][index]
        elif kind == "set":
            s[operands[0]] = operands[1]
        elif kind == "scope":
            with s.var_scope(operands[0]):
                perform(s, operands[1])
        elif kind == "turn":
            with getattr(s, operands[0])():
                perform(s, operands[1])
        else:
            forks = s.fork(len(operands[0]))
            for state, branch in zip(forks.states, operands[0], strict=True):
                perform(state, branch)
            if operands[1]:
                forks.join()


def check(program: Program, client: httpx.Client, backend: pl.RuntimeEndpoint) -> None:
    reference = Reference(client)
    reference.run(program)

    @pl.function
    def function(s: Any) -> None:
        perform(s, program)

    for run in (function.run, function.compile().run):
        state = run(backend=backend)
        assert state.error() is None
        assert state.text() == reference.text
        for name, value in reference.variables.items():
            assert state[name] == value


def check_together(name: str, client: httpx.Client, backend: pl.RuntimeEndpoint) -> None:
    """Check programs at the same time, so that the node batches their requests."""
    print(f"programs {name}")
    programs = [make_program(random.Random(f"{name}-{number}")) for number in range(25)]
    with ThreadPoolExecutor(len(programs)) as pool:
        list(pool.map(lambda program: check(program, client, backend), programs))


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.full)])
def test_random_programs_equal_the_reference(
    part: int, seed: int, client: httpx.Client, endpoint: pl.RuntimeEndpoint
) -> None:
    check_together(f"{seed}-{part}", client, endpoint)


@pytest.mark.full
@pytest.mark.parametrize("part", range(20))
def test_many_random_programs_equal_the_reference(
    part: int, seed: int, client: httpx.Client, endpoint: pl.RuntimeEndpoint
) -> None:
    check_together(f"full-{seed}-{part}", client, endpoint)
