"""Attention over the paged KV pool: one interface, several backends."""

from pd.kernels.attention.base import (
    AttentionBackend,
    AttentionBatch,
    ChunkAttention,
    DecodeAttention,
    DraftAttention,
    LatentShape,
    MixedAttention,
    PagedKV,
    PlannedAttention,
    VerifyAttention,
)
from pd.kernels.attention.registry import find_attention_backend, make_attention_backend

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "ChunkAttention",
    "DecodeAttention",
    "DraftAttention",
    "LatentShape",
    "MixedAttention",
    "PagedKV",
    "PlannedAttention",
    "VerifyAttention",
    "find_attention_backend",
    "make_attention_backend",
]
