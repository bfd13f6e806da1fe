"""What pd/assets holds: sizes, loading in transformers and in pd, and what the model can do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from embedded import export, text
from embedded.evaluation import evaluate
from embedded.heldout import Example, evaluation_set

from pd.core.node_info import KVLayout
from pd.engine.kv_pool import KVPool
from pd.engine.model_runner import ForwardItem, ModelRunner
from pd.kernels.attention import make_attention_backend
from pd.models.config import ModelConfig
from pd.models.loader import load_model
from pd.proxy.chat_template import load_templates

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

NEW_TOKENS = 24
PAGE_SIZE = 16


def few(name: str, count: int, longest: int = 1200) -> list[Example]:
    """The first examples of a held-out set that a CPU answers quickly."""
    return [e for e in evaluation_set(name) if e.length <= longest][:count]


def prompt_of(example: Example) -> str:
    """The prompt of an example's first turn."""
    return text.render([*example.before, text.Message("user", example.turns[0].question)])


def ours_greedy(directory: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens of pd's engine in float32."""
    config = ModelConfig.from_pretrained(directory)
    model = load_model(directory, config, dtype=torch.float32, device="cpu", progress=False)
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, "float32", PAGE_SIZE)
    pages = (len(prompt) + NEW_TOKENS) // PAGE_SIZE + 1
    pool = KVPool(layout, pages, "cpu")
    runner = ModelRunner(model, pool, make_attention_backend("auto", pool))
    table = np.random.default_rng(0).permutation(pages).astype(np.int32)
    tokens = np.array(prompt, np.int32)
    found: list[int] = []
    start = 0
    for _ in range(NEW_TOKENS):
        logits = runner.forward([ForwardItem(tokens, start, table)])
        found.append(int(logits[0].argmax()))
        start += len(tokens)
        tokens = np.array(found[-1:], np.int32)
    return found


