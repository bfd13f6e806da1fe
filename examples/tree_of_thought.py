"""Tree of thought: propose several next steps, judge each, and go on from the best."""

from __future__ import annotations

from collections import Counter
from typing import Any

from runner import Result, Runner, start

import pd.lang as pl

BRANCHES = 4
NUMBERS = [13, 27, 45, 8]


@pl.function
def expand(s: Any, total: str, number: str) -> None:
    """Propose several sums, and have each judged by a calculation back."""
    s += pl.user("What is " + total + " + " + number + "?")
    s += pl.assistant_begin() + total + " + " + number + " = "
    branches = s.fork(BRANCHES)
    branches += lambda i: pl.gen("thought", dtype=int, max_tokens=6, temperature=0.9 * i, seed=i)
    branches += pl.assistant_end()
    for branch in branches.states:
        branch += pl.user("What is " + branch["thought"] + " - " + number + "?")
        branch += pl.assistant(
            branch["thought"] + " - " + number + " = " + pl.gen("back", dtype=int, max_tokens=6)
        )
    branches.join()


def main(runner: Runner) -> Result:
    total, levels = str(NUMBERS[0]), []
    for number in map(str, NUMBERS[1:]):
        state = runner.run(expand, total=total, number=number)
        # A thought gets a vote from each branch that has it and finds the way back from it.
        thoughts = list(zip(state["thought"], state["back"], strict=True))
        votes = Counter(thought for thought, back in thoughts if back == total)
        levels.append(f"{total} + {number}: thoughts {state['thought']}, votes {dict(votes)}")
        total = votes.most_common(1)[0][0] if votes else thoughts[0][0]
    return {"levels": levels, "answer": total, "right answer": sum(NUMBERS)}


if __name__ == "__main__":
    start(main)
