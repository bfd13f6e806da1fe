"""A KV cache in fp8: tokens equal transformers' with a cache that is rounded to fp8, whatever the
chunks, pages, cached prefixes, hand-offs and ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import LATENT, is_greedy
from cluster import Cluster
from counters import counter
from fp8_kv import SCALES, is_fp8_greedy, make_scaled_checkpoint, repeated_prompts

from pd.core.errors import PDError

if TYPE_CHECKING:
    from pathlib import Path

FP8 = {"kv_cache_dtype": "fp8_e4m3"}
NGRAM = {
    "speculative_algorithm": "ngram",
    # Some texts hardly repeat themselves, but the second turn repeats the first.
    "speculative_ngram_cache": "on",
    "speculative_adaptive": "off",
}
ARCHITECTURES = ("llama3", "qwen3", "mistral", "gpt_oss", "glm4_moe", *LATENT)
# Page sizes of P and D, tokens of a chunk, further settings.
DEPLOYMENTS: dict[str, tuple[tuple[int, int], int, dict[str, Any]]] = {
    "pages of 16 and 64, drafts": ((16, 64), 24, NGRAM),
    "pages of 64 and 1": ((64, 1), 5, {}),
    "pages of 1 and 16, digests, drafts": ((1, 16), 100, {"kv_digest": True, **NGRAM}),
    "two ranks": ((16, 16), 24, {"tp_size": 2}),
}
QUICK = {("qwen3", "pages of 16 and 64, drafts"), ("deepseek_v2", "pages of 64 and 1")}


@pytest.mark.parametrize(
    ("architecture", "deployment"),
    [
        pytest.param(each, name, marks=() if (each, name) in QUICK else pytest.mark.full)
        for each in ARCHITECTURES
        for name in DEPLOYMENTS
    ],
)
def test_tokens_equal_a_reference_with_a_cache_in_fp8(
    architecture: str, deployment: str, tmp_path: Path, seed: int
) -> None:
    pages, chunk, settings = DEPLOYMENTS[deployment]
    more = {"sliding_window": 20} if architecture == "mistral" else {}
    model = make_scaled_checkpoint(architecture, tmp_path, **more)
    prompts = repeated_prompts(seed)
    with Cluster(
        model,
        unified=1,
        chunked_prefill_size=chunk,
        prefill_settings={"page_size": pages[0]},
        decode_settings={"page_size": pages[1]},
        **FP8,
        **settings,
    ) as cluster:
        differs = False
        for turn in range(2):
            sent = [
                cluster.client.generate(prompt, where, max_tokens=32)
                for prompt in prompts
                for where in (cluster.pair, cluster.unified)
            ]
            for i, request in enumerate(sent):
                prompt, tokens = prompts[i // 2], request.tokens(60)
                assert is_fp8_greedy(model, prompt, tokens, SCALES), (seed, i)
                differs |= not is_greedy(model, prompt, tokens)
            assert turn == 0 or sum(request.cached_tokens or 0 for request in sent) > 0
        assert differs, "the reference does not notice whether the cache is in fp8"
        cluster.wait_idle()
        if settings.get("speculative_algorithm"):
            assert counter(cluster.decode[0], "pd_speculative_drafted_total") > 0


def test_a_cache_in_fp8_takes_a_quarter_of_float32_in_the_pool_and_on_the_wire(
    tmp_path: Path,
) -> None:
    model = make_scaled_checkpoint("qwen3", tmp_path)
    prompt, moved, sizes = list(range(40)), [], []
    for dtype in ("auto", "fp8_e4m3"):
        with Cluster(model, kv_cache_dtype=dtype) as cluster:
            request = cluster.client.generate(prompt, cluster.pair)
            request.result()
            moved.append(request.transferred_bytes)
            sizes.append(cluster.decode[0].node.engine.pool.memory.nbytes)
    assert moved == [40 * 3 * 2 * 2 * 32 * width for width in (4, 1)]
    assert sizes[0] == 4 * sizes[1]


def test_nodes_with_caches_of_different_dtypes_refuse_each_other(tmp_path: Path) -> None:
    model = make_scaled_checkpoint("qwen3", tmp_path)
    with (
        Cluster(model, prefill_settings=FP8) as cluster,
        pytest.raises(PDError) as raised,
    ):
        cluster.client.generate([1, 2, 3], cluster.pair).result()
    message = str(raised.value)
    assert "--kv-cache-dtype differs: prefill node" in message
    assert "'fp8_e4m3'" in message
    assert "'auto'" in message
    assert "\n" not in message
