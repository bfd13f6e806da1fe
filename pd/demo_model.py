"""The model of ``pd-launch demo``: a Qwen3 of a few million random weights that reads bytes.

``python -m pd.demo_model DIR`` writes it for other uses; nodes need ``--load-format dummy``.

A trained model may take its place: whoever calls :func:`write_demo_model` needs a directory that a
node can load, how to load it, and whether what it says means anything.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NAME = "pd-demo"
CONTEXT_LENGTH = 4096
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


class DemoModel(NamedTuple):
    """A model directory.

    Attributes:
        load_format: what nodes need as ``--load-format``.
        trained: False if answers are noise.
    """

    directory: Path
    load_format: str
    trained: bool
    description: str


def write_demo_model(directory: Path) -> DemoModel:
    """Write the model into ``directory``, which is created if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = _write_tokenizer(directory)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": vocab_size - 1,
        "dtype": "float32",
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": vocab_size - 1})
    return DemoModel(
        directory,
        "dummy",
        False,
        f"Qwen3 shape, {config['num_hidden_layers']} layers, random weights",
    )


def _write_tokenizer(directory: Path) -> int:
    """A token per byte, then three special ones, the end of a turn last; returns how many."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True) for t in (END_OF_TEXT, TURN_START, TURN_END)]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": CONTEXT_LENGTH,
    }
    _write_json(directory / "tokenizer_config.json", settings)
    size: int = tokenizer.get_vocab_size()
    return size


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m pd.demo_model DIR")
    write_demo_model(Path(sys.argv[1]))
