"""The forward pass on a GPU: KV leaves while later layers are computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import tiny_model

from pd.core.config import NodeConfig
from pd.engine.engine import Engine
from pd.engine.forward_item import ForwardItem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_nothing_between_groups_of_layers_waits_for_the_gpu() -> None:
    """Torch raises where an operation would wait."""
    config = NodeConfig(
        role="prefill",
        model=tiny_model(),
        device="cuda",
        dtype="float32",
        load_format="dummy",
        page_size=4,
        kv_cache_tokens=1024,
    )
    engine = Engine.build(config)
    layers = engine.layout.num_layers
    item = ForwardItem(np.arange(40, dtype=np.int32), 0, np.arange(10, dtype=np.int32))
    engine.runner.last_alone_from = 0
    engine.runner.forward([item])  # compiles and allocates
    reported = []

    def layers_done(first: int, stop: int) -> None:
        reported.append((first, stop))
        torch.cuda.set_sync_debug_mode("default" if stop == layers else "error")

    try:
        engine.runner.forward([item], layers_done)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert reported == [(layer, layer + 1) for layer in range(layers)]
