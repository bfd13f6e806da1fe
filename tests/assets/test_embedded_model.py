"""What pd/assets holds: sizes, loading in transformers and in pd, and what the model can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from embedded import export, faq, report, text
from embedded.acceptance import acceptance_length, eagle_matches
from embedded.eagle import AUX_LAYERS
from embedded.evaluation import evaluate
from embedded.heldout import BARS, Example, evaluation_set
from embedded.skills import Turn
from torch.nn import functional

from pd.core.node_info import KVLayout
from pd.engine.forward_item import ForwardItem
from pd.engine.kv_pool import KVPool
from pd.engine.model_runner import ModelRunner
from pd.kernels.attention import AttentionBatch, make_attention_backend
from pd.models.config_reader import read_model_config
from pd.models.eagle import load_eagle_head
from pd.models.eagle_config import EagleConfig
from pd.models.loader import load_model
from pd.proxy.text.chat_template import load_templates, read_config

if TYPE_CHECKING:
    from embedded.model import Qwen3
    from tokenizers import Tokenizer

    from pd.models.causal_lm import CausalLM
    from pd.models.config import ModelConfig
    from pd.models.eagle import EagleHead

ROOT = Path(__file__).parents[2]
# With more, small matrices spend their time waiting for whoever else uses the cores.
torch.set_num_threads(1)
NEW_TOKENS = 24
PAGE_SIZE = 16
DRAFTS = 4
HEADS = (export.EAGLE_DIR, export.EAGLE3_DIR)
DRAFTERS = (export.DRAFT_DIR, *HEADS)


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


def eagle_drafts(
    head: EagleHead, target: CausalLM, tokens: torch.Tensor, first: int
) -> list[list[int]]:
    """Greedy drafts after each of ``tokens`` from index ``first`` on, each made as if the target
    had computed no token from that one on."""
    config, count = target.config, len(tokens)
    pages = np.arange((count + DRAFTS) // PAGE_SIZE + 1, dtype=np.int32)

    def planned(layers: int, kv_heads: int, dim: int, heads: int) -> Any:
        layout = KVLayout.of_model(layers, kv_heads, dim, "float32", PAGE_SIZE)
        return make_attention_backend("auto", KVPool(layout, len(pages), "cpu"), heads)

    def plan(attention: Any, start: int, length: int) -> Any:
        attention.plan(AttentionBatch(np.array([start]), np.array([length]), [pages]))
        return attention

    attention = planned(config.num_layers, config.num_kv_heads, config.head_dim, config.num_heads)
    target.aux_layers, target.aux_normed = head.config.aux_layers, head.config.normed
    features = torch.empty(count, head.config.feature_size)
    target.forward(tokens, torch.arange(count), plan(attention, 0, count), features=features)
    # The first token joins zeros.
    fused = functional.pad(head.fuse_features(features), (0, 0, 1, -1))
    own = head.config.layer
    attention = planned(1, own.num_kv_heads, own.head_dim, own.num_heads)
    found = []
    for last in range(first, count):
        start = 0 if last == first else last
        inputs, hidden = tokens[start : last + 1], fused[start : last + 1]
        drafted: list[int] = []
        for stop in range(last + 1, last + 1 + DRAFTS):
            work = plan(attention, start, stop - start)
            logits, hidden = head(inputs, hidden, torch.arange(start, stop), work)
            best = logits[-1].argmax()
            drafted.append(int(best if head.target_ids is None else head.target_ids[best]))
            inputs, hidden, start = torch.tensor(drafted[-1:]), hidden[-1:], stop
        found.append(drafted)
    return found


def reference_greedy(model: Any, prompt: list[int]) -> list[int]:
    """The same from transformers."""
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1
    )
    return out[0, len(prompt) :].tolist()


class TestDirectories:
    def test_the_model_has_at_most_10_mb_and_the_drafters_6(self, assets: Path) -> None:
        sizes = {
            name: sum(path.stat().st_size for path in (assets / name).iterdir())
            for name in (export.EMBEDDED_DIR, *DRAFTERS)
        }
        assert sizes.pop(export.EMBEDDED_DIR) <= 10_000_000
        assert sum(sizes.values()) <= 6_000_000

    def test_the_model_is_qwen3_with_grouped_queries(self, assets: Path) -> None:
        config = read_model_config(assets / "embedded")
        assert config.architecture == "qwen3"
        assert config.num_heads > config.num_kv_heads
        assert config.dtype == "bfloat16"
        assert config.context_length > 4096

    def test_drafters_share_the_vocabulary(self, assets: Path, tokenizer: Tokenizer) -> None:
        for name in (export.EMBEDDED_DIR, *DRAFTERS):
            config = json.loads((assets / name / "config.json").read_text())
            assert config["vocab_size"] == tokenizer.get_vocab_size()

    def test_drafters_are_small(self, assets: Path) -> None:
        draft = read_model_config(assets / export.DRAFT_DIR)
        assert draft.num_layers <= 2
        for name in HEADS:
            assert export.load_eagle(assets / name).shape.layers == 1

    def test_heads_are_read_as_published_ones(self, assets: Path) -> None:
        target = read_model_config(assets / export.EMBEDDED_DIR)
        eagle, eagle3 = (EagleConfig.from_pretrained(assets / name, target) for name in HEADS)
        assert (eagle.algorithm, eagle.aux_layers) == ("eagle", (target.num_layers,))
        assert (eagle3.algorithm, eagle3.aux_layers) == ("eagle3", AUX_LAYERS)
        assert eagle3.draft_vocab_size < target.vocab_size


class TestLoading:
    @pytest.mark.parametrize("name", [export.EMBEDDED_DIR, export.DRAFT_DIR])
    def test_pd_gives_the_tokens_of_transformers_in_float32(
        self, assets: Path, tokenizer: Tokenizer, name: str
    ) -> None:
        from transformers import AutoModelForCausalLM

        directory = assets / name
        theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        config = read_model_config(directory)
        ours = load_model(directory, config, dtype=torch.float32, device="cpu", progress=False)
        for example in (*few("recall-2k", 2, 600), *few("faq", 2), *few("extraction", 1)):
            prompt = tokenizer.encode(prompt_of(example), add_special_tokens=False).ids
            assert ours_greedy(ours, config, prompt) == reference_greedy(theirs, prompt)

    @pytest.mark.parametrize("name", [pytest.param(HEADS[0], marks=pytest.mark.full), *HEADS[1:]])
    def test_pd_drafts_what_the_trained_head_drafts(
        self, assets: Path, model: Qwen3, tokenizer: Tokenizer, name: str
    ) -> None:
        """And each draft is as good as the page says, on examples of the held-out sets."""
        config = read_model_config(assets / export.EMBEDDED_DIR)
        settings: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "progress": False}
        target = load_model(assets / export.EMBEDDED_DIR, config, **settings)
        own = EagleConfig.from_pretrained(assets / name, config)
        ours = load_eagle_head(assets / name, own, target, **settings)
        theirs = export.load_eagle(assets / name)
        examples = [*few("faq", 2), *few("extraction", 2), *few("recall-2k", 1, 600)]
        matches = []
        for result in evaluate(model, tokenizer, examples, torch.float32):
            expected = eagle_matches(theirs, model, result, torch.float32, DRAFTS)
            first = len(result.prompt)
            tokens = torch.tensor(result.prompt + result.output[:-1])
            found = eagle_drafts(ours, target, tokens, first)
            for place, drafted in enumerate(found, 1):
                for depth, token in enumerate(result.output[place : place + DRAFTS]):
                    assert (drafted[depth] == token) == expected[depth][place + depth]
                    if drafted[depth] != token:
                        break  # what the trained head guesses next follows the right token
            matches.append(expected)
        page = report.read(ROOT / "docs" / "embedded-model.json")["drafters"]
        promised = page[name.removeprefix("embedded-")]["all"][str(DRAFTS)]
        assert acceptance_length(matches, DRAFTS) > 0.85 * promised

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
        model = assets / "embedded"
        assert load_templates(model, read_config(model))["default"].render(as_dicts) == expected
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
            ("recall-2k", 4, 4),
            ("multi-turn", 4, 3),
            ("extraction", 8, 8),
            ("arithmetic", 10, 10),
            ("faq", 10, 9),
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
