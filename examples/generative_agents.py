"""Generative agents: people who remember, rate what happens and answer each other, in batches."""

from __future__ import annotations

import random
from typing import Any

from runner import CITIES, JOBS, PEOPLE, Result, Runner, start

import pd.lang as pl

RATINGS = [" not important", " important"]


@pl.function
def describe(s: Any, memory: str) -> None:
    """Return an agent's knowledge about a person, from a remembered sentence."""
    s += pl.user("Extract name, city, job as JSON: " + memory)
    s += pl.assistant('{"name": "' + pl.gen("name", stop='"') + '", "city": "' + _rest())


def _rest() -> Any:
    return pl.gen("city", stop='"') + '", "job": "' + pl.gen("job", stop='"') + '"}'


@pl.function
def rate(s: Any, agent: str, event: str) -> None:
    s += (
        "How important is it to " + agent + " that " + event + "? It is" + pl.select("how", RATINGS)
    )


@pl.function
def plan_day(s: Any, agent: str, wake: str, hours: str) -> None:
    s += pl.user("What is " + wake + " + " + hours + "?")
    s += pl.assistant(wake + " + " + hours + " = " + pl.gen("home", dtype=int, max_tokens=4))


def main(runner: Runner) -> Result:
    rng = random.Random(3)
    names = list(PEOPLE[:4])
    jobs, cities = rng.sample(JOBS, 4), rng.sample(CITIES, 4)
    memories = [
        f"{name} is a {job} from {city} and is {rng.randint(20, 80)} years old."
        for name, job, city in zip(names, jobs, cities, strict=True)
    ]
    known = runner.run_batch(describe, [{"memory": memory} for memory in memories])
    events = [f"{names[i - 1]} moved to {cities[i]}" for i in range(4)]
    rated = runner.run_batch(
        rate, [{"agent": a, "event": e} for a, e in zip(names, events, strict=True)]
    )
    days = [
        {"agent": name, "wake": str(6 + i), "hours": str(9 + i)} for i, name in enumerate(names)
    ]
    planned = runner.run_batch(plan_day, days)
    return {
        "memories": [f"{s['name']}, {s['job']}, lives in {s['city']}" for s in known],
        "events": [f"{e} to {a}:{s['how']}" for a, e, s in zip(names, events, rated, strict=True)],
        "days": [
            f"{day['agent']} gets up at {day['wake']} and is home at {state['home']}"
            for day, state in zip(days, planned, strict=True)
        ],
    }


if __name__ == "__main__":
    start(main)
