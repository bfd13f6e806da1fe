"""Generators: the same from the same seed, and nothing held out is ever trained on."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from embedded import faq, heldout, skills, text, turns
from embedded.batches import BatchMaker
from embedded.feed import to_batch

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Far fewer than in training, which takes seconds to make.
PHRASINGS = 30
# Sets that several tests look at are made once.
evaluation_set = functools.cache(heldout.evaluation_set)


@pytest.fixture(scope="module")
def maker(tokenizer: Tokenizer) -> BatchMaker:
    return BatchMaker(tokenizer, PHRASINGS)


class TestHeldOutSets:
    def test_the_same_seed_gives_the_same_sets(self) -> None:
        for name in heldout.BARS:
            if name != "recall-4k":
                assert evaluation_set(name) == heldout.evaluation_set(name)

    def test_another_seed_gives_others(self) -> None:
        for name in ("recall-2k", "multi-turn", "extraction", "arithmetic"):
            assert evaluation_set(name, 1) != evaluation_set(name, 2)

    def test_every_length_is_met_at_every_depth(self) -> None:
        for name, lengths in (
            ("recall-2k", heldout.SHORT_LENGTHS),
            ("recall-4k", heldout.LONG_LENGTHS),
        ):
            examples = evaluation_set(name)
            assert len({example.depth for example in examples}) == heldout.DEPTHS
            for length in lengths:
                near = [e for e in examples if length - 120 < e.length <= length]
                assert len({example.depth for example in near}) == heldout.DEPTHS

    def test_lengths_are_those_of_the_tokenizer(self, tokenizer: Tokenizer) -> None:
        for name in ("recall-2k", "multi-turn"):
            for example in evaluation_set(name)[:20]:
                messages = list(example.before)
                for turn in example.turns[:-1]:
                    messages.append(text.Message("user", turn.question))
                    messages.append(text.Message("assistant", turn.answer))
                messages.append(text.Message("user", example.turns[-1].question))
                encoded = tokenizer.encode(text.render(messages), add_special_tokens=False)
                # Rare words of a system prompt may be more than one token.
                assert abs(len(encoded.ids) - example.length) <= 20

    @pytest.mark.parametrize("name", ["recall-2k", "multi-turn"])
    def test_every_answer_is_in_the_lines(self, name: str) -> None:
        for example in evaluation_set(name):
            lines = "\n".join([*(m.content for m in example.before), example.turns[0].question])
            for turn in example.turns:
                value = turn.answer.removesuffix(".").split()[-1]
                assert value in lines, (turn, lines)


class TestQuestions:
    def test_about_sixty_with_answers_of_one_or_two_sentences(self) -> None:
        entries = faq.load()
        assert len(entries) >= 60
        for entry in entries:
            assert 1 <= entry.answer.count(". ") + 1 <= 3, entry.answer
            assert len(entry.trained) >= 5
            assert len(entry.held_out) >= 2

    def test_no_held_out_phrasing_is_within_a_trained_one(self) -> None:
        entries = faq.load()
        trained = {
            f" {faq.normalize(phrasing)} "
            for entry in entries
            for phrasing in faq.variants(entry, 200, random.Random(3))
        }
        for entry in entries:
            for phrasing in entry.held_out:
                words = f" {faq.normalize(phrasing)} "
                assert not any(words in each for each in trained), phrasing

    def test_no_phrasing_belongs_to_two_questions(self) -> None:
        seen: dict[str, str] = {}
        for entry in faq.load():
            for phrasing in entry.trained + entry.held_out:
                words = faq.normalize(phrasing)
                assert seen.setdefault(words, entry.question) == entry.question, phrasing

    def test_variants_are_deterministic(self) -> None:
        entry = faq.load()[0]
        one, two = (faq.variants(entry, 50, random.Random(9)) for _ in range(2))
        assert one == two


class TestArithmetic:
    def test_held_out_pairs_are_few_and_never_small(self) -> None:
        a, b = np.mgrid[:1000, :1000]
        held = skills.is_held_out(a, b)
        assert 0.01 < held.mean() < 0.03
        assert not held[:100, :100].any()

    def test_training_never_shows_one(self, maker: BatchMaker, tokenizer: Tokenizer) -> None:
        answers = maker.turns.arithmetic(4000, np.random.default_rng(0)).answers
        rows = np.split(answers.tokens, np.cumsum(answers.lengths)[:-1])
        for answer in tokenizer.decode_batch([row.tolist() for row in rows]):
            a, sign, b, _, result = answer.split()
            assert not skills.is_held_out(int(a), int(b))
            assert int(result) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


class TestBatches:
    @pytest.mark.parametrize(
        ("rows", "length", "recall"), [(24, 288, 0.5), (6, 1152, 1.0), (2, 4608, 1.0)]
    )
    def test_tokens_are_those_of_their_text(
        self,
        maker: BatchMaker,
        tokenizer: Tokenizer,
        monkeypatch: pytest.MonkeyPatch,
        rows: int,
        length: int,
        recall: float,
    ) -> None:
        # Tokens put in the place of others need not be what their text would be split into.
        monkeypatch.setattr(turns, "_NOISE_RATES", (0.0, 0.0, 0.0))
        tokens, _ = maker.make(1, 2, rows, length, recall)
        for row in tokens.tolist():
            encoded = tokenizer.encode(
                tokenizer.decode(row, skip_special_tokens=False), add_special_tokens=False
            )
            # The end of a row may be the middle of a word.
            assert encoded.ids[: length - 12] == row[: length - 12]

    def test_seed_and_step_decide(self, maker: BatchMaker, tokenizer: Tokenizer) -> None:
        one = maker.make(1, 2, 16, 288, 0.5)
        again = BatchMaker(tokenizer, PHRASINGS).make(1, 2, 16, 288, 0.5)
        other = maker.make(1, 3, 16, 288, 0.5)
        assert all((a == b).all() for a, b in zip(one, again, strict=True))
        assert (one[0] != other[0]).any()

    def test_only_what_the_assistant_says_is_learned(
        self, maker: BatchMaker, tokenizer: Tokenizer
    ) -> None:
        tokens, weights = maker.make(5, 0, 24, 288, 0.5)
        assistant = tokenizer.encode(f"{text.TURN_START}assistant\n").ids
        end = tokenizer.token_to_id(text.TURN_END)
        for row, weight in zip(tokens.tolist(), weights, strict=True):
            speaking, expected = False, []
            for i, token in enumerate(row):
                expected.append(speaking)
                speaking = speaking and token != end
                speaking = speaking or row[max(0, i - 2) : i + 1] == assistant
            assert (weight > 0).tolist() == expected

    def test_recall_rows_answer_from_their_own_lines(
        self, maker: BatchMaker, tokenizer: Tokenizer
    ) -> None:
        tokens, _ = maker.make(7, 0, 12, 576, 1.0)
        for row in tokens.tolist():
            whole = tokenizer.decode(row, skip_special_tokens=False)
            lines, *said = whole.split(f"{text.TURN_START}assistant\n")
            values = [t.split(".")[0].split(" is ")[1] for t in said[:-1] if " is " in t[:30]]
            assert values
            assert all(value in lines for value in values if value.isdigit())

    def test_lines_with_one_key_leave_one_of_them_to_ask_about(
        self, maker: BatchMaker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Keys of lines without a value do not count as taken."""
        monkeypatch.setattr(maker, "_keys", lambda shape, rng: np.full((len(shape), 4), 1))
        rng = np.random.default_rng(0)
        lines = maker._lines(maker._common(40, 288, rng), rng)
        assert set(lines.row[lines.needle].tolist()) == set(range(40))

    def test_predictions_are_made_one_place_before(self) -> None:
        tokens = np.arange(12, dtype=np.int16).reshape(2, 6)
        weights = np.zeros((2, 6), np.uint8)
        weights[0, 3], weights[1, 0], weights[1, 5] = 1, 1, 3
        batch = to_batch(tokens, weights, 4)
        assert batch.places.tolist() == [2, 10, 0, 0]
        assert batch.targets.tolist() == [3, 11, 0, 0]
        assert batch.weights.tolist() == [1, 3, 0, 0]
