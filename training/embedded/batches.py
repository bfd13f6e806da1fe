"""Training batches: conversations of one length, generated without a loop over tokens or lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from embedded import skills, wording
from embedded.ragged import Ragged, rank_within, to_rows
from embedded.text import END_OF_TEXT, TURN_END, TURN_START
from embedded.turns import ANSWER, PHRASINGS, RESULT, TurnMaker, Turns

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from embedded.composer import Slots
    from embedded.ragged import Ints

_USER, _SYSTEM = f"{TURN_START}user", f"{TURN_START}system"
_CLOSE = f"{TURN_END}\n"
_ASK = f"{TURN_END}\n{TURN_START}assistant\n"
# Where the lines stand: in the first question, in the system's message, in a message of their own.
_ASKED_AT_ONCE, _IN_SYSTEM, _ACKNOWLEDGED = range(3)
_LAYOUT_SHARES = (0.6, 0.25, 0.15)
_DENSITIES = (0.02, 0.1, 0.3, 0.6, 1.0)
_DENSITY_SHARES = (0.1, 0.1, 0.2, 0.25, 0.35)
# Tokens that a line has at least, and that a question with its answer has on average.
_MIN_LINE, _MEAN_TURN = 10, 30
_OTHER_SKILLS = 0.1


@dataclass
class _Rows:
    """Properties that all lines and questions of a conversation share, by row.

    Attributes:
        needles: first template of its needles; a mixture of all where it is -1.
    """

    count: int
    budget: Ints
    density: Ints
    layout: Ints
    noun: Ints
    shape: Ints
    width: Ints
    needles: Ints


@dataclass
class _Lines:
    """Lines of all rows in order; ``needle`` marks lines with a value."""

    row: Ints
    text: Ragged
    needle: Ints
    keys: Ints
    values: Ints


class BatchMaker:
    """Makes batches; the same seed and step give the same batch in any process."""

    def __init__(self, tokenizer: Tokenizer, phrasings: int = PHRASINGS) -> None:
        self.turns = TurnMaker(tokenizer, phrasings)
        self.composer = self.turns.composer
        self._pad = tokenizer.token_to_id(END_OF_TEXT)

    def make(
        self, seed: int, step: int, rows: int, length: int, recall: float
    ) -> tuple[Ints, Ints]:
        """One batch.

        Args:
            recall: share of rows that begin with lines to be recalled; the others mix the rest.

        Returns:
            tokens int16 and loss weights uint8 of predicting each of them, ``[rows, length]``.
        """
        rng = np.random.default_rng((seed, step))
        first = round(rows * recall)
        parts = []
        if first:
            parts.append(self._recall_rows(first, length, rng))
        if rows - first:
            parts.append(self._skill_rows(rows - first, length, rng))
        tokens, weights = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return tokens, weights

    def _skill_rows(self, rows: int, length: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Make conversations about everything except lines to be recalled."""
        per_row = length // 20 + 1
        turns = self._wrap(self.turns.mixture(rows * per_row, rng))
        row = np.repeat(np.arange(rows), per_row)
        head = self._system_prompts(rng.random(rows) < 0.2, rng)
        text = Ragged.merge([(np.arange(rows) * 2, head), (row * 2 + 1, turns)])
        order = np.sort(np.concatenate((np.arange(rows), row)), kind="stable")
        return to_rows(text, order, rows, length, self._pad)

    def _recall_rows(self, rows: int, length: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Make lines, then questions about them until the row is full."""
        common = self._common(rows, length, rng)
        lines = self._lines(common, rng)
        used = np.bincount(lines.row, lines.text.lengths, rows)
        count = np.maximum(1, np.ceil((length - used) / _MEAN_TURN)).astype(np.int64)
        row = np.repeat(np.arange(rows), count)
        turns = self._questions(common, lines, row, rng)
        plain = (common.layout[row] == _ASKED_AT_ONCE) & (rank_within(row) == 0)
        openings = self.composer.pieces([f"{_USER}\n", "\n\n"])[plain.astype(np.int64)]
        text = self._wrap(turns, self.composer.join(openings[:, None]))
        number = np.arange(rows)
        merged = Ragged.merge(
            [
                (number * 4, self._heads(common, rng)),
                (lines.row * 4 + 1, lines.text),
                (number * 4 + 2, self._after_lines(common)),
                (row * 4 + 3, text),
            ]
        )
        order = np.sort(np.concatenate((number, lines.row, number, row)), kind="stable")
        return to_rows(merged, order, rows, length, self._pad)

    def _common(self, rows: int, length: int, rng: np.random.Generator) -> _Rows:
        return _Rows(
            rows,
            (length * rng.uniform(0.15, 0.93, rows)).astype(np.int64),
            rng.choice(_DENSITIES, rows, p=_DENSITY_SHARES),
            rng.choice(3, rows, p=_LAYOUT_SHARES),
            rng.choice(len(wording.NOUNS), rows, p=wording.NOUN_SHARES),
            rng.choice(len(skills.KEY_SHAPES), rows, p=skills.KEY_SHARES),
            rng.choice(skills.VALUE_LENGTHS, rows, p=skills.VALUE_SHARES),
            np.where(rng.random(rows) < 0.5, rng.integers(0, len(wording.NEEDLES), rows), -1),
        )

    def _lines(self, common: _Rows, rng: np.random.Generator) -> _Lines:
        """Make more lines than fit. Each row keeps as many as its budget allows."""
        count = common.budget // _MIN_LINE + 1
        row = np.repeat(np.arange(common.count), count)
        needle = rng.random(len(row)) < common.density[row]
        # At least one, among those that certainly fit.
        sure = (rng.random(common.count) * np.maximum(1, common.budget // 20)).astype(np.int64)
        needle[np.cumsum(count) - count + sure] = True
        keys = self._keys(common.shape[row], rng)
        values = self._values(common.width[row], rng)
        text = self._line_texts(common, row, needle, keys, values, rng)
        total = np.cumsum(text.lengths)
        starts = np.searchsorted(row, np.arange(common.count))
        before = np.concatenate(([0], total))[starts]
        kept = total - before[row] <= common.budget[row]
        kept[starts] = True
        kept[needle] &= _first_of_each(row[needle], keys[needle])
        index = np.flatnonzero(kept)
        lines = _Lines(row[index], text.take(index), needle[index], keys[index], values[index])
        return lines

    def _keys(self, shape: Ints, rng: np.random.Generator) -> Ints:
        """Make pieces ``[n, 4]`` of random keys of the given shapes."""
        keys = np.zeros((len(shape), 4), np.int64)
        for number, pattern in enumerate(skills.KEY_SHAPES):
            rows = np.flatnonzero(shape == number)
            for column, kind in enumerate(pattern):
                choices = self.composer.letters if kind == "A" else self.composer.digits
                keys[rows, column] = choices[rng.integers(0, len(choices), len(rows))]
        return keys

    def _values(self, width: Ints, rng: np.random.Generator) -> Ints:
        """Make pieces ``[n, widest]`` of random numbers of the given widths, not starting with
        0."""
        widest = max(skills.VALUE_LENGTHS)
        digits = self.composer.digits[rng.integers(0, 10, (len(width), widest))]
        digits[:, 0] = self.composer.digits[rng.integers(1, 10, len(width))]
        return np.where(np.arange(widest) < width[:, None], digits, 0)

    def _line_texts(
        self,
        common: _Rows,
        row: Ints,
        needle: Ints,
        keys: Ints,
        values: Ints,
        rng: np.random.Generator,
    ) -> Ragged:
        """Return every line with the line break before it."""
        templates = (*wording.NEEDLES, *wording.FILLERS)
        choice = rng.integers(0, len(wording.NEEDLES), len(row))
        choice = np.where(common.needles[row] >= 0, common.needles[row], choice)
        fillers = len(wording.NEEDLES) + rng.integers(0, len(wording.FILLERS), len(row))
        choice = np.where(needle, choice, fillers)
        slots = self._slots(common.noun[row], keys, values)
        for template in wording.FILLERS:
            slots |= self.composer.random_slots(template, len(row), rng)
        lines = self.composer.mixture(templates, choice, slots)
        return Ragged.zip([self.composer.constant("\n", len(row)), lines])

    def _slots(self, noun: Ints, keys: Ints, values: Ints) -> Slots:
        from embedded.composer import Slot

        return {
            "noun": self.composer.word_slot("noun", noun),
            "key": Slot(keys, keys),
            "value": Slot(values, values),
        }

    def _questions(
        self, common: _Rows, lines: _Lines, row: Ints, rng: np.random.Generator
    ) -> Turns:
        """Ask about a random needle of each row, or now and then use another skill."""
        needles = np.flatnonzero(lines.needle)
        counts = np.bincount(lines.row[needles], minlength=common.count)
        first = np.cumsum(counts) - counts
        chosen = needles[first[row] + (rng.random(len(row)) * counts[row]).astype(np.int64)]
        turns = self._recall(common.noun[row], lines.keys[chosen], lines.values[chosen], row, rng)
        other = np.flatnonzero((rng.random(len(row)) < _OTHER_SKILLS) & (rank_within(row) > 0))
        if not len(other):
            return turns
        mixed = self.turns.mixture(len(other), rng)
        rest = np.setdiff1d(np.arange(len(row)), other)
        return Turns(
            Ragged.merge([(rest, turns.questions.take(rest)), (other, mixed.questions)]),
            Ragged.merge([(rest, turns.answers.take(rest)), (other, mixed.answers)]),
        )

    def _recall(
        self, noun: Ints, keys: Ints, values: Ints, row: Ints, rng: np.random.Generator
    ) -> Turns:
        slots = self._slots(noun, keys, values)
        groups = (wording.RECALL_QUESTIONS, wording.FOLLOW_UPS, wording.SHORT_QUESTIONS)
        is_first = rank_within(row) == 0
        kind = np.where(
            is_first,
            rng.choice(3, len(row), p=(0.8, 0.0, 0.2)),
            rng.choice(3, len(row), p=(0.45, 0.35, 0.2)),
        )
        sizes = np.array([len(group) for group in groups])
        choice = (rng.random(len(row)) * sizes[kind]).astype(np.int64)
        choice += (np.cumsum(sizes) - sizes)[kind]
        templates = [template for group in groups for template in group]
        answers = (wording.RECALL_ANSWER, wording.SHORT_ANSWER)
        # The answer's value counts more than its other words, the key among them.
        sentence, value = answers[0].split("{value}")[0], "{value}"
        is_short = (kind == 2).astype(np.int64)
        end = self.composer.mixture(
            (f"{value}.", value), is_short, slots, weight=ANSWER, strong=RESULT
        )
        start = self.composer.mixture((sentence, ""), is_short, slots, weight=ANSWER)
        return Turns(self.composer.mixture(templates, choice, slots), Ragged.zip([start, end]))

    def _wrap(self, turns: Turns, openings: Ragged | None = None) -> Ragged:
        """Put the chat template's text around questions and answers."""
        count = len(turns.questions)
        return Ragged.zip(
            [
                openings or self.composer.constant(f"{_USER}\n", count),
                turns.questions,
                self.composer.constant(_ASK, count),
                turns.answers,
                self.composer.constant(TURN_END, count, ANSWER),
                self.composer.constant("\n", count),
            ]
        )

    def _heads(self, common: _Rows, rng: np.random.Generator) -> Ragged:
        """Make the text before the lines."""
        in_system = common.layout == _IN_SYSTEM
        prompts = self._system_prompts(~in_system & (rng.random(common.count) < 0.2), rng)
        # Every line begins with a line break, so the last one here is left out.
        users = [f"{_USER}\n{text}"[:-1] for text in wording.INTRODUCTIONS]
        options = self.composer.pieces([*users, _SYSTEM])
        choice = rng.integers(0, len(users), common.count)
        choice[in_system] = len(users)
        return Ragged.zip([prompts, self.composer.join(options[choice][:, None])])

    def _system_prompts(self, wanted: Ints, rng: np.random.Generator) -> Ragged:
        options = [f"{_SYSTEM}\n{text}{_CLOSE}" for text in wording.SYSTEM_PROMPTS]
        choice = self.composer.pieces(options)[rng.integers(0, len(options), len(wanted))]
        return self.composer.join(np.where(wanted, choice, 0)[:, None])

    def _after_lines(self, common: _Rows) -> Ragged:
        closing = self.composer.pieces(["", _CLOSE, _ASK])[common.layout][:, None]
        said = self.composer.pieces(["", "", wording.ACKNOWLEDGEMENT])[common.layout][:, None]
        end = self.composer.pieces(["", "", TURN_END])[common.layout][:, None]
        after = self.composer.pieces(["", "", "\n"])[common.layout][:, None]
        weights = np.array([0, ANSWER, ANSWER, 0])
        return self.composer.join(np.hstack((closing, said, end, after)), weights)


def _first_of_each(row: Ints, keys: Ints) -> Ints:
    """Return whether a line's key is new in its row."""
    coded = np.column_stack((row, keys))
    _, first = np.unique(coded, axis=0, return_index=True)
    found = np.zeros(len(row), bool)
    found[first] = True
    return found
