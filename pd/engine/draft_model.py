"""A smaller model beside the node's, with a KV pool of its own, that drafts tokens for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pd.core.node_info import KVLayout
from pd.engine.cuda_graphs import GraphRecorder
from pd.engine.engine import context_tokens, decode_graph_sizes, kv_dtype, rank_device
from pd.engine.footprint import MemoryBeside, lasting_of_drafting
from pd.engine.kv_pool import DTYPES, KVPool
from pd.engine.model_runner import ModelRunner
from pd.engine.step_graphs import capture_drafting
from pd.kernels.attention import find_attention_backend
from pd.models.config import ModelConfig, draft_config
from pd.models.loader import load_model

if TYPE_CHECKING:
    from pathlib import Path

    from pd.core.config import NodeConfig
    from pd.kernels.attention import AttentionBackend
    from pd.models.causal_lm import CausalLM

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftModel:
    """Weights on the device of the node's first rank, in the node's dtype.

    Attributes:
        config: of the node.
        max_context: tokens that a sequence may have with a draft.
        lasting_bytes: what its CUDA graphs and work space take on a GPU beside weights and KV.
    """

    model: CausalLM
    layout: KVLayout
    attention: type[AttentionBackend]
    device: torch.device
    config: NodeConfig
    max_context: int
    lasting_bytes: int

    @classmethod
    def load(cls, config: NodeConfig, path: Path) -> DraftModel:
        """Load the model of ``path``, whole, for a node of this configuration.

        On a GPU this also captures its largest CUDA graphs and drops them, which tells how much
        memory they take, before the node's pool takes what is left.

        Raises:
            UsageError: its vocabulary is not that of the node's model, or it cannot be loaded.
        """
        target = ModelConfig.from_pretrained(config.model)
        own = draft_config(path, target)
        device = rank_device(config, 0)
        if device.type == "cuda":
            torch.cuda.set_device(device)
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
        longest = context_tokens(config, target) + config.speculative_num_draft_tokens
        max_context = min(own.context_length, longest)
        sizes = decode_graph_sizes(config, device)
        lasting = lasting_of_drafting(model, layout, attention, config, sizes, max_context)
        return cls(model, layout, attention, device, config, max_context, lasting)

    @property
    def memory(self) -> MemoryBeside:
        """What it takes of the device's memory beside its weights."""
        return MemoryBeside(KVPool.page_bytes(self.layout), self.lasting_bytes)

    def runner(self, num_pages: int) -> ModelRunner:
        """Make a pool of as many pages and a runner over it, and capture its CUDA graphs on a GPU
        if the node has some of decode steps."""
        pool = KVPool(self.layout, num_pages, self.device)
        runner = ModelRunner.build(self.model, pool, self.attention, prompts=False)
        sizes = decode_graph_sizes(self.config, self.device)
        if sizes:
            recorder = GraphRecorder(self.device)
            captured = capture_drafting(runner, recorder, self.config, sizes, self.max_context)
            if captured is not None:
                runner.graphs, runner.verify_graphs, runner.mixed_graphs = captured
        if self.device.type == "cuda":
            logger.info(
                "draft model with %s attention and CUDA graphs of %d batch sizes; graphs and work "
                "space were measured to take %.2f GiB",
                *(self.attention.name, 0 if runner.graphs is None else len(runner.graphs.sizes)),
                self.lasting_bytes / 2**30,
            )
        return runner
