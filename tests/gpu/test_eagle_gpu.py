"""EAGLE heads and the hidden states that they read: a GPU computes what a CPU does, and nothing of
it waits for the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from pd.core.node_info import KVLayout
from pd.embedded import EMBEDDED_MODEL
from pd.engine.kv_pool import KVPool
from pd.kernels.attention import AttentionBatch, make_attention_backend
from pd.kernels.draft_tensors import States
from pd.models.config_reader import read_model_config
from pd.models.eagle import load_eagle_head
from pd.models.eagle_config import EagleConfig
from pd.models.loader import load_model

if TYPE_CHECKING:
    from pd.kernels.attention import AttentionBackend
    from pd.models.config import ModelConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOKENS, PAGE = 40, 16


def attention_for(config: ModelConfig, device: str) -> AttentionBackend:
    """Planned for one sequence of TOKENS new tokens in a pool of its own."""
    layout = KVLayout.of_model(
        config.num_layers, config.num_kv_heads, config.head_dim, "float32", PAGE
    )
    pages = np.arange(-(-TOKENS // PAGE), dtype=np.int32)[::-1].copy()
    attention = make_attention_backend("auto", KVPool(layout, len(pages), device), config.num_heads)
    attention.plan(AttentionBatch(np.array([0]), np.array([TOKENS]), [pages]))
    return attention


@torch.inference_mode()
def results_on(name: str, device: str) -> list[torch.Tensor]:
    """Features, logits and hidden states, and the pool as :meth:`EagleHead.forward` and
    :meth:`EagleHead.write_kv` leave it; on the CPU."""
    path = EMBEDDED_MODEL.parent / name
    config = read_model_config(EMBEDDED_MODEL)
    own = EagleConfig.from_pretrained(path, config)
    target = load_model(EMBEDDED_MODEL, config, dtype=torch.float32, device=device, progress=False)
    head = load_eagle_head(path, own, target, dtype=torch.float32, device=device, progress=False)
    target.aux_layers, target.aux_normed = own.aux_layers, own.normed
    tokens = torch.arange(100, 100 + TOKENS, device=device)
    places = torch.arange(TOKENS, device=device)
    rows = torch.tensor([TOKENS - 1], device=device)
    features = torch.empty(TOKENS, own.feature_size, device=device)
    for attempt in range(2):
        planned = attention_for(config, device)
        drafting, writing = (attention_for(own.layer, device) for _ in range(2))
        if attempt and device == "cuda":  # kernels are compiled
            torch.cuda.set_sync_debug_mode("error")
        try:
            target.forward(tokens, places, planned, rows=rows, features=features)
            fused = head.fuse_features(features)
            logits, hidden = head(tokens, fused, places, drafting)
            pool = writing.pool
            head.write_kv(
                tokens,
                States.from_rows(fused),
                places,
                pool,
                writing.slots,
            )
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    found = [features, logits, hidden]
    found += [
        part
        for each in (drafting, writing)
        for part in (each.pool.get_keys(0), each.pool.get_values(0))
    ]
    return [tensor.cpu() for tensor in found]


@pytest.mark.parametrize("name", ["embedded-eagle", "embedded-eagle3"])
def test_a_gpu_computes_what_a_cpu_does(name: str) -> None:
    expected, found = results_on(name, "cpu"), results_on(name, "cuda")
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[-2:], found[-4:-2], rtol=1e-3, atol=1e-3)
