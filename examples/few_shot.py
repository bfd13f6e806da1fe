"""Few-shot questions in the shapes of MMLU and HellaSwag: pick one of four options."""

from __future__ import annotations

import random
from typing import Any

from runner import Result, Runner, start

import pd.lang as pl

SHOTS = 4
QUESTIONS = 6
# A text and how it goes on.
FACTS = {
    "What is pd?": "pd serves large language models with prefill and decode on separate nodes.",
    "What is the KV cache?": "The KV cache holds the keys and values of earlier tokens",
    "What does the proxy do?": "The proxy speaks HTTP with clients.",
    "What is a unified node?": "A unified node does prefill and decode in one process.",
}


@pl.function
def answer_question(s: Any, shots: list[dict[str, str]], question: str, options: list[str]) -> None:
    """The shape of MMLU: questions with their answers, and one more question."""
    for shot in shots:
        s += pl.user(shot["question"]) + pl.assistant(shot["answer"])
    s += pl.user(question) + pl.assistant(pl.select("answer", options))


@pl.function
def finish_text(s: Any, context: str, endings: list[str]) -> None:
    """The shape of HellaSwag: which ending is the likeliest?"""
    s += pl.user(context)
    s += pl.assistant_begin() + pl.select("ending", endings) + pl.assistant_end()


def make_sums(rng: random.Random, count: int) -> list[dict[str, Any]]:
    sums = []
    for _ in range(count):
        one, other = rng.randint(10, 99), rng.randint(10, 99)
        wrong = rng.sample([one + other + d for d in (-10, -3, 1, 7, 10)], 3)
        options = [f"{one} + {other} = {total}" for total in (one + other, *wrong)]
        question = {"question": f"What is {one} + {other}?", "answer": options[0]}
        sums.append(question | {"options": rng.sample(options, 4)})
    return sums


def main(runner: Runner) -> Result:
    sums = make_sums(random.Random(1), SHOTS + QUESTIONS)
    # All questions share the shots, so these are bound: a compiled program may then count them.
    mmlu = answer_question.bind(shots=sums[:SHOTS])
    asked = sums[SHOTS:]
    batch = [{"question": each["question"], "options": each["options"]} for each in asked]
    answers = [state["answer"] for state in runner.run_batch(mmlu, batch)]
    right = sum(answer == each["answer"] for answer, each in zip(answers, asked, strict=True))
    contexts = [{"context": each, "endings": list(FACTS.values())} for each in FACTS]
    endings = [state["ending"] for state in runner.run_batch(finish_text, contexts)]
    return {
        "MMLU": [*answers, f"{right} of {QUESTIONS} right"],
        "HellaSwag": [
            *(f"{context} {ending}" for context, ending in zip(FACTS, endings, strict=True)),
            f"{sum(a == b for a, b in zip(endings, FACTS.values(), strict=True))} of 4 right",
        ],
    }


if __name__ == "__main__":
    start(main)
