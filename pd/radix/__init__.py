"""Radix cache: knows which KV pages hold which token prefixes. No torch, no device memory.

The cache only handles page *ids*. Its caller allocates pages, writes them and decides when to
evict; see :class:`RadixCache`.
"""

from pd.radix.cache import InsertResult, MatchResult, RadixCache
from pd.radix.invariants import check_invariants
from pd.radix.policies import EVICTION_POLICIES
from pd.radix.tree_node import IntArray, TreeNode

__all__ = [
    "EVICTION_POLICIES",
    "InsertResult",
    "IntArray",
    "MatchResult",
    "RadixCache",
    "TreeNode",
    "check_invariants",
]
