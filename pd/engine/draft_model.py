"""A smaller model beside the node's, with a KV pool of its own, that drafts tokens for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.core.node_info import KVLayout
from pd.engine.engine import kv_dtype, rank_device
from pd.engine.kv_pool import DTYPES, KVPool
from pd.engine.model_runner import ModelRunner
from pd.kernels.attention import find_attention_backend
from pd.models.config import ModelConfig, draft_config
from pd.models.loader import load_model

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from pd.core.config import NodeConfig
    from pd.kernels.attention import AttentionBackend
    from pd.models.causal_lm import CausalLM


@dataclass(frozen=True)
class DraftModel:
    """Weights on the device of the node's first rank, in the node's dtype."""

    model: CausalLM
    layout: KVLayout
    attention: type[AttentionBackend]
    device: torch.device

    @classmethod
    def load(cls, config: NodeConfig, path: Path) -> DraftModel:
        """Load the model of ``path``, whole, for a node of this configuration.

        Raises:
            UsageError: its vocabulary is not that of the node's model, or it cannot be loaded.
        """
        target = ModelConfig.from_pretrained(config.model)
        own = draft_config(path, target)
        device = rank_device(config, 0)
        dtype = kv_dtype(config.dtype, target.dtype, device)
        attention = find_attention_backend(
            config.attention_backend, device, DTYPES[dtype], own.head_dim
        )
        model = load_model(
            path,
            own,
            dtype=DTYPES[dtype],
            device=device,
            load_format=config.load_format,
            seed=config.seed,
        )
        layout = KVLayout.of_model(
            num_layers=own.num_layers,
            num_kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            dtype=dtype,
            page_size=config.page_size,
        )
        return cls(model, layout, attention, device)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of its KV."""
        return KVPool.page_bytes(self.layout)

    def runner(self, num_pages: int) -> ModelRunner:
        """Make a pool of as many pages and a runner over it."""
        pool = KVPool(self.layout, num_pages, self.device)
        return ModelRunner.build(self.model, pool, self.attention, prompts=False)
