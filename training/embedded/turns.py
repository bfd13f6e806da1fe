"""Thousands of questions with their answers as token ids, by skill."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from embedded import faq, skills, wording
from embedded.composer import EMPTY, Composer, Slot, Slots
from embedded.ragged import Ragged
from embedded.text import SPECIAL_TOKENS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from embedded.ragged import Ints

# Loss weights: of an answer's words, and of what has to be found or computed.
ANSWER, RESULT = 1, 3
# Ways to ask each question of docs/faq.md.
PHRASINGS = 4000
# How many tokens of such a question become others, and how often.
_NOISE_RATES, _NOISE_SHARES = (0.0, 0.1, 0.2), (0.5, 0.3, 0.2)
_PHRASING_SEED = 7
_DIGIT_SHARES = (0.1, 0.25, 0.65)
_SKILL_SHARES = {"arithmetic": 0.35, "extraction": 0.27, "faq": 0.34, "small_talk": 0.04}


class Turns(NamedTuple):
    """Question ``i`` and its answer."""

    questions: Ragged
    answers: Ragged


class TurnMaker:
    """Makes turns of every skill that needs nothing but the question."""

    def __init__(self, tokenizer: Tokenizer, phrasings: int = PHRASINGS) -> None:
        self.composer = Composer(tokenizer)
        # Token ids behind the special ones and those of single bytes.
        self._words = (len(SPECIAL_TOKENS) + 256, tokenizer.get_vocab_size())
        rng = random.Random(_PHRASING_SEED)
        entries = faq.load()
        asked = [faq.variants(entry, phrasings, rng) for entry in entries]
        self._faq_questions = self.composer.encode([text for texts in asked for text in texts])
        self._faq_answers = self.composer.encode([entry.answer for entry in entries], ANSWER)
        self._faq_counts = np.array([len(texts) for texts in asked])
        self._talk = [
            (question, answer)
            for answer, questions in wording.SMALL_TALK.items()
            for question in questions
        ]

    def mixture(self, count: int, rng: np.random.Generator) -> Turns:
        """Mix turns of all skills in random order."""
        shares = np.array(list(_SKILL_SHARES.values()))
        choice = rng.choice(len(shares), count, p=shares)
        questions, answers = [], []
        for number, skill in enumerate(_SKILL_SHARES):
            rows = np.flatnonzero(choice == number)
            if len(rows):
                turns = getattr(self, skill)(len(rows), rng)
                questions.append((rows, turns.questions))
                answers.append((rows, turns.answers))
        return Turns(Ragged.merge(questions), Ragged.merge(answers))

    def faq(self, count: int, rng: np.random.Generator) -> Turns:
        """Ask questions of docs/faq.md in any training phrasing, some with tokens replaced.

        Replaced tokens teach the model to answer from the words that matter.
        """
        entry = rng.integers(0, len(self._faq_counts), count)
        starts = np.cumsum(self._faq_counts) - self._faq_counts
        phrasing = starts[entry] + (rng.random(count) * self._faq_counts[entry]).astype(np.int64)
        questions = self._faq_questions.take(phrasing)
        rate = np.repeat(rng.choice(_NOISE_RATES, count, p=_NOISE_SHARES), questions.lengths)
        noisy = rng.random(len(rate)) < rate
        questions.tokens[noisy] = rng.integers(*self._words, int(noisy.sum()))
        return Turns(questions, self._faq_answers.take(entry))

    def small_talk(self, count: int, rng: np.random.Generator) -> Turns:
        """Make greetings, thanks, and questions that the model cannot answer."""
        choice = rng.integers(0, len(self._talk), count)
        questions, answers = [], []
        for number in np.unique(choice):
            rows = np.flatnonzero(choice == number)
            question, answer = self._talk[number]
            slots = self.composer.random_slots(question, len(rows), rng)
            questions.append((rows, self.composer.render(question, slots, len(rows))))
            answers.append((rows, self.composer.constant(answer, len(rows), ANSWER)))
        return Turns(Ragged.merge(questions), Ragged.merge(answers))

    def arithmetic(self, count: int, rng: np.random.Generator) -> Turns:
        """Make sums and differences, without the pairs reserved for evaluation."""
        bounds = 10 ** (1 + rng.choice(3, (2, count), p=_DIGIT_SHARES))
        a, b = (rng.random((2, count)) * bounds).astype(np.int64)
        while (held := skills.is_held_out(a, b)).any():
            b[held] = rng.integers(0, 1000, int(held.sum()))
        plus = rng.random(count) < 0.5
        templates = (*wording.SUMS, *wording.DIFFERENCES)
        choice = rng.integers(0, len(wording.SUMS), count)
        choice += np.where(plus, 0, len(wording.SUMS))
        slots = {"a": self.composer.integer(a), "b": self.composer.integer(b)}
        result = np.where(plus, a + b, a - b)
        sign = self.composer.pieces([" ", " -"])[(result < 0).astype(np.int64)][:, None]
        operator = self.composer.pieces([" + ", " - "])[1 - plus.astype(np.int64)][:, None]
        digits = self.composer.integer(np.abs(result)).plain
        equals = np.full((count, 1), self.composer.piece(" ="))
        parts = (slots["a"].plain, operator, slots["b"].plain, equals, sign, digits)
        weights = np.full(sum(part.shape[1] for part in parts), ANSWER)
        weights[-digits.shape[1] - 1 :] = RESULT
        return Turns(
            self.composer.mixture(templates, choice, slots),
            self.composer.join(np.hstack(parts), weights),
        )

    def extraction(self, count: int, rng: np.random.Generator) -> Turns:
        """Ask for some fields of a sentence as JSON."""
        shares = np.array([wording.DOMAIN_SHARES[name] for name in wording.DOMAINS], dtype=float)
        domain = rng.choice(len(shares), count, p=shares / shares.sum())
        questions, answers = [], []
        for number, (sentences, fields) in enumerate(wording.DOMAINS.values()):
            rows = np.flatnonzero(domain == number)
            if len(rows):
                turns = self._extraction(sentences, fields, len(rows), rng)
                questions.append((rows, turns.questions))
                answers.append((rows, turns.answers))
        return Turns(Ragged.merge(questions), Ragged.merge(answers))

    def _extraction(
        self,
        sentences: tuple[str, ...],
        fields: tuple[str, ...],
        count: int,
        rng: np.random.Generator,
    ) -> Turns:
        templates = [
            outer.replace("{sentence}", inner)
            for outer in wording.EXTRACTIONS
            for inner in sentences
        ]
        slots: Slots = {}
        for field in fields:
            slots |= self.composer.random_slots(f"{{{field}}}", count, rng)
        # The first ``wanted`` of a random order are asked for; the others are left empty.
        order = np.argsort(rng.random((count, len(fields))), axis=1)
        wanted = rng.integers(2, len(fields) + 1, count)[:, None] > np.arange(len(fields))
        slots["fields"] = self._field_list(fields, order, wanted)
        answer = self._json(fields, slots, order, wanted)
        choice = rng.integers(0, len(templates), count)
        return Turns(
            self.composer.mixture(templates, choice, slots), self.composer.join(answer, ANSWER)
        )

    def _field_list(self, fields: tuple[str, ...], order: Ints, wanted: Ints) -> Slot:
        """Write ``name, age, city``."""
        plain = self.composer.pieces(fields)[order]
        spaced = self.composer.pieces([f" {field}" for field in fields])[order]
        comma = np.full_like(order, self.composer.piece(","))
        comma[:, 0] = EMPTY
        rest = np.where(wanted[:, :, None], np.stack((comma, spaced), axis=2), EMPTY)
        first = rest.copy()
        first[:, 0, 1] = plain[:, 0]
        count = len(order)
        return Slot(first.reshape(count, -1), rest.reshape(count, -1))

    def _json(self, fields: tuple[str, ...], slots: Slots, order: Ints, wanted: Ints) -> Ints:
        """Make pieces of ``{"name": "Anna Berg", "age": 34}``."""
        count, piece = len(order), self.composer.piece
        quote = np.full((count, 1), piece('"'))
        values = []
        for field in fields:
            found = self.composer.columns(f"{{{field}}}", slots, count)
            if field in wording.NUMBERS:
                values.append(np.hstack((np.full((count, 1), piece(" ")), found)))
            else:
                opening = np.full((count, 1), piece(' "'))
                values.append(np.hstack((opening, found, quote)))
        width = max(value.shape[1] for value in values)
        padded = [np.pad(value, ((0, 0), (0, width - value.shape[1]))) for value in values]
        chosen = np.take_along_axis(np.stack(padded, axis=1), order[:, :, None], axis=1)
        opening = np.full_like(order, piece(', "'))
        opening[:, 0] = piece('{"')
        name = self.composer.pieces(fields)[order]
        colon = np.full_like(order, piece('":'))
        members = np.concatenate((np.stack((opening, name, colon), axis=2), chosen), axis=2)
        members = np.where(wanted[:, :, None], members, EMPTY).reshape(count, -1)
        return np.hstack((members, np.full((count, 1), piece("}"))))
