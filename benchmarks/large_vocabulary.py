"""Make a model directory with a vocabulary of realistic size, without a download.

The byte-level tokenizer is learned from the sources of installed Python packages. `config.json` is
that of a shape known to `pd-bench engine`; serve it with `--load-format dummy`:

    python benchmarks/large_vocabulary.py /tmp/large --shape llama-3.1-8b
    pd-bench engine --model /tmp/large --load-format dummy --work sampled:64 schema:64
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pd.bench.shapes import NAMES, model_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

# Characters of text from which the vocabulary is learned.
_TEXT = 60_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="new, or without a config.json")
    parser.add_argument("--shape", choices=NAMES, default="llama-3.1-8b")
    args = parser.parse_args()
    config = Path(model_directory(args.shape)) / "config.json"
    args.directory.mkdir(parents=True, exist_ok=True)
    learn(args.directory / "tokenizer.json", json.loads(config.read_text())["vocab_size"])
    shutil.copy(config, args.directory)


def learn(path: Path, size: int) -> Path:
    """Write a byte-level tokenizer of ``size`` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.save(str(path))
    return path


def _texts() -> Iterator[str]:
    files = sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))
    random.Random(1).shuffle(files)
    left = _TEXT
    for file in files:
        text = file.read_text(errors="replace")[:200_000]
        left -= len(text)
        if left < 0:
            return
        yield text


if __name__ == "__main__":
    main()
