"""Multi-token prediction (MTP): the layer after the last one of a checkpoint as a draft head.

After DeepSeek-V3's report (2024), section 2.2. GLM-4.5 and later have the same layer. The report
and the checkpoints differ, so we took the following from transformers' ``MtpModel``, vLLM's
``deepseek_mtp.py`` and SGLang's ``deepseek_nextn.py``:

- ``eh_proj`` reads the embedding, normed by ``enorm``, and then the hidden state, normed by
  ``hnorm``. The report has them in the other order.
- The hidden state is the target's after its final norm. For a further draft it is the layer's own
  after ``shared_head.norm``, as in transformers and SGLang; vLLM's is the one before that norm.
- A pair is a hidden state and the token after it. transformers rotates it by the position of that
  token, and so do we. vLLM and SGLang rotate by the position before. Attention depends on
  differences of positions alone, so this changes nothing.
- The first token of a sequence has no hidden state before it, and so no pair in transformers and
  SGLang. Therefore drafts do not see its key. (vLLM has no such pair either, but clears the
  embedding in the first one that exists.)
- Embedding and output head are the target's. Checkpoints hold copies of them, which we do not read,
  like transformers and SGLang.
- Published checkpoints have one such layer. For several drafts it reads its own output again and
  again. Of several layers, we use the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pd.core.errors import UsageError
from pd.kernels.attention import PlannedAttention
from pd.kernels.draft_tensors import Norms, States
from pd.kernels.drafting import join_states
from pd.kernels.linear import linear
from pd.models.causal_lm import DecoderLayer, prepare_layers
from pd.models.checkpoint import find_checkpoint
from pd.models.draft_head import DraftHead
from pd.models.latent_attention import find_latent_shape
from pd.models.layers import Linear, NamedPlaces, RMSNorm, Rotary, add_prefix
from pd.models.loader import fill_module, list_shards, load_whole_head, open_shard
from pd.models.scales import is_unused
from pd.models.tensor_parallel import SINGLE

if TYPE_CHECKING:
    from pathlib import Path

    from pd.kernels.attention import PagedKV
    from pd.models.causal_lm import CausalLM
    from pd.models.mtp_config import MtpConfig

# Tensors of the layer that we do not read.
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")


class MtpHead(DraftHead):
    """An MTP layer.

    Args:
        layer: its decoder layer, the first one of its KV pool.
        embedding: the target's, ``[vocab_size, hidden_size]``.
        head: the target's output head, ready for :func:`pd.kernels.linear.linear`.
    """

    first_key = 1
    config: MtpConfig

    def __init__(
        self, config: MtpConfig, layer: DecoderLayer, embedding: torch.Tensor, head: torch.Tensor
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.layer.rms_norm_eps
        self.config = config
        self.embedding_norm, self.hidden_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        quantization = config.layer.quantization
        self.join = Linear({"eh_proj": hidden}, 2 * hidden, quantization=quantization)
        self.layer = layer
        self.norm = RMSNorm(hidden, eps)
        # Shared tensors are not parameters of the head.
        self.embedding, self.head = embedding.detach(), head.detach()
        self._norms = Norms(self.embedding_norm.weight, self.hidden_norm.weight, eps)
        self.latent = find_latent_shape(config.layer)
        self._no_rows = torch.empty(0, dtype=torch.int64, device=embedding.device)
        self._rotary = Rotary(config.layer, embedding.device)

    def fuse_features(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def write_kv(
        self,
        token_ids: torch.Tensor,
        fused: States,
        positions: torch.Tensor,
        kv: PagedKV,
        slots: torch.Tensor,
    ) -> None:
        """See :class:`pd.models.draft_head.DraftHead`."""
        x = self._join_inputs(token_ids, fused)
        cos_sin = self._rotary.compute_rotations(positions)
        self.layer.forward(x, None, cos_sin, _KVWrites(kv, slots), self._no_rows)

    def forward(
        self,
        token_ids: torch.Tensor,
        fused: torch.Tensor,
        positions: torch.Tensor,
        attention: PlannedAttention,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`pd.models.draft_head.DraftHead`."""
        x = self._join_inputs(token_ids, States.from_rows(fused))
        cos_sin = self._rotary.compute_rotations(positions)
        hidden = self.norm.add_and_norm(*self.layer.forward(x, None, cos_sin, attention))
        return linear(hidden, self.head), hidden

    def _join_inputs(self, token_ids: torch.Tensor, fused: States) -> torch.Tensor:
        return self.join.forward(join_states(token_ids, self.embedding, fused, self._norms))

    def list_tensors(self) -> NamedPlaces:
        """List the tensors to read from the checkpoint, and the memory of each."""
        prefix = _name_prefix(self.config)
        yield from add_prefix(f"{prefix}.enorm", self.embedding_norm.list_tensors())
        yield from add_prefix(f"{prefix}.hnorm", self.hidden_norm.list_tensors())
        yield from add_prefix(prefix, self.join.list_tensors())
        yield from add_prefix(prefix, self.layer.list_tensors())
        yield from add_prefix(f"{prefix}.shared_head.norm", self.norm.list_tensors())


class _KVWrites(PlannedAttention):
    """The slots of tokens whose KV is written, but which attend to nothing."""

    def __init__(self, pool: PagedKV, slots: torch.Tensor) -> None:
        self.pool, self.slots = pool, slots

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        raise AssertionError("a layer without wanted rows attends to nothing")


def check_mtp_tensors(path: str | Path, config: MtpConfig) -> None:
    """Raise UsageError unless a checkpoint has the layer, because not all have the one that their
    configuration, or its default, promises."""
    wanted = f"{_name_prefix(config)}.eh_proj.weight"
    directory = find_checkpoint(path)
    for shard in list_shards(directory):
        with open_shard(shard) as stored:
            if wanted in stored.keys():  # noqa: SIM118
                return
    raise UsageError(f"--speculative-algorithm mtp: {directory} lacks tensor {wanted}")


def load_mtp_head(
    path: str | Path,
    config: MtpConfig,
    target: CausalLM,
    *,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = True,
) -> MtpHead:
    """Build the MTP layer of a model, on its device and in its dtype, and fill the weights.

    Args:
        path: the model's checkpoint; not read for ``dummy``.
        target: the model, loaded and prepared.
        load_format, seed, progress: as for :func:`pd.models.loader.load_model`.

    Raises:
        UsageError: the checkpoint lacks the layer, or a tensor of it is missing or misshaped.
    """
    whole_head = load_whole_head(target, path, load_format, seed)
    with torch.device(target.embedding.device):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(target.embedding.dtype)
        try:
            layer = target.make_layer(config.layer, 0, SINGLE)
            head = MtpHead(config, layer, target.embedding, whole_head)
        finally:
            torch.set_default_dtype(previous)
    prefix = _name_prefix(config)
    ignored = {f"{prefix}.{name}" for name in _COPIES}
    try:
        fill_module(
            head,
            path,
            config.layer.quantization,
            load_format,
            seed,
            progress,
            SINGLE,
            lambda name, stored, shard: (
                not name.startswith(f"{prefix}.") or name in ignored or is_unused(name)
            ),
        )
    except UsageError as error:
        raise type(error)(f"--speculative-algorithm mtp: {error}") from None
    prepare_layers(head)
    return head.eval()


def _name_prefix(config: MtpConfig) -> str:
    """Return the prefix of the layer's tensors."""
    return f"model.layers.{config.index}"
