"""A model of random weights with a tokenizer, small enough to start in a moment."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from pathlib import Path

VOCAB_SIZE = 420
EOS = 419
_TEXTS = [
    '{"name": "Ada", "age": 36, "tags": ["red", "green", "blue"], "ok": true, "none": null}',
    '[{"x": -1.5e3, "y": [false, true]}, {"x": 0, "y": []}] \\u00e4 äöü 名前 \\n\\t "quoted"',
]


def make_model(directory: Path) -> Path:
    """Write ``config.json`` and ``tokenizer.json``. The tokens are bytes and a few longer pieces
    of JSON."""
    path = shutil.copytree(
        tiny.tiny_model(vocab_size=VOCAB_SIZE, eos_token_id=EOS, bos_token_id=EOS - 1),
        directory / "grammar-model",
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=EOS - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS * 3, trainer)
    # Whatever could not be learned, so that the special tokens have the ids that config.json says.
    tokenizer.add_tokens([f"<unused{i}>" for i in range(EOS - 1 - tokenizer.get_vocab_size())])
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    assert tokenizer.token_to_id("<eos>") == EOS
    tokenizer.save(str(path / "tokenizer.json"))
    return path
