"""The engine's forward pass equals transformers, however requests are cut and mixed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from checkpoints import (
    ARCHITECTURES,
    VOCAB_SIZE,
    make_checkpoint,
    reference_generate,
    reference_logits,
)
from greedy_engine import generate, make_runner

from pd.engine.forward_item import ForwardItem

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pd.engine.model_runner import ModelRunner

    Checkpoint = Callable[[str], Path]

NEW_TOKENS = 24
# tests/e2e/test_parity.py has every architecture.
SAMPLE = ("llama3", "qwen3_moe")


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]


def item(tokens: list[int], start: int, pages: range, num_logits: int = 1) -> ForwardItem:
    return ForwardItem(np.array(tokens, np.int32), start, np.array(pages, np.int32), num_logits)


class TestParity:
    @pytest.mark.parametrize(
        "architecture",
        [
            name if name in SAMPLE else pytest.param(name, marks=pytest.mark.full)
            for name in ARCHITECTURES
        ],
    )
    def test_greedy_tokens_equal_transformers(
        self, checkpoint: Checkpoint, architecture: str
    ) -> None:
        path = checkpoint(architecture)
        prompts = random_prompts([1, 2, 17, 33, 64, 150, 420])
        expected = reference_generate(path, prompts, NEW_TOKENS)
        for page_size, max_chunk in ((1, 5), (16, 50), (64, 4096), (4, 1)):
            few = prompts if max_chunk > 1 else prompts[:4]
            runner = make_runner(path, page_size=page_size)
            for seed in range(2):
                if seed:
                    runner.last_alone_from = 0
                found = generate(runner, few, NEW_TOKENS, max_chunk=max_chunk, seed=seed)
                where = f"page size {page_size}, chunks up to {max_chunk}, seed {seed}"
                assert [s.output for s in found] == expected[: len(few)], where

    @pytest.mark.parametrize(
        ("architecture", "overrides"),
        [
            ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True}),
            ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
            ("llama2", {"num_key_value_heads": 1, "attention_bias": False, "mlp_bias": False}),
            ("mixtral", {"head_dim": 40, "num_experts_per_tok": 1}),
            (
                "glm4_moe",
                {
                    "use_qk_norm": False,
                    "attention_bias": False,
                    "n_shared_experts": 2,
                    "first_k_dense_replace": 2,
                    "n_group": 1,
                    "norm_topk_prob": False,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 10000.0,
                        "partial_rotary_factor": 0.25,
                    },
                },
            ),
            (
                "phi3",
                {
                    "sliding_window": 70,
                    "tie_word_embeddings": True,
                    "head_dim": 16,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 10000.0,
                        "partial_rotary_factor": 0.75,
                    },
                },
            ),
            ("gpt_oss", {"attention_bias": False, "swiglu_limit": 7.0, "num_experts_per_tok": 3}),
            (
                "gpt_oss",
                {
                    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
                    "sliding_window": 70,
                    "num_key_value_heads": 4,
                    "swiglu_limit": 0.5,
                },
            ),
            (
                "llama3",
                {
                    "rope_parameters": {
                        "rope_type": "linear",
                        "factor": 2.0,
                        "rope_theta": 10000.0,
                    }
                },
            ),
        ],
    )
    def test_logits_with_other_settings(
        self, architecture: str, overrides: dict[str, Any], tmp_path: Path
    ) -> None:
        path = make_checkpoint(architecture, tmp_path, **overrides)
        (prompt,) = random_prompts([300])
        runner = make_runner(path)
        logits = [
            runner.forward([item(prompt[:100], 0, range(20), 100)]),
            runner.forward([item(prompt[100:], 100, range(20), 200)]),
        ]
        assert torch.cat(logits).dtype == torch.float32
        torch.testing.assert_close(
            torch.cat(logits), reference_logits(path, prompt), atol=2e-4, rtol=0
        )

    def test_alone_and_in_a_batch_of_32(self, checkpoint: Checkpoint) -> None:
        path = checkpoint("llama3")
        prompts = random_prompts([1 + 7 * i for i in range(32)])
        runner = make_runner(path)
        together = generate(runner, prompts, 8, max_chunk=4096, seed=0)
        for i in (0, 5, 31):
            (alone,) = generate(runner, [prompts[i]], 8, max_chunk=4096, seed=i)
            assert alone.output == together[i].output
            torch.testing.assert_close(
                torch.stack(alone.logits).log_softmax(-1),
                torch.stack(together[i].logits).log_softmax(-1),
                atol=1e-4,
                rtol=0,
            )

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision_comes_close(self, checkpoint: Checkpoint, dtype: str) -> None:
        path = checkpoint("qwen3")
        (prompt,) = random_prompts([60])
        logits = make_runner(path, dtype=dtype).forward([item(prompt, 0, range(4), 60)])
        assert logits.dtype == getattr(torch, dtype)
        expected = reference_logits(path, prompt)
        together = torch.stack((logits.float().flatten(), expected.flatten()))
        assert float(torch.corrcoef(together)[0, 1]) > 0.99


class TestLogits:
    @pytest.fixture
    def runner(self, checkpoint: Checkpoint) -> ModelRunner:
        return make_runner(checkpoint("llama3"))

    def test_rows_are_in_the_order_of_items(
        self, checkpoint: Checkpoint, runner: ModelRunner
    ) -> None:
        prompts = random_prompts([5, 40, 1, 9])
        counts = [2, 0, 1, 9]
        logits = runner.forward(
            [
                item(prompt, 0, range(10 * i, 10 * i + 4), count)
                for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
            ]
        )
        path = checkpoint("llama3")
        expected = [
            reference_logits(path, prompt)[len(prompt) - count :]
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        torch.testing.assert_close(logits, torch.cat(expected), atol=1e-4, rtol=0)

    def test_the_last_layer_attends_for_what_is_wanted(
        self, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where that is little of long sequences; the KV of all tokens is there all the same."""
        prompts, counts = random_prompts([90, 33, 70, 1]), [3, 0, 1, 1]
        items = [
            item(prompt, 0, range(10 * i, 10 * i + 6), count)
            for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
        ]
        runners = [make_runner(checkpoint("llama3"), last_alone=alone) for alone in (False, True)]
        attended = []
        for runner in runners:
            runner.pool.planes[0].buffer.normal_(generator=torch.Generator().manual_seed(0))
            last = runner._last_attention
            assert last is not None

            def attend(layer: int, q: torch.Tensor, *kv: torch.Tensor, right=last.attend):
                attended.append((layer, len(q)))
                return right(layer, q, *kv)

            monkeypatch.setattr(last, "attend", attend)
        whole, alone = (runner.forward(items) for runner in runners)
        assert attended == [(2, 5)]
        torch.testing.assert_close(alone, whole, atol=1e-5, rtol=0)
        slots = [160 * i + t for i, prompt in enumerate(prompts) for t in range(len(prompt))]
        kv = [runner.pool.planes[0].buffer[:, :, slots] for runner in runners]
        torch.testing.assert_close(kv[1], kv[0], atol=1e-6, rtol=0)
        later = [item(prompts[0][:5], 90, range(6)), *items[1:3]]
        whole, alone = (runner.forward(later) for runner in runners)
        assert attended == [(2, 5), (2, 2)]
        torch.testing.assert_close(alone, whole, atol=1e-5, rtol=0)

    def test_a_step_may_want_none(self, runner: ModelRunner) -> None:
        assert runner.forward([item([1, 2, 3], 0, range(1), 0)]).shape == (0, VOCAB_SIZE)

    def test_more_than_computed_is_an_error_of_ours(self, runner: ModelRunner) -> None:
        with pytest.raises(AssertionError, match="more logits wanted"):
            runner.forward([item([1, 2, 3], 0, range(1), 4)])

    def test_results_may_be_changed_in_place(self, runner: ModelRunner) -> None:
        """Outside of inference mode torch refuses that for its tensors, inside it does not."""
        logits = runner.forward([item([1, 2, 3], 0, range(1))])
        with torch.inference_mode():
            logits += 1