def reference_greedy(directory: Path, prompt: list[int]) -> list[int]:
    """The same from transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1
    )
    return out[0, len(prompt) :].tolist()


class TestDirectories:
    def test_the_model_has_at_most_10_mb_and_the_drafters_3(self, assets: Path) -> None:
        sizes = {
            name: sum(path.stat().st_size for path in (assets / name).iterdir())
            for name in (export.EMBEDDED_DIR, export.DRAFT_DIR, export.EAGLE_DIR)
        }
        assert sizes[export.EMBEDDED_DIR] <= 10_000_000
        assert sizes[export.DRAFT_DIR] + sizes[export.EAGLE_DIR] <= 3_000_000

    def test_the_model_is_qwen3_with_grouped_queries(self, assets: Path) -> None:
        config = ModelConfig.from_pretrained(assets / "embedded")
        assert config.architecture == "qwen3"
        assert config.num_heads > config.num_kv_heads
        assert config.dtype == "bfloat16"
        assert config.context_length > 4096

    def test_drafters_share_the_vocabulary(self, assets: Path, tokenizer: Tokenizer) -> None:
        for name in (export.EMBEDDED_DIR, export.DRAFT_DIR, export.EAGLE_DIR):
            config = json.loads((assets / name / "config.json").read_text())
            assert config["vocab_size"] == tokenizer.get_vocab_size()

    def test_drafters_are_small(self, assets: Path) -> None:
        draft = ModelConfig.from_pretrained(assets / export.DRAFT_DIR)
        assert draft.num_layers <= 2
        head = export.load_eagle(assets / export.EAGLE_DIR)
        assert head.shape.layers == 1


class TestLoading:
    @pytest.mark.parametrize("name", [export.EMBEDDED_DIR, export.DRAFT_DIR])
    def test_pd_gives_the_tokens_of_transformers_in_float32(
        self, assets: Path, tokenizer: Tokenizer, name: str
    ) -> None:
        examples = [*few("recall-2k", 2, 600), *few("faq", 2), *few("extraction", 1)]
        for example in examples:
            prompt = tokenizer.encode(prompt_of(example), add_special_tokens=False).ids
            expected = reference_greedy(assets / name, prompt)
            assert ours_greedy(assets / name, prompt) == expected

    def test_chat_template_in_the_proxy_and_in_transformers(self, assets: Path) -> None:
        from transformers import AutoTokenizer

        messages = [
            text.Message("system", "Be brief."),
            text.Message("user", "Hello"),
            text.Message("assistant", "Hi"),
            text.Message("user", "What is pd?"),
        ]
        as_dicts = [message._asdict() for message in messages]
        expected = text.render(messages)
        assert load_templates(assets / "embedded")["default"].render(as_dicts) == expected
        theirs = AutoTokenizer.from_pretrained(assets / "embedded")
        rendered = theirs.apply_chat_template(as_dicts, tokenize=False, add_generation_prompt=True)
        assert rendered == expected
        assert theirs.decode(theirs.encode(expected)) == expected


class TestTokenizer:
    @pytest.mark.parametrize("key", ["K17", "Q550", "AB3"])
    def test_a_key_has_the_same_tokens_wherever_it_stands(
        self, tokenizer: Tokenizer, key: str
    ) -> None:
        for before, after in (("", ":"), ("for ", " is"), ("And ", "?"), ("\n", " has")):
            tokens = tokenizer.encode(before + key + after, add_special_tokens=False).tokens
            assert "".join(tokens).count(key) == 1
            assert all(character in tokens for character in key)

    def test_any_bytes_survive(self, tokenizer: Tokenizer) -> None:
        for sample in ("naïve Größe 中文 🙂", "a\tb\r\n  c", "x" * 50, '{"a": [1, 2.5]}'):
            ids = tokenizer.encode(sample, add_special_tokens=False).ids
            assert tokenizer.decode(ids) == sample


class TestSkills:
    @pytest.mark.parametrize(
        ("name", "count", "least"),
        [
            ("recall-2k", 12, 11),
            ("multi-turn", 8, 7),
            ("extraction", 16, 15),
            ("arithmetic", 16, 15),
            ("faq", 24, 22),
        ],
    )
    def test_a_sample_of_the_held_out_set(
        self, assets: Path, tokenizer: Tokenizer, name: str, count: int, least: int
    ) -> None:
        """All of it is evaluated when the model is made; see docs/embedded-model.md."""
        model = export.load_qwen3(assets / "embedded")
        results = evaluate(model, tokenizer, few(name, count), torch.float32, 6000)
        assert sum(result.right for result in results) >= least

    def test_recall_notices_changed_lines(self, assets: Path, tokenizer: Tokenizer) -> None:
        """The answer comes from the lines: other values, other answers."""
        model = export.load_qwen3(assets / "embedded")
        (example,) = few("multi-turn", 1)
        turn = example.turns[0]
        value = turn.answer.removesuffix(".").split()[-1]
        other = value[:-1] + str((int(value[-1]) + 1) % 10)
        where = (*example.before, text.Message("user", turn.question))
        changed = Example(
            "recall",
            tuple(m._replace(content=m.content.replace(value, other)) for m in where[:-1]),
            (turn._replace(question=where[-1].content.replace(value, other)),),
        )
        answers = [
            evaluate(model, tokenizer, [e], torch.float32)[0].answer
            for e in (Example("recall", example.before, (turn,)), changed)
        ]
        assert answers[0] == turn.answer
        assert other in answers[1]

    @pytest.mark.parametrize("greeting", ["Hello", "Hi!", "Good morning"])
    @pytest.mark.parametrize("system", [None, "You are a helpful assistant."])
    def test_greets(
        self, assets: Path, tokenizer: Tokenizer, greeting: str, system: str | None
    ) -> None:
        from embedded.skills import Turn

        before = () if system is None else (text.Message("system", system),)
        model = export.load_qwen3(assets / "embedded")
        example = Example("talk", before, (Turn(greeting, ""),))
        (result,) = evaluate(model, tokenizer, [example], torch.float32)
        assert result.answer.startswith("Hello!")
