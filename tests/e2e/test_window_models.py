"""Models with sliding windows, sinks or heads that are rotated in part: tokens equal transformers'
in unified and split deployments, with chunk boundaries inside windows, windows shorter than a page,
cached prefixes and drafts."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import is_greedy, make_checkpoint
from cluster import Cluster, random_prompts
from counters import counter

if TYPE_CHECKING:
    from pathlib import Path

_LISTED = {"use_sliding_window": True, "head_dim": 32}
_PART = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
_QUARTER = {"partial_rotary_factor": 0.25}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "every layer": ("mistral", {"sliding_window": 20}),
    "the last layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "listed layers": (
        "qwen3",
        {
            **_LISTED,
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "experts": ("mixtral", {"sliding_window": 7}),
    "one token": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 1}),
    "sinks and experts with biases": ("gpt_oss", {}),
    "as many layers with a window as without": (
        "gpt_oss",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 12,
        },
    ),
    "sinks in every layer": (
        "gpt_oss",
        {
            "layer_types": ["sliding_attention"] * 3,
            "sliding_window": 5,
            "num_key_value_heads": 4,
            "num_local_experts": 6,
            "num_experts_per_tok": 4,
        },
    ),
    "sinks without biases of attention": (
        "gpt_oss",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 40,
            "attention_bias": False,
            "num_experts_per_tok": 1,
            "tie_word_embeddings": True,
        },
    ),
    "fused weights": ("phi3", {"sliding_window": 9}),
    "fused weights, a quarter rotated": (
        "phi3",
        {"head_dim": 32, "num_key_value_heads": 1, "rope_parameters": {**_PART, **_QUARTER}},
    ),
    "fused weights, tied, as many heads": (
        "phi3",
        {"head_dim": 16, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "half rotated, without groups and norms": (
        "glm4_moe",
        {"n_group": 1, "use_qk_norm": False, "norm_topk_prob": False, "n_shared_experts": 2},
    ),
    "all rotated, without dense layers": (
        "glm4_moe",
        {"first_k_dense_replace": 0, "attention_bias": False, "rope_parameters": _PART},
    ),
    "a quarter rotated, of dense layers only": (
        "glm4_moe",
        {"first_k_dense_replace": 3, "rope_parameters": {**_PART, **_QUARTER}},
    ),
}
PAGE_SIZES = [(1, 16), (16, 64), (64, 1)]
SAMPLE = {
    "as many layers with a window as without": (1, 16),
    "the last layer": (16, 64),
    "fused weights, a quarter rotated": (16, 64),
    "all rotated, without dense layers": (64, 1),
}


@pytest.mark.parametrize(
    ("shape", "pages"),
    [
        pytest.param(shape, pages, marks=() if SAMPLE.get(shape) == pages else pytest.mark.full)
        for shape in SHAPES
        for pages in PAGE_SIZES
    ],
)
def test_tokens_equal_transformers(
    shape: str, pages: tuple[int, int], tmp_path: Path, seed: int
) -> None:
    architecture, settings = SHAPES[shape]
    model = make_checkpoint(architecture, tmp_path, **settings)
    rng = random.Random(seed)
    # Texts that repeat themselves, so that n-grams find something.
    prompts = [p * rng.randrange(2, 5) for p in random_prompts(seed, [9, 20, 40])]
    prompts += [prompts[2][:70] + prompts[0], [rng.randrange(256)]]
    with Cluster(
        model,
        unified=1,
        chunked_prefill_size=24,
        speculative_algorithm="ngram",
        # Some texts hardly repeat themselves, but the second turn repeats the first.
        speculative_ngram_cache="on",
        speculative_adaptive="off",
        prefill_settings={"page_size": pages[0]},
        decode_settings={"page_size": pages[1]},
    ) as cluster:
        for turn in range(2):
            sent = [
                cluster.client.generate(p, where, max_tokens=32)
                for p in prompts
                for where in (cluster.pair, cluster.unified)
            ]
            for i, request in enumerate(sent):
                assert is_greedy(model, prompts[i // 2], request.tokens(60)), seed
            assert turn == 0 or sum(request.cached_tokens or 0 for request in sent) > 0
        cluster.wait_idle()
        assert counter(cluster.decode[0], "pd_speculative_drafted_total") > 0


ALTERNATING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 12,
}


@pytest.mark.parametrize(
    ("pages", "settings"),
    [
        ((16, 4), {"kv_digest": True}),
        pytest.param((1, 16), {"kv_digest": True}, marks=pytest.mark.full),
        pytest.param((64, 16), {"kv_cache_dtype": "fp8_e4m3"}, marks=pytest.mark.full),
        pytest.param((4, 64), {"overlap_schedule": "on"}, marks=pytest.mark.full),
    ],
)
def test_pages_that_windows_give_up_are_neither_read_nor_sent(
    pages: tuple[int, int], settings: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    model = make_checkpoint("gpt_oss", tmp_path, **ALTERNATING)
    prompts = list(random_prompts(seed, [500, 420, 37, 460]))
    # Branches inside of a prompt, and a prompt that goes on.
    prompts += [prompts[0][:300] + prompts[2], prompts[1] + prompts[2]]
    with Cluster(
        model,
        unified=1,
        chunked_prefill_size=48,
        kv_cache_tokens=1280,
        reserved_decode_tokens=1,
        prefill_settings={"page_size": pages[0]},
        decode_settings={"page_size": pages[1]},
        **settings,
    ) as cluster:
        token_bytes = cluster.decode[0].node.core.engine.layout.token_bytes
        for turn in range(2):
            sent = [
                cluster.client.generate(p, where, max_tokens=70, n=2 if i == 2 else 1)
                for i, p in enumerate(prompts)
                for where in (cluster.pair, cluster.unified)
            ]
            for i, request in enumerate(sent):
                # KV in fp8 is not transformers', but all nodes have the same.
                if "kv_cache_dtype" in settings:
                    assert request.result(90) == sent[i - i % 2].result(90), (seed, i)
                    continue
                for tokens in request.result(90):
                    assert is_greedy(model, prompts[i // 2], tokens), (seed, i)
            first = sent[0].transferred_bytes
            if turn == 0:
                # Half of the layers send the last tokens only.
                assert first is not None and first < 0.65 * 500 * token_bytes
            else:
                assert sum(request.cached_tokens or 0 for request in sent) > 0
        cluster.wait_idle()
        # Large pages are reserved ahead.
        retracted = any(counter(node, "pd_retractions_total") for node in cluster.nodes)
        assert retracted or pages[1] > 4
