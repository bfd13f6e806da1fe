"""The questions of docs/faq.md, and the many ways to ask them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

_ROOT = Path(__file__).parents[2]
FAQ_FILE = _ROOT / "docs" / "faq.md"
PHRASINGS_FILE = Path(__file__).with_name("phrasings.txt")
# Words that mean nothing here: training puts them among the words that do.
_COMMON = tuple(Path(__file__).with_name("common_words.txt").read_text(encoding="utf-8").split())
_SYLLABLES = (
    "ba", "ce", "dor", "el", "fi", "gan", "ho", "in", "ju", "kel", "la", "mor", "ne", "op", "pre",
    "qui", "ra", "sti", "tion", "ur", "ver", "wis", "ex", "ly", "zen", "ing", "con", "sha",
)  # fmt: skip

_PREFIXES = (
    "Please tell me: ", "Hi, ", "Hello! ", "Quick question: ", "I have a question. ", "In pd, ",
    "One more thing: ", "Can you help me? ", "I am new here. ", "Could you explain this: ",
    "So, ", "And ", "Please: ", "Hey, ", "Just wondering: ", "I would like to know: ",
)  # fmt: skip
_SUFFIXES = (
    " Thanks!", " Please answer briefly.", " Thank you.", " Please.", " I am curious.",
    " I could not find it.", " Explain it briefly.",
)  # fmt: skip
# Ways to say the same, applied at random; the first that matches is replaced by one of the others.
_SYNONYMS: tuple[tuple[str, ...], ...] = (
    ("How do I ", "How can I ", "How would I ", "How does one ", "What must I do to ",
     "I want to know how to ", "Please explain how to ", "Is there a way to ", "How to ",
     "What do I need to ", "I need to ", "Can you show me how to "),
    ("What is ", "What's ", "Do you know what is ", "Say what is ", "what is ", "Describe ",
     "Explain ", "Tell me about ", "What are ", "What can you say about "),
    ("What does ", "Say what does ", "Explain what does ", "Do you know what does "),
    ("Why ", "For what reason ", "Explain why ", "Why exactly "),
    ("Which ", "What ", "Say which ", "Tell me which "),
    ("What happens ", "What will happen ", "Say what happens ", "What occurs "),
    (" start ", " launch ", " run ", " bring up ", " start up ", " boot "),
    (" the job of ", " the role of ", " the purpose of ", " the task of ", " the work of "),
    (" prefill node", " prefill server", " prefill process", " prefill worker"),
    (" decode node", " decode server", " decode process", " decode worker"),
    (" a ", " the "), (" the ", " a ", " your ", " this "),
    (" mean", " stand for", " signify"),
    (" show", " print", " display"), (" see ", " look at ", " find ", " get "),
    (" for?", " good for?", " used for?"),
    (" request", " query", " call"), (" memory", " RAM", " space"),
)  # fmt: skip
_LITTLE_MEANING = """
a an the do does is are was be of to in for on it its this that there i you me my one can could
would should will tell please say explain describe show what which how get when
"""
_FUNCTION_WORDS = tuple(_LITTLE_MEANING.split())
# Words that may stand anywhere without changing what is asked.
_FILLERS = (*_FUNCTION_WORDS, "now", "here", "exactly", "actually", "again", "just", "with", "by",
            "or", "and", "not", "if", "at", "any", "your", "we", "they", "has", "have", "make",
            "want", "know", "use", "about", "means", "happen", "way")  # fmt: skip
_TRIES = 60


@dataclass
class Entry:
    """One question of docs/faq.md.

    Attributes:
        trained: phrasings written for training, the question itself first.
        held_out: phrasings for evaluation alone.
    """

    question: str
    answer: str
    trained: list[str]
    held_out: list[str]


def load() -> list[Entry]:
    """Load all entries in the order of the file. Raises ValueError if the two files disagree."""
    phrasings = _sections(PHRASINGS_FILE.read_text(encoding="utf-8"))
    entries = []
    for question, lines in _sections(FAQ_FILE.read_text(encoding="utf-8")).items():
        answer = " ".join(line.strip() for line in lines if line.strip()).replace("`", "")
        if question not in phrasings:
            raise ValueError(f"{PHRASINGS_FILE} lacks phrasings of {question!r}")
        marked = phrasings[question]
        entries.append(
            Entry(
                question,
                answer,
                [question, *(line[2:] for line in marked if line.startswith("+ "))],
                [line[2:] for line in marked if line.startswith("- ")],
            )
        )
    return entries


def _sections(text: str) -> dict[str, list[str]]:
    """Return the lines below each ``###`` heading, up to the next heading of any level."""
    sections: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            current = []
            if line.startswith("### "):
                sections[line[4:].replace("`", "")] = current
        else:
            current.append(line)
    return sections


