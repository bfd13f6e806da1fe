"""What pd/assets holds: sizes, loading in transformers and in pd, and what the model can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from embedded import export, faq, report, text
from embedded.evaluation import evaluate
from embedded.heldout import BARS, Example, evaluation_set
from embedded.skills import Turn

from pd.core.node_info import KVLayout
from pd.engine.kv_pool import KVPool
from pd.engine.model_runner import ForwardItem, ModelRunner
from pd.kernels.attention import make_attention_backend
from pd.models.config import ModelConfig
from pd.models.loader import load_model
from pd.proxy.chat_template import load_templates

if TYPE_CHECKING:
    from embedded.model import Qwen3
    from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
# With more, small matrices spend their time waiting for whoever else uses the cores.
torch.set_num_threads(1)
NEW_TOKENS = 24
PAGE_SIZE = 16


def few(name: str, count: int, longest: int = 1200) -> list[Example]:
    """The first examples of a held-out set that a CPU answers quickly."""
    return [e for e in evaluation_set(name) if e.length <= longest][:count]


def prompt_of(example: Example) -> str:
    """The prompt of an example's first turn."""
    return text.render([*example.before, text.Message("user", example.turns[0].question)])


@pytest.fixture(scope="module")
def model(assets: Path) -> Qwen3:
    return export.load_qwen3(assets / "embedded")


def ours_greedy(model: torch.nn.Module, config: ModelConfig, prompt: list[int]) -> list[int]:
    """Greedy tokens of pd's engine in float32."""
    layout = KVLayout.of_model(
        config.num_layers, config.num_kv_heads, config.head_dim, "float32", PAGE_SIZE
    )
    pages = (len(prompt) + NEW_TOKENS) // PAGE_SIZE + 1
    pool = KVPool(layout, pages, "cpu")
    runner = ModelRunner(model, pool, make_attention_backend("auto", pool, config.num_heads))
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


def reference_greedy(model: Any, prompt: list[int]) -> list[int]:
    """The same from transformers."""
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
        from transformers import AutoModelForCausalLM

        directory = assets / name
        theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        config = ModelConfig.from_pretrained(directory)
        ours = load_model(directory, config, dtype=torch.float32, device="cpu", progress=False)
        for example in (*few("recall-2k", 2, 600), *few("faq", 2), *few("extraction", 1)):
            prompt = tokenizer.encode(prompt_of(example), add_special_tokens=False).ids
            assert ours_greedy(ours, config, prompt) == reference_greedy(theirs, prompt)

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
            ("recall-2k", 8, 8),
            ("multi-turn", 8, 7),
            ("extraction", 12, 12),
            ("arithmetic", 16, 16),
            ("faq", 20, 19),
            pytest.param("recall-2k", 100, 98, marks=pytest.mark.full),
            pytest.param("multi-turn", 40, 38, marks=pytest.mark.full),
            pytest.param("extraction", 200, 194, marks=pytest.mark.full),
            pytest.param("arithmetic", 400, 380, marks=pytest.mark.full),
            pytest.param("faq", 284, 270, marks=pytest.mark.full),
        ],
    )
    def test_a_sample_of_the_held_out_set(
        self, model: Qwen3, tokenizer: Tokenizer, name: str, count: int, least: int
    ) -> None:
        """All of it is evaluated when the model is made; see docs/embedded-model.md."""
        examples = few(name, count, longest=600 if count < 40 else 1200)
        results = evaluate(model, tokenizer, examples, torch.float32, 6000)
        assert len(results) == count
        assert sum(result.right for result in results) >= least

    @pytest.mark.full
    def test_every_question_of_the_faq_as_it_is_written(
        self, model: Qwen3, tokenizer: Tokenizer
    ) -> None:
        entries = [Turn(entry.question, entry.answer) for entry in faq.load()]
        examples = [Example("faq", (), (turn,)) for turn in entries]
        results = evaluate(model, tokenizer, examples, torch.float32, 6000)
        assert all(result.right for result in results)

    def test_recall_notices_changed_lines(self, model: Qwen3, tokenizer: Tokenizer) -> None:
        """The answer comes from the lines: other values, other answers."""
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
        self, model: Qwen3, tokenizer: Tokenizer, greeting: str, system: str | None
    ) -> None:
        before = () if system is None else (text.Message("system", system),)
        example = Example("talk", before, (Turn(greeting, ""),))
        (result,) = evaluate(model, tokenizer, [example], torch.float32)
        assert result.answer.startswith("Hello!")


class TestReport:
    def test_the_page_is_what_the_numbers_say(self) -> None:
        numbers = ROOT / "docs" / "embedded-model.json"
        page = numbers.with_suffix(".md").read_text(encoding="utf-8")
        assert report.render(report.read(numbers), numbers.name) == page

    def test_every_bar_is_met_in_both_dtypes(self) -> None:
        for scores in report.read(ROOT / "docs" / "embedded-model.json")["scores"].values():
            assert {name for name, bar in BARS.items() if scores[name]["share"] < bar} == set()
