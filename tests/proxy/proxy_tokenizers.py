"""Small tokenizers of every kind that models come with."""

from __future__ import annotations

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = ["hello world, the quick brown fox", "über naïve 漢字 😀👩‍👧 emoji"] * 20


def byte_level(*, with_bos: bool = False) -> Tokenizer:
    """GPT-2's kind (Llama 3, Qwen); ids 0 and 1 are ``<s>`` and ``</s>``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), "\uff5c漢\uff5c"])
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece's kind with byte fallback (Llama 2, Mistral)."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", "▁h", "h", "e", "l", "o", "▁w", "r", "d", "▁▁", "é", "漢", "�", ".", "▁the"):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def byte_fallback_without_strip() -> Tokenizer:
    """Gemma's kind: a text's first token keeps its space."""
    tokenizer = byte_fallback()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """SentencePiece's kind with a metaspace decoder."""
    pieces = ["<unk>", "▁hello", "▁", "wor", "ld", "▁über", "😀", "!", "▁▁"]
    tokenizer = Tokenizer(models.Unigram([(piece, 0.0) for piece in pieces], 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's kind."""
    pieces = ["[UNK]", "hello", "wor", "##ld", "!", "don", "'", "t", "##é", "."]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


def word_suffix() -> Tokenizer:
    """The first GPT's kind: ``</w>`` ends a word."""
    pieces = ["hello</w>", "wor", "ld</w>", "!</w>", "a"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer


BYTE_FALLBACKS = [byte_fallback, byte_fallback_without_strip]
KINDS = [byte_level, *BYTE_FALLBACKS, metaspace, word_piece, word_suffix]
