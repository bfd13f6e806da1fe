"""An LLM as judge, by branch, solve and merge: one branch judges each side of an answer."""

from __future__ import annotations

from typing import Any

from runner import Result, Runner, start

import pd.lang as pl

SIDES = ["short", "true", "about the question"]
GRADES = [" bad", " fair", " good"]
ANSWERS = {
    "What is pd?": "pd serves large language models with prefill and decode on separate nodes.",
    "What is 12 + 30?": "12 + 30 = 42",
    "What is the KV cache?": "A cat sat on the mat.",
}


@pl.function
def judge(s: Any, question: str, answer: str) -> None:
    s += "Judge the answer to a question.\nQuestion: " + question + "\nAnswer: " + answer + "\n"
    branches = s.fork(len(SIDES))
    branches += lambda i: "Is the answer " + SIDES[i] + "? That is" + pl.select("grade", GRADES)
    branches.join()
    for number, side in enumerate(SIDES):
        s += f"How {side} it is:" + s["grade"][number] + ".\n"
    s += "All in all, the answer is" + pl.select("verdict", GRADES)


@pl.function
def compare(s: Any, question: str, answer: str) -> None:
    """Judge by likelihood: how well does the answer fit, next to one that does not?"""
    s += pl.user(question) + pl.assistant_begin()
    s += pl.select("better", [answer, "I do not know that."]) + pl.assistant_end()


def main(runner: Runner) -> Result:
    batch = [{"question": question, "answer": answer} for question, answer in ANSWERS.items()]
    judged = runner.run_batch(judge, batch)
    compared = runner.run_batch(compare, batch)
    return {
        "judgements": [
            f"{each['question']} grades {state['grade']}, in all{state['verdict']}"
            for each, state in zip(batch, judged, strict=True)
        ],
        "preferred": [
            f"{each['question']} {s['better']}" for each, s in zip(batch, compared, strict=True)
        ],
    }


if __name__ == "__main__":
    start(main)
