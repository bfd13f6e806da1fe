"""EAGLE heads: one decoder layer that drafts tokens from a target's hidden states.

:mod:`pd.models.draft_head` explains the slots of its KV. The computation is that of EAGLE-1 and
EAGLE-2 (Li et al., 2024) or EAGLE-3 (Li et al., 2025). :mod:`pd.models.eagle_config` describes the
supported checkpoints.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import nn

from pd.core.errors import UsageError
from pd.kernels.draft_tensors import Norms, States
from pd.kernels.drafting import join_states
from pd.kernels.linear import linear, pack_weight
from pd.kernels.rope import rotate_and_store
from pd.models.causal_lm import HEAD
from pd.models.checkpoint import find_checkpoint
from pd.models.draft_head import DraftHead
from pd.models.eagle_config import EAGLE3
from pd.models.layers import (
    Attention,
    GatedMLP,
    Linear,
    NamedPlaces,
    RMSNorm,
    Rotary,
    add_prefix,
)
from pd.models.loader import fill_weights, list_shards, load_whole_head, open_shard
from pd.models.matrix import make_parameter
from pd.models.tensor_parallel import SINGLE, WeightDestination

if TYPE_CHECKING:
    from pathlib import Path

    from pd.kernels.attention import PagedKV, PlannedAttention
    from pd.models.causal_lm import CausalLM
    from pd.models.config import ModelConfig
    from pd.models.eagle_config import EagleConfig

# Names of a head's tensors, normalized as in the loaders of SGLang and vLLM.
_EMBEDDING, _BIAS, _TO_TARGET = "embed_tokens.weight", "fc.bias", "d2t"
# This tensor maps target tokens to draft tokens. We do not need it, because d2t holds the same map.
_TO_DRAFT = "t2d"
# Rows of the embedding to compare with the target's at a time.
_ROWS = 8192


class HeadAttention(Attention):
    """The attention of a head. It can also write K and V alone."""

    def __init__(self, config: ModelConfig, input_size: int) -> None:
        super().__init__(config, 0, SINGLE, input_size)
        self._kv_weight: torch.Tensor | None = None

    def prepare_weights(self) -> None:
        """Lay out the projections to K and V separately. Call this before the projection to Q, K
        and V is laid out."""
        # On a GPU this is the same memory.
        self._kv_weight = pack_weight(
            self.qkv.matrix.values[self._heads * self._head_dim :].detach()
        )

    def write_kv(
        self,
        x: torch.Tensor,
        cos_sin: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write K and V of the rows of ``x``, as :meth:`forward` does."""
        assert self._kv_weight is not None, "prepare() comes first"
        bias = self.qkv.bias
        kv = linear(
            x, self._kv_weight, None if bias is None else bias[self._heads * self._head_dim :]
        )
        rotate_and_store(
            kv.view(len(x), -1, self._head_dim),
            0,
            self._kv_heads,
            cos_sin,
            keys,
            values,
            slots,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self._eps,
        )


