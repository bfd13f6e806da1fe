"""Questions and answers as text, one at a time, from Python's random numbers."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

from embedded import wording

if TYPE_CHECKING:
    import random

_SLOT = re.compile(r"\{(\w+)\}")

# Slots made of others.
COMPOSITES = {
    "name": "{first} {last}",
    "time": "{hour}:{minute}",
    "order": "{letter}{serial}",
    "flight": "{letter}{letter2}{serial3}",
}
# Slots that are whole numbers, with their bounds.
INTEGERS = {
    "age": (18, 89),
    "quantity": (2, 99),
    "room": (1, 499),
    "gate": (1, 60),
    "status": (200, 599),
    "latency": (1, 999),
    "number": (2, 99),
    "hour": (6, 22),
    "minute": (10, 59),
    "serial": (1000, 9999),
    "serial3": (100, 999),
}
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

# Shapes of keys (A: letter, 0: digit) and lengths of values, with their shares.
KEY_SHAPES = ("A00", "A000", "AA0")
KEY_SHARES = (0.7, 0.15, 0.15)
VALUE_LENGTHS = (4, 3, 5, 6)
VALUE_SHARES = (0.7, 0.1, 0.1, 0.1)

# Of pairs with an operand of three digits, one in 50 is kept out of training.
_HELD_OUT_SHARE = 50
_HASH = 2654435761


class Turn(NamedTuple):
    """A question and the one right answer."""

    question: str
    answer: str


def is_held_out(a: int, b: int) -> bool:
    """Return whether training never uses this pair of operands. Also takes numpy arrays."""
    return (
        ((a * 1000 + b) * _HASH % 4294967296 % _HELD_OUT_SHARE == 0)
        & (a + b > 0)
        & ((a >= 100) | (b >= 100))
    )


def expand(template: str) -> str:
    """Replace composite slots of a template by their parts."""
    return _SLOT.sub(lambda m: COMPOSITES.get(m[1], m[0]), template)


def fill(template: str, values: dict[str, object], rng: random.Random) -> str:
    """Fill a template with ``values``, and with random ones for missing slots."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in values:
            values[name] = _random_value(name, rng)
        return str(values[name])

    return _SLOT.sub(value, expand(template))


def _random_value(name: str, rng: random.Random) -> object:
    if name in wording.WORDS:
        return rng.choice(wording.WORDS[name])
    if name.startswith("letter"):
        return rng.choice(LETTERS)
    return rng.randint(*INTEGERS[name])


def random_key(shape: str, rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS) if c == "A" else str(rng.randrange(10)) for c in shape)


def random_value(length: int, rng: random.Random) -> str:
    """Draw digits, the first of them not 0."""
    return str(rng.randrange(10 ** (length - 1), 10**length))


def filler(rng: random.Random) -> str:
    return fill(rng.choice(wording.FILLERS), {}, rng)


def arithmetic(rng: random.Random, *, held_out: bool) -> Turn:
    """Ask for a sum or difference of numbers with one to three digits each.

    Args:
        held_out: use a pair that training leaves out. Training uses all pairs below 100, because
            there are few.
    """
    while True:
        a, b = (rng.randrange(10 ** rng.choice((1, 2, 3, 3))) for _ in range(2))
        if is_held_out(a, b) == held_out or (held_out and max(a, b) < 100 and rng.random() < 0.1):
            break
    plus = rng.random() < 0.5
    question = rng.choice(wording.SUMS if plus else wording.DIFFERENCES).format(a=a, b=b)
    answer = f"{a} + {b} = {a + b}" if plus else f"{a} - {b} = {a - b}"
    return Turn(question, answer)


def extraction(rng: random.Random) -> Turn:
    """Ask for some fields of a sentence, in any order, as JSON."""
    sentences, fields = rng.choice(list(wording.DOMAINS.values()))
    values: dict[str, object] = {}
    sentence = fill(rng.choice(sentences), values, rng)
    asked = rng.sample(fields, rng.randint(2, len(fields)))
    found = {name: fill(f"{{{name}}}", values, rng) for name in asked}
    answer = {n: int(v) if n in wording.NUMBERS else v for n, v in found.items()}
    question = rng.choice(wording.EXTRACTIONS).format(fields=", ".join(asked), sentence=sentence)
    return Turn(question, json.dumps(answer))


def small_talk(rng: random.Random) -> Turn:
    answer = rng.choice(list(wording.SMALL_TALK))
    return Turn(fill(rng.choice(wording.SMALL_TALK[answer]), {}, rng), answer)


class Notes:
    """Lines to be read and asked about: some hold the value of a key, others nothing of use."""

    def __init__(self, rng: random.Random, density: float) -> None:
        """``density``: share of lines that hold a value."""
        self._rng = rng
        self._density = density
        self._shape = rng.choices(KEY_SHAPES, KEY_SHARES)[0]
        self._length = rng.choices(VALUE_LENGTHS, VALUE_SHARES)[0]
        self.noun = rng.choices(wording.NOUNS, wording.NOUN_SHARES)[0]
        # One wording for all lines, or a mixture.
        self._needles = wording.NEEDLES if rng.random() < 0.5 else (rng.choice(wording.NEEDLES),)
        self.values: dict[str, str] = {}

    def line(self) -> str:
        return self.needle()[1] if self._rng.random() < self._density else filler(self._rng)

    def needle(self) -> tuple[str, str]:
        """Make a new key and its line."""
        key = random_key(self._shape, self._rng)
        while key in self.values:
            key = random_key(self._shape, self._rng)
        value = random_value(self._length, self._rng)
        self.values[key] = value
        template = self._rng.choice(self._needles)
        return key, template.format(noun=self.noun, key=key, value=value)

    def ask(self, key: str, *, short: bool = False, follow_up: bool = False) -> Turn:
        """Ask about a key. The answer is a sentence or (``short``) the value alone."""
        slots = {"noun": self.noun, "key": key, "value": self.values[key]}
        if short:
            questions, answer = wording.SHORT_QUESTIONS, wording.SHORT_ANSWER
        else:
            questions = wording.FOLLOW_UPS if follow_up else wording.RECALL_QUESTIONS
            answer = wording.RECALL_ANSWER
        return Turn(self._rng.choice(questions).format(**slots), answer.format(**slots))
