"""Skeleton of thought: expand the points of an answer at the same time, and join them."""

from __future__ import annotations

from typing import Any

from runner import Result, Runner, start

import pd.lang as pl

TOPIC = "What is pd?"
POINTS = ["the prefill node", "the decode node", "the proxy"]


@pl.function
def answer_in_points(s: Any, topic: str) -> None:
    s += pl.system("Answer briefly and truthfully.")
    s += pl.user(topic)
    s += pl.assistant(pl.gen("introduction", 48))
    branches = s.fork(len(POINTS))
    branches += lambda i: pl.user("What does " + POINTS[i] + " do?")
    branches += pl.assistant(pl.gen("expanded", 48))
    branches.join()
    s += pl.user("Tell me more.")
    with s.assistant(), s.var_scope("answer"):
        for number, point in enumerate(POINTS):
            s += f"{number + 1}. {point}: " + s["expanded"][number] + "\n"


def main(runner: Runner) -> Result:
    state = runner.run(answer_in_points, topic=TOPIC)
    return {"introduction": state["introduction"], "points": state["answer"].splitlines()}


if __name__ == "__main__":
    start(main)
