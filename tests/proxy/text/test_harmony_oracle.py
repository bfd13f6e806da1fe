"""Our parser of gpt-oss's answers finds the messages that OpenAI's own package finds.

The package has an environment of its own (``sh scripts/peer_environment.sh harmony .peers``).
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pd.proxy.text.tools.events import Arguments, CallStart, Content, Reasoning
from pd.proxy.text.tools.harmony import HarmonyParser
from pd.proxy.text.tools.reader import CallOptions

ORACLE = Path(__file__).parents[1] / "oracles" / "harmony_messages.py"
CONVERSATIONS = 40
START = "<|start|>assistant"
_TAG = re.compile(r"<\|[a-z]+\|>")
_WORDS = [
    "I",
    "look",
    "it",
    "up.",
    "Zürich",
    "漢字",
    "😀",
    "\n",
    "<b>",
    "<|",
    "|>",
    "{",
    '"',
    " to=f",
]
_WORDS += ["assistant", "final", "functions.", "```", "<", "a" * 30]
_OTHERS = ("python", "browser.search", "assistant")


class Answer(NamedTuple):
    """What is in an answer, without its order across kinds."""

    reasoning: list[str]
    content: list[str]
    calls: list[tuple[str, str]]


def random_text(rng: random.Random) -> str:
    return "a" + " ".join(rng.choices(_WORDS, k=rng.randrange(12)))


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 2 else 4)
    if kind == 4:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 5:
        return {f"k{n}": random_value(rng, depth + 1) for n in range(rng.randrange(3))}
    return rng.choice([random_text(rng), rng.randrange(-9, 999), None, 0.5, True])


def random_message(rng: random.Random) -> str:
    """Make a message after ``<|start|>assistant`` with its end."""
    kind = rng.randrange(7)
    if kind == 0:
        return f"<|channel|>final<|message|>{random_text(rng)}<|end|>"
    if kind == 1:
        return f"<|channel|>commentary<|message|>{random_text(rng)}<|end|>"
    if kind in (2, 3):
        return f"<|channel|>analysis<|message|>{random_text(rng)}<|end|>"
    if kind == 4:
        channel, other = rng.choice(["analysis", "commentary"]), rng.choice(_OTHERS)
        return f"<|channel|>{channel} to={other} code<|message|>{random_text(rng)}<|end|>"
    name = rng.choice(["functions.get_weather", "functions.f.g-h", "get_time", "functions.f2"])
    form = rng.choice([" <|constrain|>json", "<|constrain|>json", " json", " code", ""])
    channel = rng.choice(["commentary", "commentary", "analysis"])
    header = rng.choice(
        [f"<|channel|>{channel} to={name}{form}", f" to={name}<|channel|>{channel}{form}"]
    )
    value = {f"k{n}": random_value(rng) for n in range(rng.randrange(4))}
    arguments = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
    return f"{header}<|message|>{arguments}<|call|>"


def cut_everywhere(text: str) -> list[str]:
    """Cut a text after each of its characters, but not inside tags, because these are tokens."""
    inside = {at for tag in _TAG.finditer(text) for at in range(tag.start() + 1, tag.end())}
    return [text[:end] for end in range(1, len(text) + 1) if end not in inside]


def ask_oracle(python: str, texts: list[str]) -> list[list[list[Any]]]:
    ended = subprocess.run(
        [python, str(ORACLE)], input=json.dumps(texts), capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return list(json.loads(ended.stdout))


def is_function(recipient: str | None) -> bool:
    # The package takes the type of a text without a recipient as the recipient.
    return recipient is not None and recipient not in _OTHERS and not recipient.startswith("<|")


def sort_messages(messages: list[list[Any]]) -> Answer:
    answer = Answer([], [], [])
    for channel, recipient, text in messages:
        if is_function(recipient):
            answer.calls.append((recipient.removeprefix("functions."), text))
        elif text:
            (answer.reasoning if channel == "analysis" else answer.content).append(text)
    return answer


def parse(text: str, size: int) -> tuple[str, str, list[tuple[str, str]]]:
    """Parse a text in pieces. Return its reasoning, its content and its calls."""
    parser = HarmonyParser(CallOptions({}))
    events = [e for at in range(0, len(text), size) for e in parser.add_text(text[at : at + size])]
    reasoning, content, calls = "", "", list[tuple[str, str]]()
    for event in events + parser.close():
        if isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallStart):
            calls.append((event.name, ""))
        elif isinstance(event, Arguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return reasoning, content, calls


@pytest.fixture
def python() -> str:
    python = os.environ.get("PD_TEST_HARMONY", "")
    if not python:
        pytest.skip("PD_TEST_HARMONY names no interpreter")
    return python


@pytest.mark.full
def test_random_answers_have_the_oracles_messages(python: str, seed: int) -> None:
    rng = random.Random(seed)
    answers = [
        START.join(random_message(rng) for _ in range(rng.randrange(1, 6)))
        for _ in range(CONVERSATIONS)
    ]
    # So little may also be a text.
    texts = [
        text for answer in answers for text in cut_everywhere(answer) if not " to=".startswith(text)
    ]
    for text, messages in zip(texts, ask_oracle(python, texts), strict=True):
        expected = sort_messages(messages)
        begun = ""
        if messages and is_function(messages[-1][1]) and not messages[-1][2]:
            # Nothing of the last call's arguments came, so its header is content.
            expected.calls.pop()
            begun = text[text.rindex("<|start|>") if "<|start|>" in text else 0 :]
        reasoning, content = "\n".join(expected.reasoning), "\n".join(expected.content)
        found = parse(text, rng.randrange(1, 9))
        assert found == (reasoning, content + begun, expected.calls), text


@pytest.mark.full
@pytest.mark.parametrize(
    "text",
    [
        "<|message|>Hi.<|return|>",
        f"<|message|>Hi.<|end|>{START}<|message|>You.",
        "<|channel|>final<|message|>a<|channel|>final<|message|>b<|end|>",
        f"<|channel|>final <|constrain|>json<|message|>{{}}<|return|>{START}<|channel|>final",
        f"<|channel|>analysis<|message|><|end|>{START}<|channel|>analysis<|message|>a<|end|>",
    ],
)
def test_unusual_answers_have_the_oracles_messages(python: str, text: str) -> None:
    (messages,) = ask_oracle(python, [text])
    answer = sort_messages(messages)
    assert parse(text, 1) == ("\n".join(answer.reasoning), "\n".join(answer.content), answer.calls)