class EagleHead(DraftHead):
    """The layer that all EAGLE heads share. Subclasses define its inputs and outputs.

    Args:
        embedding: the target's, ``[vocab_size, hidden_size]``; None if the head has its own.
        head: another model's output head, ready for :func:`pd.kernels.linear.linear`; None if the
            head has its own.
    """

    config: EagleConfig
    embedding: torch.Tensor
    head: torch.Tensor

    def __init__(
        self,
        config: EagleConfig,
        fc: Linear,
        input_size: int,
        embedding: torch.Tensor | None,
        head: torch.Tensor | None,
    ) -> None:
        super().__init__()
        layer, hidden = config.layer, config.hidden_size
        self.config = config
        self.fc = fc
        self.attention = HeadAttention(layer, input_size)
        self.mlp_norm = RMSNorm(hidden, layer.rms_norm_eps)
        self.mlp = GatedMLP(layer, SINGLE)
        # Shared tensors are not parameters of the head.
        self.embedding = (
            make_parameter(layer.vocab_size, hidden) if embedding is None else embedding.detach()
        )
        if layer.tie_word_embeddings and config.algorithm == EAGLE3:
            head = self.embedding
        self.head = (
            make_parameter(config.draft_vocab_size, hidden) if head is None else head.detach()
        )
        self._rotary = Rotary(layer, self.embedding.device)

    @abstractmethod
    def _join_inputs(
        self, token_ids: torch.Tensor, fused: States
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Make the input of attention and the residual stream, which may be overwritten. The latter
        is None if it starts as ``fused``."""

    @abstractmethod
    def _finish_layer(
        self, residual: torch.Tensor, update: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``update`` to ``residual`` in place. Returns the input of the output head and the
        hidden state for the next draft."""

    def write_kv(
        self,
        token_ids: torch.Tensor,
        fused: States,
        positions: torch.Tensor,
        kv: PagedKV,
        slots: torch.Tensor,
    ) -> None:
        """See :class:`pd.models.draft_head.DraftHead`."""
        x, _ = self._join_inputs(token_ids, fused)
        cos_sin = self._rotary.compute_rotations(positions)
        self.attention.write_kv(x, cos_sin, kv.get_keys(0), kv.get_values(0), slots)

    def forward(
        self,
        token_ids: torch.Tensor,
        fused: torch.Tensor,
        positions: torch.Tensor,
        attention: PlannedAttention,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`pd.models.draft_head.DraftHead`."""
        x, residual = self._join_inputs(token_ids, States.from_rows(fused))
        attended = self.attention(x, self._rotary.compute_rotations(positions), attention)
        if residual is None:
            residual = fused + attended
            normed = self.mlp_norm(residual)
        else:
            normed = self.mlp_norm.add_and_norm(residual, attended)
        output, hidden = self._finish_layer(residual, self.mlp(normed))
        return linear(output, self.head), hidden

    def prepare_weights(self) -> None:
        """Lay the weights out for the kernels. Call this once, after loading. Afterwards you may
        not access a weight by name."""
        self.attention.prepare_weights()
        for module in self.modules():
            if isinstance(module, Linear):
                module.prepare_weights()
        if isinstance(self.head, nn.Parameter):
            self.head = nn.Parameter(pack_weight(self.head), requires_grad=False)

    def list_tensors(self) -> NamedPlaces:
        """List the tensors to read from the checkpoint, except d2t, and the memory of each."""
        yield from self.fc.list_tensors()
        yield from add_prefix("layers.0.self_attn", self.attention.list_tensors())
        yield from add_prefix("layers.0.post_attention_layernorm", self.mlp_norm.list_tensors())
        yield from add_prefix("layers.0.mlp", self.mlp.list_tensors())
        if isinstance(self.embedding, nn.Parameter):
            yield _EMBEDDING, WeightDestination(self.embedding)
        if isinstance(self.head, nn.Parameter):
            yield HEAD, WeightDestination(self.head)


class Eagle1Head(EagleHead):
    """EAGLE-1 and EAGLE-2. ``fc`` joins the embedding and the target's last hidden state. The layer
    starts without a norm, and its output goes directly to the target's output head."""

    def __init__(
        self,
        config: EagleConfig,
        embedding: torch.Tensor | None,
        head: torch.Tensor | None,
        *,
        fc_bias: bool,
    ) -> None:
        hidden = config.hidden_size
        fc = Linear({"fc": hidden}, 2 * hidden, fc_bias)
        super().__init__(config, fc, hidden, embedding, head)

    def fuse_features(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def _join_inputs(
        self, token_ids: torch.Tensor, fused: States
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = self.fc(join_states(token_ids, self.embedding, fused, None))
        return x, x

    def _finish_layer(
        self, residual: torch.Tensor, update: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = residual.add_(update)
        return hidden, hidden


class Eagle3Head(EagleHead):
    """EAGLE-3. ``fc`` fuses the target's hidden states of several layers. Attention reads the
    embedding and the fused hidden state side by side, each normalized."""

    def __init__(
        self,
        config: EagleConfig,
        embedding: torch.Tensor | None,
        head: torch.Tensor | None,
        *,
        fc_bias: bool,
    ) -> None:
        hidden, eps = config.hidden_size, config.layer.rms_norm_eps
        fc = Linear({"fc": hidden}, config.feature_size, fc_bias)
        super().__init__(config, fc, 2 * hidden, embedding, head)
        self.embedding_norm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.norm = RMSNorm(hidden, eps)
        self._eps = eps

    def fuse_features(self, features: torch.Tensor) -> torch.Tensor:
        fused: torch.Tensor = self.fc(features)
        return fused

    def _join_inputs(
        self, token_ids: torch.Tensor, fused: States
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        norms = Norms(self.embedding_norm.weight, self.hidden_norm.weight, self._eps)
        x = join_states(token_ids, self.embedding, fused, norms)
        if not self.config.norm_before_residual:
            return x, None
        return x, x[:, self.config.hidden_size :].contiguous()

    def _finish_layer(
        self, residual: torch.Tensor, update: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm.add_and_norm(residual, update), residual

    def list_tensors(self) -> NamedPlaces:
        yield from super().list_tensors()
        yield from add_prefix("layers.0.input_layernorm", self.embedding_norm.list_tensors())
        yield from add_prefix("layers.0.hidden_norm", self.hidden_norm.list_tensors())
        yield from add_prefix("norm", self.norm.list_tensors())


def load_eagle_head(
    path: str | Path,
    config: EagleConfig,
    target: CausalLM,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = True,
    target_path: str | Path | None = None,
) -> EagleHead:
    """Build the head of ``config`` and fill its weights.

    The embedding and the output head are the target's unless the checkpoint holds others.

    Args:
        path: the checkpoint's directory (or an id in the local cache); not read for ``dummy``.
        target: the model, loaded and prepared, on ``device`` and in ``dtype``.
        load_format, seed, progress: as for :func:`pd.models.loader.load_model`.
        target_path: the target's checkpoint. If its ranks divide the output head and this head has
            none, the whole head is read from there.

    Raises:
        UsageError: the weights are missing or do not match ``config`` (names the tensor), or a
            divided output head is needed and ``target_path`` is None.
    """
    is_dummy = load_format == "dummy"
    stored = set() if is_dummy else _list_stored_names(find_checkpoint(path))
    embedding: torch.Tensor | None = target.embedding
    if config.hidden_size != target.config.hidden_size or (
        _EMBEDDING in stored and not _has_target_embedding(find_checkpoint(path), target.embedding)
    ):
        embedding = None
    head = None
    if _needs_target_head(config, stored, is_dummy):
        head = _load_target_head(target, target_path, load_format, seed, path)
    kind = Eagle3Head if config.algorithm == EAGLE3 else Eagle1Head
    with torch.device(device):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            fc_bias = config.fc_bias if is_dummy else _BIAS in stored
            eagle = kind(config, embedding, head, fc_bias=fc_bias)
        finally:
            torch.set_default_dtype(previous)
    shared = {_TO_TARGET, _TO_DRAFT} | ({_EMBEDDING} if embedding is not None else set())
    fill_weights(
        dict(eagle.list_tensors()),
        path,
        load_format,
        seed,
        progress,
        SINGLE,
        lambda name, stored, shard: _normalize_name(name) in shared,
        _normalize_name,
    )
    eagle.target_ids = _read_target_ids(path, config, is_dummy, _TO_TARGET in stored, device)
    eagle.prepare_weights()
    return eagle.eval()


def _normalize_name(name: str) -> str:
    """Reduce the spellings of a tensor's name to one."""
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _list_stored_names(directory: Path) -> set[str]:
    names: set[str] = set()
    for shard in list_shards(directory):
        with open_shard(shard) as stored:
            names.update(map(_normalize_name, stored.keys()))
    return names


def _read_tensor(directory: Path, wanted: str) -> torch.Tensor:
    """Read an existing tensor to the CPU."""
    for shard in list_shards(directory):
        with open_shard(shard) as stored:
            for name in stored.keys():  # noqa: SIM118
                if _normalize_name(name) == wanted:
                    return stored.get_tensor(name)
    raise AssertionError(f"{wanted} is among the stored names")


def _has_target_embedding(directory: Path, embedding: torch.Tensor) -> bool:
    """Whether the checkpoint repeats the target's embedding, in the target's dtype."""
    own = _read_tensor(directory, _EMBEDDING)
    return own.shape == embedding.shape and all(
        torch.equal(rows.to(embedding.device, embedding.dtype), theirs)
        for rows, theirs in zip(own.split(_ROWS), embedding.split(_ROWS), strict=True)
    )


def _needs_target_head(config: EagleConfig, stored: set[str], is_dummy: bool) -> bool:
    """Whether the output head is the target's. EAGLE-1's is. EAGLE-3's is if the checkpoint holds
    none and both have the same tokens."""
    if config.algorithm != EAGLE3:
        return HEAD not in stored
    is_alike = (config.draft_vocab_size, config.hidden_size) == (
        config.layer.vocab_size,
        config.target_hidden_size,
    )
    is_tied = config.layer.tie_word_embeddings
    return is_alike and not is_dummy and not is_tied and HEAD not in stored


def _load_target_head(
    target: CausalLM, target_path: str | Path | None, load_format: str, seed: int, path: str | Path
) -> torch.Tensor:
    """Return the target's output head, whole and packed."""
    if target.tp.size > 1 and not target.config.tie_word_embeddings and target_path is None:
        raise UsageError(
            f"--speculative-draft-model {path} has no {HEAD}, and --tp-size {target.tp.size} "
            "divides that of the model"
        )
    return load_whole_head(target, target_path or path, load_format, seed)


def _read_target_ids(
    path: str | Path, config: EagleConfig, is_dummy: bool, has_map: bool, device: torch.device | str
) -> torch.Tensor | None:
    """Return :attr:`EagleHead.target_ids`. For each row of the head, the checkpoint's ``d2t`` holds
    the difference between target id and row number."""
    size, vocab_size = config.draft_vocab_size, config.layer.vocab_size
    draft_ids = torch.arange(size)
    if is_dummy:
        ids = draft_ids * vocab_size // size
    elif has_map:
        larger = _read_tensor(find_checkpoint(path), _TO_TARGET)
        if larger.is_floating_point() or larger.shape != (size,):
            raise UsageError(
                f"{path}: tensor {_TO_TARGET} is {larger.dtype} {list(larger.shape)}, "
                f"config.json makes it integers [{size}]"
            )
        ids = draft_ids + larger.long()
    elif size < vocab_size:
        raise UsageError(f"{path} lacks tensor {_TO_TARGET}")
    else:
        return None
    if len(ids.unique()) < size or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise UsageError(f"{path}: tensor {_TO_TARGET} does not name {size} tokens of {vocab_size}")
    return None if torch.equal(ids, torch.arange(vocab_size)) else ids.to(device)
