"""Ranks of a tensor-parallel model as threads of one process, with a model each."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from pd.core.node_info import KVLayout
from pd.engine.kv_pool import KVPool
from pd.engine.model_runner import ModelRunner
from pd.kernels.attention import make_attention_backend
from pd.models.config_reader import read_model_config
from pd.models.latent_attention import find_latent_shape
from pd.models.loader import load_model
from pd.models.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Threads:
    """Ranks that are threads: each puts down what it has and takes what the others put."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._slots: list[Any] = [None] * size

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._slots[rank] = x.clone()
        self._barrier.wait(30)
        everything = list(self._slots)
        self._barrier.wait(30)
        return everything

    def run(self, work: Callable[[Rank], Any]) -> list[Any]:
        """The results of ``work`` on every rank."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(work, [Rank(self, rank) for rank in range(self.size)]))


class Rank(TensorParallel):
    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads, self.rank, self.size = threads, rank, threads.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._threads.exchange(self.rank, x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._threads.exchange(self.rank, x), dim=1)

    def broadcast(self, x: torch.Tensor) -> None:
        x.copy_(self._threads.exchange(self.rank, x)[0])


def make_runner(path: Path, tp: TensorParallel, **settings: Any) -> ModelRunner:
    config = read_model_config(path)
    model = load_model(path, config, dtype=torch.float32, device="cpu", tp=tp, **settings)
    layout = KVLayout((model.config.make_plane("float32"),), page_size=16)
    pool = KVPool(layout, 128, "cpu")
    latent = find_latent_shape(config)
    attention = make_attention_backend("auto", pool, model.config.num_heads, latent, config.windows)
    return ModelRunner(model, pool, attention)
