"""JSON from sentences, once by a regular expression and once by a schema."""

from __future__ import annotations

import json
import random
from typing import Any

from pydantic import BaseModel
from runner import CITIES, JOBS, PEOPLE, Result, Runner, start

import pd.lang as pl

SENTENCES = 5
PATTERN = r'\{"name": "[A-Z][a-z]+ [A-Z][a-z]+", "age": [1-9][0-9], "city": "[A-Z][a-z]+"\}'


class Person(BaseModel):
    name: str
    age: int
    city: str


@pl.function
def by_pattern(s: Any, sentence: str) -> None:
    s += pl.user("Extract name, age, city as JSON: " + sentence)
    s += pl.assistant(pl.gen("json", regex=PATTERN, max_tokens=64))


@pl.function
def by_schema(s: Any, sentence: str) -> None:
    s += pl.user("Extract name, age, city as JSON: " + sentence)
    s += pl.assistant(pl.gen("json", json_schema=Person, max_tokens=64))


def main(runner: Runner) -> Result:
    rng = random.Random(4)
    people = [
        {"name": rng.choice(PEOPLE), "age": rng.randint(18, 89), "city": rng.choice(CITIES)}
        for _ in range(SENTENCES)
    ]
    batch = [
        {"sentence": f"Our new {job} is {p['name']} from {p['city']}, aged {p['age']}."}
        for p, job in zip(people, JOBS, strict=False)
    ]
    result: Result = {"sentences": [each["sentence"] for each in batch]}
    for function in (by_pattern, by_schema):
        found = [json.loads(state["json"]) for state in runner.run_batch(function, batch)]
        right = sum(one == other for one, other in zip(found, people, strict=True))
        result[function.__name__] = [*map(str, found), f"{right} of {SENTENCES} right"]
    return result


if __name__ == "__main__":
    start(main)
