"""Evaluation sets: the same examples from the same seed, on any machine, by any client."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from embedded import faq, skills, wording
from embedded.text import Message, count_prompt, count_tokens

SEED = 20_000_003
SHORT_LENGTHS = (250, 500, 1000, 1500, 2000)
LONG_LENGTHS = (2500, 3000, 3500, 4000)
DEPTHS = 11

# Smallest share of right answers, by set.
BARS = {
    "recall-2k": 0.98,
    "recall-4k": 0.95,
    "multi-turn": 0.95,
    "extraction": 0.97,
    "arithmetic": 0.95,
    "faq": 0.95,
}


@dataclass(frozen=True)
class Example:
    """A conversation whose last answer is judged.

    Attributes:
        before: messages before the first question, often none.
        turns: questions in order; the last answer must be exactly the last turn's.
        length: tokens of the prompt of the last turn, about.
        depth: where the needle lies, from 0 (first line) to 1, for recall.
    """

    skill: str
    before: tuple[Message, ...]
    turns: tuple[skills.Turn, ...]
    length: int = 0
    depth: float = 0.0
    tags: dict[str, str] = field(default_factory=dict, compare=False)


def is_right(example: Example, answer: str) -> bool:
    """Return whether the answer is exactly the expected one, except for white space around it."""
    return answer.strip() == example.turns[-1].answer


def evaluation_sets(seed: int = SEED) -> dict[str, list[Example]]:
    """Return all examples by set."""
    return {name: evaluation_set(name, seed) for name in BARS}


def evaluation_set(name: str, seed: int = SEED) -> list[Example]:
    """Make one set from its own generator. Its first examples are a fair sample of all."""
    if name == "recall-2k":
        return _recall(name, SHORT_LENGTHS, 6, seed)
    if name == "recall-4k":
        return _recall(name, LONG_LENGTHS, 6, seed)
    if name == "multi-turn":
        return _multi_turn(200, seed)
    if name == "faq":
        return _questions()
    return _simple(name, 400, seed)


def _recall(name: str, lengths: tuple[int, ...], repeats: int, seed: int) -> list[Example]:
    """Make every length at every depth, shuffled so that the first are a fair sample."""
    rng = random.Random(f"{name} {seed}")
    examples = [
        _recall_example(name, length, depth / (DEPTHS - 1), rng)
        for length in lengths
        for depth in range(DEPTHS)
        for _ in range(repeats)
    ]
    rng.shuffle(examples)
    return examples


def recall_examples(length: int, count: int, seed: int = SEED) -> list[Example]:
    """Make recall from prompts of one length, with needles at all depths in turn."""
    rng = random.Random(f"recall {length} {seed}")
    depths = [(i % DEPTHS) / (DEPTHS - 1) for i in range(count)]
    return [_recall_example("recall", length, depth, rng) for depth in depths]


def _recall_example(name: str, length: int, depth: float, rng: random.Random) -> Example:
    notes, key, text = _notes_of(length - 60, depth, rng)
    turn = notes.ask(key, short=rng.random() < 0.2)
    before, first = _place(text, turn, rng)
    messages = [*before, Message("user", first.question)]
    return Example(name, before, (first,), count_prompt(messages), depth)


def _notes_of(length: int, depth: float, rng: random.Random) -> tuple[skills.Notes, str, str]:
    """Make about ``length`` tokens of whole lines with one needle at ``depth``."""
    notes = skills.Notes(rng, density=rng.choice((0.02, 0.1, 0.3, 0.6, 1.0)))
    key, needle = notes.needle()
    left = length - count_tokens(needle)
    lines: list[str] = []
    while True:
        known = len(notes.values)
        line = notes.line()
        left -= count_tokens(line) + 1
        if left < 0:
            if len(notes.values) > known:
                # Nobody can be asked about a line that is left out.
                notes.values.popitem()
            break
        lines.append(line)
    lines.insert(round(depth * len(lines)), needle)
    return notes, key, "\n".join(lines)


def _place(
    text: str, turn: skills.Turn, rng: random.Random
) -> tuple[tuple[Message, ...], skills.Turn]:
    """Put lines into the user's message or, now and then, into the system's."""
    if rng.random() < 0.25:
        return (Message("system", text),), turn
    before: tuple[Message, ...] = ()
    if rng.random() < 0.2:
        before = (Message("system", rng.choice(wording.SYSTEM_PROMPTS)),)
    question = f"{rng.choice(wording.INTRODUCTIONS)}{text}\n\n{turn.question}"
    return before, turn._replace(question=question)


def _multi_turn(count: int, seed: int) -> list[Example]:
    """Ask two questions about the same lines, each about another line."""
    rng = random.Random(f"multi-turn {seed}")
    examples = []
    for _ in range(count):
        length = rng.randrange(200, 3500)
        notes, key, text = _notes_of(length - 100, rng.random(), rng)
        second = rng.choice([k for k in notes.values if k != key] or [key])
        before, first = _place(text, notes.ask(key), rng)
        turns = (first, notes.ask(second, follow_up=rng.random() < 0.5))
        messages = [
            *before,
            Message("user", first.question),
            Message("assistant", first.answer),
            Message("user", turns[1].question),
        ]
        examples.append(Example("multi-turn", before, turns, count_prompt(messages)))
    return examples


def _simple(name: str, count: int, seed: int) -> list[Example]:
    rng = random.Random(f"{name} {seed}")
    examples = []
    for _ in range(count):
        if name == "arithmetic":
            turn = skills.arithmetic(rng, held_out=True)
        else:
            turn = skills.extraction(rng)
        before: tuple[Message, ...] = ()
        if rng.random() < 0.1:
            before = (Message("system", rng.choice(wording.SYSTEM_PROMPTS)),)
        length = count_prompt([*before, Message("user", turn.question)])
        examples.append(Example(name, before, (turn,), length))
    return examples


def _questions() -> list[Example]:
    examples = []
    for entry in faq.load():
        for text in entry.held_out:
            turn = skills.Turn(text, entry.answer)
            length = count_prompt([Message("user", text)])
            examples.append(Example("faq", (), (turn,), length, tags={"entry": entry.question}))
    random.Random(0).shuffle(examples)
    return examples
