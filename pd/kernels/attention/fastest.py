"""The backend that ``auto`` chooses if FlashInfer and Triton both work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.kernels.attention.flashinfer_backend import FlashInferAttention
from pd.kernels.attention.triton_backend import TritonAttention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.kernels.attention.base import (
        DecodeAttention,
        DraftAttention,
        LatentShape,
        MixedAttention,
        PagedKV,
        VerifyAttention,
    )


class FastestAttention(FlashInferAttention):
    """Attention by FlashInfer outside of CUDA graphs, and by our Triton kernel in graphs of decode
    steps. Each is the faster one there on an H200, except for one long sequence
    (``benchmarks/attention.py`` measures both). Only Triton has graphs of mixed steps and graphs
    that verify and draft."""

    name = "flashinfer+triton"

    def __init__(
        self,
        pool: PagedKV,
        num_heads: int,
        latent: LatentShape | None = None,
        windows: Sequence[int] = (),
    ) -> None:
        super().__init__(pool, num_heads, latent, windows)
        self._triton = TritonAttention(pool, num_heads)

    def make_decode_graph(self, rows: int, max_context: int) -> DecodeAttention:
        return self._triton.make_decode_graph(rows, max_context)

    def make_verify_graph(self, rows: int, max_context: int) -> VerifyAttention:
        return self._triton.make_verify_graph(rows, max_context)

    def make_mixed_graph(
        self, tokens: int, singles: int, chunks: int, max_context: int
    ) -> MixedAttention:
        return self._triton.make_mixed_graph(tokens, singles, chunks, max_context)

    def make_draft_graph(self, rows: int, max_context: int, first_key: int = 0) -> DraftAttention:
        return self._triton.make_draft_graph(rows, max_context, first_key)
