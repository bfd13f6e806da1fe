"""Random programs as data, and an interpreter of its own for them.

It performs one operation after the other on plain ``POST /generate``, and shares no code with
``pd.lang``. A program is a list of operations:

    ("say", text)                           says a text
    ("gen", name, max_tokens, stop)         generates, greedily
    ("select", name, choices, method)       picks a choice
    ("read", name, index)                   says a variable, or an item of a gathered one
    ("set", name, text)                     sets a variable
    ("scope", name, program)                keeps what a program says
    ("turn", role, program)                 says it in a turn of a chat
    ("fork", programs, joins)               runs programs from here, and gathers their variables
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random

    import httpx

WORDS = ["pd", " the KV cache", " node", "\n", " prefill and", ": ", "What is", " 12 + 5 ="]
CHOICES = [" node", " nodes", " cache", " pages", " the proxy", "zebra", "1"]
METHODS = ["token_length_normalized", "greedy_token", "unconditional_likelihood"]
NAMES = ["a", "b", "c", "d"]

Program = list[tuple[Any, ...]]


# The size of each variable: 0 of a text, and the number of texts in a list.
Known = dict[str, int]
_NESTED = -1


def make_program(rng: random.Random) -> Program:
    """Make a random program."""
    begin = ("turn", "user", [("say", rng.choice(WORDS))])
    first = begin if rng.random() < 0.4 else ("say", rng.choice(WORDS))
    return [first, *_make_part(rng, {}, 0, False)]


def _make_part(rng: random.Random, known: Known, depth: int, in_turn: bool) -> Program:
    program: Program = []
    for _ in range(rng.randint(2, 4)):
        kinds = ["say", "gen", "gen", "select", "read", "set"]
        if depth < 2:
            kinds += ["scope", "fork", "fork"] + ([] if in_turn else ["turn"])
        kind, name = rng.choice(kinds), rng.choice(NAMES)
        readable = sorted(name for name, size in known.items() if size != _NESTED)
        if kind == "say":
            program.append((kind, rng.choice(WORDS) + rng.choice(WORDS)))
        elif kind == "gen":
            stop = rng.choice([None, None, ".", [" the", ","]])
            program.append((kind, name, rng.randint(1, 3), stop))
        elif kind == "select":
            choices = rng.sample(CHOICES, rng.randint(2, 3))
            program.append((kind, name, choices, rng.choice(METHODS)))
        elif kind == "read" and readable:
            read = rng.choice(readable)
            program.append((kind, read, rng.randrange(known[read]) if known[read] else None))
        elif kind == "set":
            program.append((kind, name, rng.choice(WORDS)))
        elif kind == "scope":
            program.append((kind, name, _make_part(rng, known, depth + 1, in_turn)))
        elif kind == "turn":
            role = rng.choice(["user", "assistant", "system"])
            program.append((kind, role, _make_part(rng, known, depth + 1, True)))
        elif kind == "fork":
            ends = [dict(known) for _ in range(rng.randint(1, 3))]
            branches = [_make_part(rng, end, depth + 1, in_turn) for end in ends]
            joins = rng.random() < 0.7
            program.append((kind, branches, joins))
            for new in {name for end in ends for name in end} - known.keys():
                sizes = [end[new] for end in ends if new in end]
                if joins:
                    known[new] = _NESTED if any(sizes) else len(sizes)
        if kind in ("gen", "select", "set", "scope"):
            known[name] = 0
    return program


@dataclass
class Reference:
    """The state of a program."""

    client: httpx.Client
    text: str = ""
    rendered: bool = False
    variables: dict[str, Any] = field(default_factory=dict)

    def run(self, program: Program) -> None:
        for kind, *operands in program:
            getattr(self, kind)(*operands)

    def say(self, text: str) -> None:
        self.text += text

    def ask(self, **body: Any) -> str:
        body |= {"text": self.text, "add_special_tokens": not self.rendered}
        response = self.client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["text"])

    def keep(self, name: str, text: str) -> None:
        self.variables[name] = text
        self.say(text)

    def gen(self, name: str, max_tokens: int, stop: Any) -> None:
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "stop": stop}
        self.keep(name, self.ask(sampling_params=sampling))

    def select(self, name: str, choices: list[str], method: str) -> None:
        self.keep(name, self.ask(choices=choices, choices_method=method))

    def read(self, name: str, index: int | None) -> None:
        value = self.variables[name]
        self.say(value if index is None else value[index])

    def set(self, name: str, text: str) -> None:
        self.variables[name] = text

    def scope(self, name: str, program: Program) -> None:
        begin = len(self.text)
        self.run(program)
        self.variables[name] = self.text[begin:]

    def turn(self, role: str, program: Program) -> None:
        self.rendered = self.rendered or not self.text
        self.say(f"<|im_start|>{role}\n")
        self.run(program)
        self.say("<|im_end|>\n")

    def fork(self, programs: list[Program], joins: bool) -> None:
        gathered: dict[str, list[str]] = {}
        for program in programs:
            branch = copy.copy(self)
            branch.variables = dict(self.variables)
            branch.run(program)
            for name, value in branch.variables.items():
                if name not in self.variables:
                    gathered.setdefault(name, []).append(value)
        if joins:
            self.variables |= gathered