def normalize(text: str) -> str:
    """Keep only words in lower case, by which we compare phrasings."""
    return " ".join(re.findall(r"[a-z0-9_/-]+", text.lower()))


def variants(entry: Entry, count: int, rng: random.Random) -> list[str]:
    """Make about ``count`` different phrasings to train on. None contains a held-out one."""
    forbidden = [f" {normalize(text)} " for text in entry.held_out]
    found = dict.fromkeys(entry.trained)
    for _ in range(_TRIES * count):
        if len(found) >= count:
            break
        text = _vary(rng.choice(entry.trained), rng) if rng.random() < 0.5 else _mix(entry, rng)
        words = f" {normalize(text)} "
        if not any(each in words for each in forbidden):
            found[text] = None
    return list(found)


def _mix(entry: Entry, rng: random.Random) -> str:
    """Mix the words that matter, in other forms and another order, with words that do not.

    The result is hardly a sentence. It teaches that the words that matter decide, whatever
    surrounds them.
    """
    words = _telling_words(rng.choice(entry.trained))
    if rng.random() < 0.3:
        words += _telling_words(rng.choice(entry.trained))
    words = [_inflect(word, rng) for word in dict.fromkeys(words)]
    if rng.random() < 0.5:
        rng.shuffle(words)
    mixed: list[str] = []
    share = rng.choice((0.2, 0.5, 0.8))
    for word in words:
        while rng.random() < share and len(mixed) < 14:
            mixed.append(rng.choice(_FILLERS) if rng.random() < 0.6 else _noise(rng))
        mixed.append(word)
    while rng.random() < share and len(mixed) < 14:
        mixed.append(rng.choice(_FILLERS) if rng.random() < 0.6 else _noise(rng))
    text = " ".join(mixed) + rng.choice(("?", "?", ".", ""))
    return text[0].upper() + text[1:] if rng.random() < 0.7 else text


def _telling_words(text: str) -> list[str]:
    words = [word.strip("?.,:!") for word in text.split()]
    return [word for word in words if word.lower() not in _FUNCTION_WORDS] or words


def _inflect(word: str, rng: random.Random) -> str:
    """Change the form of a word now and then: flush, flushes, flushed, flushing."""
    if len(word) < 3 or not (word.isalpha() and word.islower()) or rng.random() < 0.6:
        return word
    for ending in ("ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)] + rng.choice(("", "s", "e"))
    stem = word[:-1] if word.endswith("e") else word
    return rng.choice((f"{word}s", f"{stem}es", f"{stem}ed", f"{stem}ing"))


def _vary(text: str, rng: random.Random) -> str:
    for _ in range(rng.choice((0, 1, 1, 2))):
        text = _substitute(text, rng)
    if rng.random() < 0.35:
        text = _drop_words(text, rng.choice((0.2, 0.5, 1.0)), rng)
    if rng.random() < 0.4:
        text = _disturb(text, rng)
    if rng.random() < 0.3:
        text = rng.choice(_PREFIXES) + text[0].lower() + text[1:]
    if rng.random() < 0.15:
        text += rng.choice(_SUFFIXES)
    elif rng.random() < 0.2:
        text = text.rstrip("?.!")
    if rng.random() < 0.15:
        text = text.lower()
    return text


def _noise(rng: random.Random) -> str:
    """Draw a word unrelated to the question, known or made up."""
    if rng.random() < 0.7:
        return _inflect(rng.choice(_COMMON), rng)
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.choice((1, 2, 3))))


def _disturb(text: str, rng: random.Random) -> str:
    """Add or replace one or two words, so that no unknown word decides anything."""
    words = text.split()
    for _ in range(rng.choice((1, 1, 2))):
        place = rng.randrange(len(words))
        replaced = 1 if len(words) > 2 and rng.random() < 0.4 else 0
        words[place : place + replaced] = [_noise(rng)]
    return " ".join(words)


def _substitute(text: str, rng: random.Random) -> str:
    matching = [ways for ways in _SYNONYMS if ways[0] in text]
    if not matching:
        return text
    ways = rng.choice(matching)
    return text.replace(ways[0], rng.choice(ways[1:]), 1)


def _drop_words(text: str, share: float, rng: random.Random) -> str:
    """Leave out some of the words that carry little meaning, as hurried people do."""
    words = text.split()
    kept = [
        w for w in words if w.lower().strip("?.,:!") not in _FUNCTION_WORDS or rng.random() > share
    ]
    return " ".join(kept) if kept else text
