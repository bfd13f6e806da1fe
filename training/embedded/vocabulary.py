"""The tokenizer: byte-level BPE trained on the generators' own text."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from embedded import faq, skills, text, wording

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VOCAB_SIZE = 2048
_CORPUS_SEED = 1
# Above what the rest of the corpus can weigh in.
_TEMPLATE_WEIGHT = 60
# Words as text.py counts them, for every script: digits one by one, a letter before a digit alone.
_PATTERN = (
    r" ?(?:\p{Lu}{2,}(?![\p{L}\p{N}])|\p{Lu}?\p{Ll}+|\p{Lu}(?![\p{L}\p{N}]))"
    r"|\p{N}| ?[^\s\p{L}\p{N}]|\s|\p{L}"
)


def train() -> Tokenizer:
    """Train the tokenizer. Merges depend only on the corpus, and the corpus only on its seed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(t, special=True) for t in text.SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, context_length: int) -> None:
    """Save ``tokenizer.json`` and ``tokenizer_config.json``, with the chat template in the
    latter."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": text.TURN_END,
        "pad_token": text.END_OF_TEXT,
        "chat_template": text.CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _corpus() -> Iterator[str]:
    """Make the corpus. Words of the templates weigh most, so that each becomes one token."""
    rng = random.Random(_CORPUS_SEED)
    for words in wording.WORDS.values():
        for word in words:
            yield from [f"{word} {word} {word}, {word}"] * _TEMPLATE_WEIGHT
    fixed = (*wording.NEEDLES, *wording.RECALL_QUESTIONS, *wording.FILLERS, *wording.INTRODUCTIONS)
    templates = (*fixed, *wording.FOLLOW_UPS, *wording.SHORT_QUESTIONS, *wording.EXTRACTIONS)
    for template in (*templates, *wording.SUMS, *wording.DIFFERENCES, wording.ACKNOWLEDGEMENT):
        yield from [template.replace("{", " ").replace("}", " ")] * _TEMPLATE_WEIGHT
    for sentences, fields in wording.DOMAINS.values():
        yield from [" ".join((*sentences, *fields, *(f'"{f}"' for f in fields)))] * _TEMPLATE_WEIGHT
    yield from ["system\nuser\nassistant\n"] * _TEMPLATE_WEIGHT
    for _ in range(500):
        turn = skills.small_talk(rng)
        yield turn.question
        yield turn.answer
    yield from [text for text in wording.SYSTEM_PROMPTS for _ in range(3)]
    for entry in faq.load():
        yield from [entry.answer] * 30
        yield from faq.variants(entry, 15, rng)
