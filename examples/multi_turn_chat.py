"""Chats of several turns that share nothing, with short answers and with long ones."""

from __future__ import annotations

import random
from typing import Any

from runner import Result, Runner, describe_notes, make_notes, start

import pd.lang as pl

CHATS, TURNS = 2, 3


@pl.function
def chat(s: Any, notes: str, questions: list[str], limit: int) -> None:
    s += pl.system("You are a helpful assistant.")
    s += pl.user(notes + "\n" + questions[0])
    s += pl.assistant(pl.gen("answer_0", limit))
    for number in range(1, TURNS):
        s += pl.user(questions[number])
        s += pl.assistant(pl.gen(f"answer_{number}", limit))


def main(runner: Runner) -> Result:
    rng = random.Random(5)
    result: Result = {}
    for length, limit, ending in (("short", 8, " Answer with the code only."), ("long", 64, "")):
        batch, codes = [], []
        for _ in range(CHATS):
            notes = make_notes(rng, 20)
            keys = rng.sample(list(notes), TURNS)
            codes += [notes[key] for key in keys]
            questions = [f"What is the code for {key}?{ending}" for key in keys]
            batch.append({"notes": describe_notes(notes), "questions": questions, "limit": limit})
        states = runner.run_batch(chat, batch)
        answers = [state[f"answer_{number}"] for state in states for number in range(TURNS)]
        right = sum(code in answer for code, answer in zip(codes, answers, strict=True))
        result[f"{length} answers"] = [*answers, f"{right} of {len(codes)} right"]
    return result


if __name__ == "__main__":
    start(main)
