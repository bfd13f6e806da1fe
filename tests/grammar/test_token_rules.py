"""Masks after drafted tokens equal the rules' masks after the same tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pd.engine.draft_tree import DraftTree
from pd.engine.token_rules import fill_masks

VOCAB = 40


class NoTokenTwice:
    """Rules that allow each token once. Token 0 ends the output."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def has_ended(self) -> bool:
        return 0 in self.tokens

    def fork_rules(self) -> NoTokenTwice:
        return NoTokenTwice()

    def fill_mask(self, mask: np.ndarray) -> None:
        assert not self.has_ended
        bits = np.ones(64, np.uint8)
        bits[self.tokens] = 0
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept_token(self, token: int) -> bool:
        if token in self.tokens or self.has_ended:
            return False
        self.tokens.append(token)
        return True

    def roll_back(self, count: int) -> None:
        assert 0 <= count <= len(self.tokens)
        del self.tokens[len(self.tokens) - count :]


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_masks_follow_the_tree(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 12))
    parents = [data.draw(st.integers(-1, index - 1)) for index in range(size)]
    guesses = data.draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
    known = data.draw(st.lists(st.integers(1, 6), unique=True, max_size=4))
    tree = DraftTree(np.array(parents, np.int32)) if size else None
    rules = NoTokenTwice()
    assert all(map(rules.accept_token, known))
    masks = np.full((1 + size, 2), -1, np.int32)
    fill_masks(rules, masks, tree, guesses)
    assert rules.tokens == known
    for row, path in enumerate([(), *([] if tree is None else tree.paths)]):
        again, expected = NoTokenTwice(), np.full(2, -1, np.int32)
        before = [*known, *(guesses[guess] for guess in path)]
        if all(map(again.accept_token, before)) and not again.has_ended:
            again.fill_mask(expected)
        assert (masks[row] == expected).all(), (row, path)
