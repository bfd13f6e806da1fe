"""The interface of draft heads: layers that draft tokens from a target's hidden states.

EAGLE heads (:mod:`pd.models.eagle`) have a checkpoint of their own. MTP layers
(:mod:`pd.models.mtp`) belong to that of the target.

The slot of token ``t`` in a head's KV joins the fused hidden state of token ``t - 1`` with the
embedding of token ``t``, at rotary position ``t``. Its output predicts token ``t + 1``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Protocol

from torch import nn

if TYPE_CHECKING:
    import torch

    from pd.core.config import NodeConfig
    from pd.kernels.attention import LatentShape, PagedKV, PlannedAttention
    from pd.kernels.draft_tensors import States
    from pd.models.config import ModelConfig


class HeadConfig(Protocol):
    """Configuration of a head, and the states of the target that it reads.

    Attributes:
        algorithm: its name in messages.
        plane_name: name of the plane of the KV pool that holds its KV.
        layer: the decoder layer, as a model of one layer. Its vocabulary is the target's.
        aux_layers, normed: see ``aux_layers`` and ``aux_normed`` of
            :class:`pd.models.causal_lm.CausalLM`.
        hidden_size: width of its hidden states.
    """

    @property
    def algorithm(self) -> str: ...

    @property
    def plane_name(self) -> str: ...

    @property
    def layer(self) -> ModelConfig: ...

    @property
    def aux_layers(self) -> tuple[int, ...]: ...

    @property
    def normed(self) -> bool: ...

    @property
    def hidden_size(self) -> int: ...

    def identify(self, config: NodeConfig) -> str:
        """Return the algorithm, and a digest of everything that determines the head's KV unless the
        model's identity (:mod:`pd.engine.identity`) has it."""


class DraftHead(nn.Module):
    """A decoder layer with an output head. It is whole on one rank, even if its target is divided
    among several.

    Attributes:
        target_ids: int64 ``[draft_vocab_size]``, the target's token id for each column of the
            logits; None if both vocabularies are equal.
        first_key: position of the first key that drafts see, 0 or 1.
        latent: latent attention of its KV; None if it has K and V.
    """

    config: HeadConfig
    target_ids: torch.Tensor | None = None
    first_key = 0
    latent: LatentShape | None = None

    @abstractmethod
    def fuse_features(self, features: torch.Tensor) -> torch.Tensor:
        """Fuse the target's features ``[tokens, feature_size]`` into hidden states ``[tokens,
        hidden_size]``."""

    @abstractmethod
    def write_kv(
        self,
        token_ids: torch.Tensor,
        fused: States,
        positions: torch.Tensor,
        kv: PagedKV,
        slots: torch.Tensor,
    ) -> None:
        """Write the KV of pairs of a token and the fused hidden state of the token before it.

        Args:
            token_ids, positions: int64 ``[tokens]``.
            fused: ``tokens`` rows of ``hidden_size`` in the head's dtype, from
                :meth:`fuse_features` or :meth:`forward`.
            kv: a pool of one layer.
            slots: int64 ``[tokens]``.
        """

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor,
        fused: torch.Tensor,
        positions: torch.Tensor,
        attention: PlannedAttention,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft the token after each pair of a token and the fused hidden state of the token before
        it. The KV of the pairs is written.

        Args:
            token_ids, positions: as for :meth:`write_kv`.
            fused: ``[tokens, hidden_size]``.
            attention: planned for exactly these tokens, over a pool of one layer.

        Returns:
            Logits ``[tokens, draft_vocab_size]``, and states ``[tokens, hidden_size]``, which
            replace the fused hidden states of ``token_ids`` in the next draft; both in the head's
            dtype.
        """
