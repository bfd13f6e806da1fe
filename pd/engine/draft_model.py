"""A smaller model that drafts tokens for the node's model, with its own KV pool."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pd.core.node_info import KVLayout
from pd.engine.cuda_graphs import GraphRecorder
from pd.engine.engine import (
    choose_graph_sizes,
    choose_kv_dtype,
    find_context_length,
    find_rank_device,
)
from pd.engine.footprint import ExtraMemory, measure_draft_memory
from pd.engine.kv_pool import DTYPES, KVPool
from pd.engine.model_runner import ModelRunner
from pd.engine.step_graphs import capture_drafting
from pd.kernels.attention import find_attention_backend
from pd.models.config_reader import read_draft_config, read_model_config
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
        config: configuration of the node.
        max_context: longest sequence in tokens, including its draft.
        lasting_bytes: memory of CUDA graphs and work space on a GPU, in addition to weights and KV.
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
        """Load the whole model at ``path`` for a node with this configuration.

        On a GPU this also captures the largest CUDA graphs and drops them again. We have to measure
        their memory first, because the node's pool takes everything that is left.

        Raises:
            UsageError: the vocabulary differs from the node's model, or loading fails.
        """
        target = read_model_config(config.model)
        own = read_draft_config(path, target)
        device = find_rank_device(config, 0)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dtype = choose_kv_dtype(config.dtype, target.dtype, device)
        attention = find_attention_backend(
            config.attention_backend,
            device,
            DTYPES[dtype],
            own.head_dim,
            latent=own.latent is not None,
            windows=own.needs_windows,
        )
        model = load_model(
            path,
            own,
            dtype=DTYPES[dtype],
            device=device,
            load_format=config.load_format,
            seed=config.seed,
        )
        layout = KVLayout((own.make_plane(dtype),), config.page_size)
        longest = find_context_length(config, target) + config.speculative_num_draft_tokens
        max_context = min(own.context_length, longest)
        sizes = choose_graph_sizes(config, device)
        lasting = measure_draft_memory(model, layout, attention, config, sizes, max_context)
        return cls(model, layout, attention, device, config, max_context, lasting)

    @property
    def memory(self) -> ExtraMemory:
        """Memory on the device in addition to the weights."""
        return ExtraMemory(KVPool.count_page_bytes(self.layout), self.lasting_bytes)

    def make_runner(self, num_pages: int) -> ModelRunner:
        """Make a runner with a pool of ``num_pages``. On a GPU, capture its CUDA graphs if the node
        has graphs of decode steps."""
        pool = KVPool(self.layout, num_pages, self.device)
        runner = ModelRunner.build(self.model, pool, self.attention, prompts=False)
        sizes = choose_graph_sizes(self.config, self.device)
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
