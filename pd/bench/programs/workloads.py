"""Programs in the shapes of SGLang's paper (its figure 5), with seeded synthetic data.

Texts are random words, so a seed gives the same prompts everywhere. Answers have fixed lengths,
because a model that ends earlier would do less work. They are greedy, except where a program asks
the same question several times.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pd.lang as pl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.lang.program import ProgramFunction

_COMMON = (
    "the of and to in is that for it as with on be at by this have from or one had not but what "
    "all were when we there can an your which their said if do will each about how up out them "
    "then she many some so these would other into has more her two like him see time could no make "
    "than first been its who now people my made over did down only way find use may water long "
    "little very after words called just where most know get through back much go good new write "
    "our me man too any day same right look think also around another came come work three must "
    "because does part even place well such here take why help put different away again off went "
    "old number great tell men say small every found still between name should home big give air "
    "line set own under read last never us left end along while might next sound below saw "
    "something thought both few those always show large often together asked house world going "
    "want school important until form food keep children"
)
_WORDS = tuple(_COMMON.split())


@dataclass(frozen=True)
class ProgramWorkload:
    """A program, and the arguments of each of its runs.

    Attributes:
        function: function of the language. Texts that all runs share are bound to it, so its
            beginning can be computed once before them.
        arguments: arguments of each run.
    """

    name: str
    function: ProgramFunction
    arguments: tuple[dict[str, Any], ...]


def make_words(rng: random.Random, count: int) -> str:
    """Make a text of so many words. Common tokenizers make one to two tokens of each."""
    return " ".join(rng.choices(_WORDS, k=count))


def _generate(name: str, tokens: int, **settings: Any) -> Any:
    return pl.gen(name, max_tokens=tokens, ignore_eos=True, **settings)


@pl.function
def answer_question(s: Any, shots: str, question: str) -> None:
    """MMLU: five questions with answers, one more question, and an answer of one token."""
    s += shots + "Question: " + question + "\nAnswer: " + _generate("answer", 1)


def make_few_shot(rng: random.Random, count: int) -> ProgramWorkload:
    def make_question() -> str:
        options = "".join(f"\n{letter}. {make_words(rng, 4)}" for letter in "ABCD")
        return make_words(rng, rng.randint(20, 60)) + options

    shots = "".join(
        f"Question: {make_question()}\nAnswer: {rng.choice('ABCD')}\n" for _ in range(5)
    )
    return ProgramWorkload(
        "few-shot",
        answer_question.bind(shots=shots),
        tuple({"question": make_question()} for _ in range(count)),
    )


@pl.function
def choose_ending(s: Any, shots: str, context: str, endings: list[str]) -> None:
    """HellaSwag: twenty contexts with endings, one more context, and the likeliest of four."""
    s += shots + context + pl.select("ending", endings)


def make_endings(rng: random.Random, count: int) -> ProgramWorkload:
    shots = "".join(make_words(rng, rng.randint(15, 30)) + ".\n" for _ in range(20))
    return ProgramWorkload(
        "endings",
        choose_ending.bind(shots=shots),
        tuple(
            {
                "context": make_words(rng, rng.randint(20, 40)),
                "endings": [f" {make_words(rng, rng.randint(5, 15))}." for _ in range(4)],
            }
            for _ in range(count)
        ),
    )


@pl.function
def follow_agent(s: Any, instructions: str, task: str, observations: list[str]) -> None:
    """ReAct: instructions with examples, then thoughts and actions, each with what a tool says."""
    s += instructions + "Task: " + task + "\n"
    for number, observation in enumerate(observations):
        s += "Thought: " + _generate(f"thought{number}", 24) + "\n"
        s += "Action: " + _generate(f"action{number}", 8) + "\nObservation: " + observation + "\n"
    s += "Answer: " + _generate("answer", 8)


def make_agent(rng: random.Random, count: int) -> ProgramWorkload:
    instructions = make_words(rng, 400) + "\n"
    return ProgramWorkload(
        "agent",
        follow_agent.bind(instructions=instructions),
        tuple(
            {
                "task": make_words(rng, rng.randint(10, 30)),
                "observations": [make_words(rng, rng.randint(30, 80)) for _ in range(4)],
            }
            for _ in range(count)
        ),
    )


@pl.function
def explore_tree(s: Any, shots: str, problem: str) -> None:
    """Tree of thought: three plans, three solutions of each, and a grade for each of these."""
    s += shots + "Problem: " + problem + "\n"
    plans = s.fork(3)
    plans += lambda i: f"Plan {i + 1}: " + _generate("plan", 32, temperature=0.8, seed=i) + "\n"
    for plan in plans.states:
        solutions = plan.fork(3)
        solutions += lambda i: (
            f"Solution {i + 1}: " + _generate("solution", 32, temperature=0.8, seed=i) + "\n"
        )
        solutions += "Grade: " + _generate("grade", 4)
        solutions.join()
    plans.join()


def make_tree(rng: random.Random, count: int) -> ProgramWorkload:
    shots = make_words(rng, 300) + "\n"
    problems = tuple({"problem": make_words(rng, rng.randint(40, 80))} for _ in range(count))
    return ProgramWorkload("tree", explore_tree.bind(shots=shots), problems)


@pl.function
def expand_skeleton(s: Any, instructions: str, question: str) -> None:
    """Skeleton of thought: a short list of points, then each of them expanded in its own branch."""
    s += instructions + "Question: " + question + "\nSkeleton: " + _generate("skeleton", 32) + "\n"
    points = s.fork(5)
    points += lambda i: f"Point {i + 1} in full: " + _generate("point", 24)
    points.join()
    for number, point in enumerate(s["point"]):
        s += f"{number + 1}. " + point + "\n"
    s += "In short: " + _generate("summary", 8)


def make_skeleton(rng: random.Random, count: int) -> ProgramWorkload:
    instructions = make_words(rng, 120) + "\n"
    questions = tuple({"question": make_words(rng, rng.randint(20, 50))} for _ in range(count))
    return ProgramWorkload("skeleton", expand_skeleton.bind(instructions=instructions), questions)


@pl.function
def judge_essay(s: Any, instructions: str, essay: str, sides: list[str]) -> None:
    """Branch, solve, merge: one branch judges each side of an essay, and a verdict of all."""
    s += instructions + "Essay: " + essay + "\n"
    branches = s.fork(len(sides))
    branches += lambda i: "Judge this side: " + sides[i] + "\n" + _generate("judgement", 24)
    branches.join()
    for side, judgement in zip(sides, s["judgement"], strict=True):
        s += side + ": " + judgement + "\n"
    s += "The verdict is" + pl.select("verdict", [" bad", " fair", " good"])


def make_judge(rng: random.Random, count: int) -> ProgramWorkload:
    instructions = make_words(rng, 60) + "\n"
    sides = [make_words(rng, 8) for _ in range(4)]
    return ProgramWorkload(
        "judge",
        judge_essay.bind(instructions=instructions, sides=sides),
        tuple({"essay": make_words(rng, rng.randint(150, 350))} for _ in range(count)),
    )


@pl.function
def sample_answers(s: Any, shots: str, question: str) -> None:
    """Self-consistency: the same question eight times, at a temperature."""
    s += shots + "Question: " + question + "\nAnswer: "
    samples = s.fork(8)
    samples += lambda i: _generate("answer", 32, temperature=0.8, seed=i)
    samples.join()


def make_consistency(rng: random.Random, count: int) -> ProgramWorkload:
    shots = make_words(rng, 250) + "\n"
    questions = tuple({"question": make_words(rng, rng.randint(30, 70))} for _ in range(count))
    return ProgramWorkload("consistency", sample_answers.bind(shots=shots), questions)


_RECORD = r'\{"name": "[a-z]{4,12}", "year": [0-9]{4}, "parts": \["[a-z]{3,8}", "[a-z]{3,8}"\]\}'


@pl.function
def fill_record(s: Any, instructions: str, document: str) -> None:
    """Decoding of JSON: a document, and a record of it in a fixed form."""
    s += instructions + "Document: " + document + "\nRecord: " + pl.gen("record", 64, regex=_RECORD)


def make_json(rng: random.Random, count: int) -> ProgramWorkload:
    instructions = make_words(rng, 150) + "\n"
    documents = tuple({"document": make_words(rng, rng.randint(80, 200))} for _ in range(count))
    return ProgramWorkload("json", fill_record.bind(instructions=instructions), documents)


@pl.function
def chat(s: Any, questions: list[str], tokens: int) -> None:
    """A chat of several turns, which shares nothing with others."""
    for number, question in enumerate(questions):
        s += pl.user(question) + pl.assistant(_generate(f"answer{number}", tokens))


def _make_chats(name: str, tokens: int) -> Callable[[random.Random, int], ProgramWorkload]:
    def make(rng: random.Random, count: int) -> ProgramWorkload:
        chats = ([make_words(rng, rng.randint(60, 120)) for _ in range(4)] for _ in range(count))
        arguments = tuple({"questions": questions} for questions in chats)
        return ProgramWorkload(name, chat.bind(tokens=tokens), arguments)

    return make


_MAKERS: dict[str, Callable[[random.Random, int], ProgramWorkload]] = {
    "few-shot": make_few_shot,
    "endings": make_endings,
    "agent": make_agent,
    "tree": make_tree,
    "skeleton": make_skeleton,
    "judge": make_judge,
    "consistency": make_consistency,
    "json": make_json,
    "chat-short": _make_chats("chat-short", 8),
    "chat-long": _make_chats("chat-long", 96),
}
WORKLOADS: Sequence[str] = tuple(_MAKERS)


def make_workload(name: str, seed: int, count: int) -> ProgramWorkload:
    """Make ``count`` programs of a workload of :data:`WORKLOADS`."""
    return _MAKERS[name](random.Random(f"{name} {seed}"), count)
