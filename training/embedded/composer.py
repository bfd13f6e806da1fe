"""Fill templates as token ids, for thousands of texts at once. (skills.py fills one as text.)

A text is a row of *pieces*: fixed texts of a template, words, letters and digits, each tokenized
once. This gives the tokens of the whole text, because pieces end where the tokenizer's words end; a
space before a word belongs to the word. tests/assets compares the two ways.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from embedded import skills, wording
from embedded.ragged import TOKEN, WEIGHT, Ragged, ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

    from embedded.ragged import Ints

_SLOT = re.compile(r"\{(\w+)\}")
# Slots that are made of words, so that a space before them joins their first word.
_WORD_SLOTS = frozenset(wording.WORDS) | {"fields"}
EMPTY = 0


class Slot(NamedTuple):
    """Values of one slot: pieces ``[n, width]``, padded with EMPTY.

    Attributes:
        plain: as they are.
        spaced: with a space before the first word.
    """

    plain: Ints
    spaced: Ints

    def rows(self, index: Ints) -> Slot:
        return Slot(self.plain[index], self.spaced[index])


Slots = dict[str, Slot]


class _Part(NamedTuple):
    """A fixed piece, or a slot by name."""

    piece: int = EMPTY
    slot: str = ""
    spaced: bool = False


class Composer:
    """Pieces of one tokenizer, and texts made of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, int] = {"": EMPTY}
        self._tokens: list[list[int]] = [[]]
        self._frozen: tuple[Ints, Ints, Ints] | None = None
        self._parts: dict[str, list[_Part]] = {}
        self.digits = self.pieces("0123456789")
        self.letters = self.pieces(skills.LETTERS)
        self._words = {
            name: (self.pieces(words), self.pieces([f" {word}" for word in words]))
            for name, words in wording.WORDS.items()
        }

    def piece(self, text: str) -> int:
        """Return the number of a piece, and make the piece if necessary."""
        if text not in self._ids:
            self._ids[text] = len(self._tokens)
            self._tokens.append(self._tokenizer.encode(text, add_special_tokens=False).ids)
            self._frozen = None
        return self._ids[text]

    def pieces(self, texts: Sequence[str]) -> Ints:
        return np.array([self.piece(text) for text in texts])

    def encode(self, texts: list[str], weight: int = 0) -> Ragged:
        """Tokenize whole texts one by one."""
        ids = [e.ids for e in self._tokenizer.encode_batch(texts, add_special_tokens=False)]
        lengths = np.array([len(each) for each in ids])
        tokens = np.concatenate([np.array(each, TOKEN) for each in ids])
        return Ragged(tokens, np.full(len(tokens), weight, WEIGHT), lengths)

    def join(self, matrix: Ints, weights: Ints | int = 0) -> Ragged:
        """Join pieces ``[n, width]`` to one sequence per row, with weights by column, or one for
        all."""
        pool, offsets, lengths = self._arrays()
        each = lengths[matrix]
        flat = each.ravel()
        tokens = pool[ranges(offsets[matrix].ravel(), flat)]
        by_piece = np.broadcast_to(np.asarray(weights, WEIGHT), matrix.shape).ravel()
        return Ragged(tokens, np.repeat(by_piece, flat), each.sum(axis=1))

    def constant(self, text: str, count: int, weight: int = 0) -> Ragged:
        """Repeat the same text ``count`` times."""
        return self.join(np.full((count, 1), self.piece(text)), weight)

    def render(
        self, template: str, slots: Slots, count: int, weight: int = 0, strong: int = 0
    ) -> Ragged:
        """Render a template ``count`` times.

        Args:
            strong: weight of its slots, instead of ``weight``.
        """
        columns, weights = [], []
        for part in self._compile(template):
            if part.slot:
                slot = slots[part.slot]
                columns.append(slot.spaced if part.spaced else slot.plain)
            else:
                columns.append(np.full((count, 1), part.piece))
            chosen = strong if part.slot and strong else weight
            weights += [chosen] * columns[-1].shape[1]
        return self.join(np.hstack(columns), np.array(weights))

    def mixture(
        self,
        templates: Sequence[str],
        choice: Ints,
        slots: Slots,
        weight: int = 0,
        strong: int = 0,
    ) -> Ragged:
        """Render template ``choice[i]`` with row ``i`` of the slots as row ``i``."""
        parts = []
        for number in np.unique(choice):
            rows = np.flatnonzero(choice == number)
            template = templates[number]
            used = {p.slot for p in self._compile(template) if p.slot}
            chosen = {name: slots[name].rows(rows) for name in used}
            parts.append((rows, self.render(template, chosen, len(rows), weight, strong)))
        return Ragged.merge(parts)

    def integer(self, values: Ints) -> Slot:
        """Write decimal digits without leading zeros. The caller handles negative numbers."""
        width = len(str(int(values.max(initial=0))))
        powers = 10 ** np.arange(width - 1, -1, -1)
        digits = self.digits[values[:, None] // powers % 10]
        digits[:, :-1][values[:, None] < powers[:-1]] = EMPTY
        return Slot(digits, digits)

    def random_slots(self, template: str, count: int, rng: np.random.Generator) -> Slots:
        """Draw values for every slot defined by wording.py or skills.py."""
        slots: Slots = {}
        for part in self._compile(template):
            if part.slot and part.slot not in slots:
                slots[part.slot] = self.random_slot(part.slot, count, rng)
        return slots

    def random_slot(self, name: str, count: int, rng: np.random.Generator) -> Slot:
        if name in self._words:
            plain, spaced = self._words[name]
            index = rng.integers(0, len(plain), (count, 1))
            return Slot(plain[index], spaced[index])
        if name.startswith("letter"):
            letters = self.letters[rng.integers(0, len(self.letters), (count, 1))]
            return Slot(letters, letters)
        low, high = skills.INTEGERS[name]
        return self.integer(rng.integers(low, high + 1, count))

    def word_slot(self, name: str, index: Ints) -> Slot:
        """Return words of wording.py by their place in the list."""
        plain, spaced = self._words[name]
        return Slot(plain[index][:, None], spaced[index][:, None])

    def columns(self, template: str, slots: Slots, count: int) -> Ints:
        """Return the pieces of a template ``[count, width]``, to put into other texts."""
        parts = [
            np.full((count, 1), part.piece)
            if not part.slot
            else (slots[part.slot].spaced if part.spaced else slots[part.slot].plain)
            for part in self._compile(template)
        ]
        return np.hstack(parts)

    def _compile(self, template: str) -> list[_Part]:
        if template not in self._parts:
            self._parts[template] = list(self._split(skills.expand(template)))
        return self._parts[template]

    def _split(self, template: str) -> list[_Part]:
        parts = []
        end = 0
        for match in _SLOT.finditer(template):
            fixed, name = template[end : match.start()], match[1]
            spaced = fixed.endswith(" ") and name in _WORD_SLOTS
            fixed = fixed[:-1] if spaced else fixed
            if fixed:
                parts.append(_Part(self.piece(fixed)))
            parts.append(_Part(EMPTY, name, spaced))
            end = match.end()
        if template[end:] or not parts:
            parts.append(_Part(self.piece(template[end:])))
        return parts

    def _arrays(self) -> tuple[Ints, Ints, Ints]:
        """Return all tokens of all pieces, with the start and length of each piece."""
        if self._frozen is None:
            lengths = np.array([len(tokens) for tokens in self._tokens])
            pool = np.concatenate([np.array(tokens, TOKEN) for tokens in self._tokens])
            self._frozen = pool, np.cumsum(lengths) - lengths, lengths
        return self._frozen
