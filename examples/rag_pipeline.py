"""Retrieval-augmented generation: find the passages for a question, and answer from them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from runner import Result, Runner, make_notes, start

import pd.lang as pl

PASSAGES, LINES, QUESTIONS, TOP = 12, 6, 4, 2


@pl.function
def answer_from(s: Any, passages: list[str], question: str) -> None:
    s += pl.user("Read these lines:\n" + passages[0] + "\n" + passages[1] + "\n" + question)
    s += pl.assistant(pl.gen("answer", 24))


def retrieve(question: str, passages: list[str]) -> list[str]:
    """Return the passages with the rarest words of the question."""
    words = [set(passage.split()) for passage in passages]
    counts = Counter(word for each in words for word in each)

    def score(number: int) -> float:
        shared = words[number] & set(question.rstrip("?").split())
        return sum(1 / counts[word] for word in shared)

    ranked = sorted(range(len(passages)), key=lambda number: -score(number))
    return [passages[number] for number in ranked[:TOP]]


def main(runner: Runner) -> Result:
    rng = random.Random(6)
    notes = make_notes(rng, PASSAGES * LINES)
    lines = [f"the code for {key} is {code}" for key, code in notes.items()]
    passages = ["\n".join(lines[i : i + LINES]) for i in range(0, len(lines), LINES)]
    keys = rng.sample(list(notes), QUESTIONS)
    questions = [f"What is the code for {key}?" for key in keys]
    batch = [{"passages": retrieve(each, passages), "question": each} for each in questions]
    answers = [state["answer"] for state in runner.run_batch(answer_from, batch)]
    right = sum(notes[key] in answer for key, answer in zip(keys, answers, strict=True))
    pairs = zip(questions, answers, strict=True)
    return {"answers": [f"{q} {a}" for q, a in pairs], "right": f"{right} of {QUESTIONS}"}


if __name__ == "__main__":
    start(main)