class TestProgress:
    def test_layers_are_reported_when_their_kv_is_in_the_pool(self, checkpoint: Checkpoint) -> None:
        runner = make_runner(checkpoint("llama2"))
        reported = []

        def on_layers_done(first: int, stop: int) -> None:
            keys = runner.pool.planes[0].buffer[:, 0, 32:37].abs().sum(dim=(1, 2, 3)) > 0
            reported.append((first, stop, keys.tolist()))

        runner.forward([item([1, 2, 3, 4, 5], 0, range(2, 3))], on_layers_done)
        assert reported == [
            (0, 1, [True, False, False]),
            (1, 2, [True, True, False]),
            (2, 3, [True, True, True]),
        ]

    def test_kv_of_a_prefix_is_reused(self, checkpoint: Checkpoint) -> None:
        """Two sequences continue one cached prefix; its pages are read and not written."""
        path = checkpoint("qwen2")
        runner = make_runner(path)
        (prefix, *tails) = random_prompts([32, 7, 11])
        runner.forward([item(prefix, 0, range(2), 0)])
        before = runner.pool.planes[0].buffer[:, :, :32].clone()
        items = [
            ForwardItem(np.array(tail, np.int32), 32, np.array([0, 1, 2 + i], np.int32))
            for i, tail in enumerate(tails)
        ]
        logits = runner.forward(items)
        assert torch.equal(runner.pool.planes[0].buffer[:, :, :32], before)
        for row, tail in zip(logits, tails, strict=True):
            expected = reference_logits(path, prefix + tail)[-1]
            torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)
