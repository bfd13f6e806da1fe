"""A ReAct agent: the model chooses an action, a tool observes, and so on until it finishes.

The loop depends on what the model chooses, so it is Python's. Each step is a function of the
language, which can be compiled.
"""

from __future__ import annotations

import random
from typing import Any

from runner import Result, Runner, describe_notes, make_notes, start

import pd.lang as pl

MAX_STEPS = 5


@pl.function
def choose_action(s: Any, transcript: str, actions: list[str]) -> None:
    s += transcript + "Action: " + pl.select("action", actions)


@pl.function
def look_up(s: Any, notes: str, key: str) -> None:
    """A tool that is itself a program: read the code for a key."""
    s += pl.user(notes + "\nWhat is the code for " + key + "?")
    s += pl.assistant("The code for " + key + " is " + pl.gen("code", stop="."))


@pl.function
def add(s: Any, one: str, other: str) -> None:
    s += pl.user("What is " + one + " + " + other + "?")
    s += pl.assistant(one + " + " + other + " = " + pl.gen("sum"))


def main(runner: Runner) -> Result:
    notes = {key: code[:3] for key, code in make_notes(random.Random(2), 6).items()}
    keys = list(notes)[:2]
    question = f"What is the code for {keys[0]} plus the code for {keys[1]}?"
    transcript, found = f"Question: {question}\n", []
    total = ""
    for step in range(MAX_STEPS):
        # Known facts decide which actions make sense. The model chooses among these.
        actions = [f"LookUp[{key}]" for key in keys[len(found) :]]
        if len(found) == len(keys):
            actions = [f"Finish[{total}]"] if total else [f"Add[{found[0]}, {found[1]}]"]
        action = runner.run(choose_action, transcript=transcript, actions=actions)["action"]
        tool, _, argument = action.rstrip("]").partition("[")
        if tool == "Finish":
            transcript += f"Action: {action}\n"
            break
        if tool == "LookUp":
            described = describe_notes(notes)
            observation = runner.run(look_up, notes=described, key=argument)["code"]
            found.append(observation)
            keys.sort(key=lambda key: key != argument)
        else:
            one, other = argument.split(", ")
            total = observation = runner.run(add, one=one, other=other)["sum"]
        transcript += f"Action {step + 1}: {action}\nObservation {step + 1}: {observation}\n"
    right = sum(int(notes[key]) for key in keys)
    return {"transcript": transcript.splitlines(), "right answer": right}


if __name__ == "__main__":
    start(main)
