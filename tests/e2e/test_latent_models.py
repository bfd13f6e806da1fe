"""Models with latent attention: shapes of every kind equal transformers' in split deployments of
unequal page sizes, with cached prefixes, drafts, digests and retraction all at once."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import is_greedy, make_checkpoint
from cluster import Cluster, random_prompts
from counters import counter

if TYPE_CHECKING:
    from pathlib import Path

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 256}
_GROUPS = {"n_group": 4, "topk_group": 2}
_DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2 with q_lora, groups and biases": (
        "deepseek_v2",
        {
            **_GROUPS,
            "topk_method": "group_limited_greedy",
            "q_lora_rank": 24,
            "routed_scaling_factor": 2.0,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": _DEFAULT,
        },
    ),
    "v2 without dense layers": (
        "deepseek_v2",
        {"first_k_dense_replace": 0, "n_shared_experts": 1, "tie_word_embeddings": True},
    ),
    "v2 of dense layers only": ("deepseek_v2", {"first_k_dense_replace": 3, "v_head_dim": 32}),
    "v3 without q_lora, YaRN with equal betas": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "rope_parameters": {
                **_YARN,
                **{"factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0},
                **{"beta_fast": 1, "beta_slow": 1},
            },
        },
    ),
    "v3 without groups, rotating halves": (
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "rope_interleave": False, "norm_topk_prob": False},
    ),
    "v3 with one rotated pair": (
        "deepseek_v3",
        {"qk_rope_head_dim": 2, "n_shared_experts": 2, "attention_bias": True},
    ),
}
PAGE_SIZES = [(1, 16), (16, 64), (64, 1)]
# Shape by shape with other page sizes; the rest of the matrix is for make test-all.
SAMPLE = {"v2 with q_lora, groups and biases": (1, 16), "v3 with one rotated pair": (64, 1)}


@pytest.mark.parametrize(
    ("shape", "pages"),
    [
        pytest.param(shape, pages, marks=() if SAMPLE.get(shape) == pages else pytest.mark.full)
        for shape in SHAPES
        for pages in PAGE_SIZES
    ],
)
def test_tokens_equal_transformers_with_all_features(
    shape: str, pages: tuple[int, int], tmp_path: Path, seed: int
) -> None:
    architecture, settings = SHAPES[shape]
    model = make_checkpoint(architecture, tmp_path, **settings)
    rng = random.Random(seed)
    # Texts that repeat themselves, so that n-grams find something.
    prompts = [p * rng.randrange(2, 5) for p in random_prompts(seed, [9, 20, 31, 40])]
    prompts += [prompts[3][:70] + prompts[0], [rng.randrange(256)]]
    with Cluster(
        model,
        chunked_prefill_size=24,
        kv_digest=True,
        speculative_algorithm="ngram",
        speculative_adaptive="off",
        prefill_settings={"page_size": pages[0]},
        decode_settings={
            "page_size": pages[1],
            "kv_cache_tokens": 320,
            "reserved_decode_tokens": 1,
        },
    ) as cluster:
        for turn in range(2):
            sent = [cluster.client.generate(p, cluster.pair, max_tokens=64) for p in prompts]
            for prompt, request in zip(prompts, sent, strict=True):
                assert is_greedy(model, prompt, request.tokens(60)), seed
            assert turn == 0 or sum(request.cached_tokens or 0 for request in sent) > 0
        cluster.wait_idle()
        decode = cluster.decode[0]
        # Large pages are reserved ahead, so no sequence outgrows its reservation.
        assert pages[1] == 64 or counter(decode, "pd_retractions_total") > 0
        assert counter(decode, "pd_speculative_drafted_total") > 0
