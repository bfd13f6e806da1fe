"""A draft head next to a model, an EAGLE head or an MTP layer: every forward pass writes the head's
KV, and we keep the hidden states that the head needs in the next pass."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from pd.engine.device_copy import HostCopy
from pd.kernels.draft_tensors import States
from pd.kernels.drafting import carry_states
from pd.models.eagle import load_eagle_head
from pd.models.eagle_config import EagleConfig
from pd.models.mtp import check_mtp_tensors, load_mtp_head
from pd.models.mtp_config import MtpConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd.core.config import NodeConfig
    from pd.core.node_info import DType, Plane
    from pd.engine.forward_item import ForwardItem
    from pd.engine.kv_pool import KVPool
    from pd.kernels.attention.base import PagedKV
    from pd.models.causal_lm import CausalLM
    from pd.models.config import ModelConfig
    from pd.models.draft_head import DraftHead, HeadConfig

    Int64Array = npt.NDArray[np.int64]

# A row of zeros. Heads get it as the state before the first token of a sequence.
ZERO_ROW = 0
# The row for sequences without their own row. Nothing is drafted from it.
NO_ROW = 1


class CarriedState:
    """A row of :attr:`EagleWriter.carried` that belongs to one sequence.

    Attributes:
        row: index of the row, or :data:`NO_ROW` if there were not enough. Then the sequence's next
            step asks again and recomputes the state.
        stop: the row holds the fused hidden state of token ``stop - 1``.
        received: state from another node, as bytes, until it is copied to the row.
    """

    def __init__(self, row: int) -> None:
        self.row = row
        self.stop = 0
        self.received: bytes | None = None

    def has_state_for(self, stop: int) -> bool:
        """Whether the row holds, or will hold, the state of token ``stop - 1``."""
        return self.row != NO_ROW and self.stop == stop


class EagleWriter:
    """Writes the head's K and V for every token that the model computes.

    The slot of a token joins its embedding with the fused hidden state of the previous token. So a
    page of the head's KV depends only on tokens in it or before it, and can be shared like a page
    of the model. The first new token of a sequence needs the state of a token from an earlier pass.
    Either a row of :attr:`carried` holds that state, or the pass computes the previous token again
    (``ForwardItem.reread``).

    Args:
        kv: K and V of the head, in the pages of the model's pool.
        num_rows: number of sequences that may carry a state.

    Attributes:
        carried: fused hidden states, ``[num_rows, hidden_size]`` in the head's dtype.
        fused: states of the tokens of the last pass, in their order.
    """

    def __init__(self, head: DraftHead, model: CausalLM, kv: PagedKV, num_rows: int) -> None:
        self.head, self.kv = head, kv
        weight = model.embedding
        size = head.config.hidden_size
        self.carried = torch.zeros(num_rows, size, dtype=weight.dtype, device=weight.device)
        self.fused = self.carried[:0]
        # Any thread may drop a sequence and thereby return its row.
        self._free: deque[int] = deque(range(2, num_rows))

    @classmethod
    def build_for_pool(
        cls, head: DraftHead, model: CausalLM, pool: KVPool, config: NodeConfig
    ) -> EagleWriter:
        """Make a writer for the head's plane of ``pool``. It has rows for twice as many sequences
        as run at a time, because waiting prompts and choices need one, too."""
        return cls(
            head,
            model,
            pool.view_plane(head.config.plane_name),
            2 * config.max_running_requests + 64,
        )

    def take_row(self) -> CarriedState:
        """Give a sequence a row. The row is free again once the result is garbage. Any thread may
        call this."""
        try:
            state = CarriedState(self._free.popleft())
        except IndexError:
            return CarriedState(NO_ROW)
        weakref.finalize(state, self._free.append, state.row)
        return state

    @property
    def state_bytes(self) -> int:
        """Size of one state in bytes."""
        return self.carried[0].nbytes

    def receive_state(self, state: bytes, stop: int) -> CarriedState:
        """Give a sequence a row for the state of its token ``stop - 1``, which another node sent.
        :meth:`upload_state` copies it to the row. Any thread may call this."""
        made = self.take_row()
        made.received, made.stop = state, stop
        return made

    def upload_state(self, state: CarriedState) -> None:
        """Copy a received state to its row, unless that has happened already. The row must not be
        :data:`NO_ROW`."""
        if state.received is None:
            return
        host = torch.frombuffer(bytearray(state.received), dtype=self.carried.dtype)
        self.carried[state.row].copy_(host)
        state.received = None

    def copy_states(self, tokens: torch.Tensor) -> HostCopy:
        """Queue a copy of the states of some tokens of the last pass, for another node.

        Args:
            tokens: int64 indices.

        Returns:
            uint8 ``[tokens, state_bytes]`` on the host.
        """
        return HostCopy([self.fused.index_select(0, tokens).view(torch.uint8)])

    def write_kv(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        features: torch.Tensor,
        before: torch.Tensor,
    ) -> None:
        """Write K and V of a pass whose features are known, and set :attr:`fused`.

        Args:
            token_ids, positions, slots: int64 ``[tokens]`` of the pass.
            features: of all its tokens, see :meth:`pd.models.causal_lm.CausalLM.forward`.
            before: place of the state before each token, int64 ``[tokens]``; see
                :meth:`find_places_before`.
        """
        self.fused = self.head.fuse_features(features)
        states = States(self.carried, self.fused, before)
        self.head.write_kv(token_ids, states, positions, self.kv, slots)

    def find_places_before(self, items: Sequence[ForwardItem]) -> Int64Array:
        """Find the state before each token of ``items``.

        Returns:
            int64 indices into the rows of :attr:`carried`, followed by those of :attr:`fused`. A
            reread token gets an arbitrary index, because its K and V are dropped.
        """
        lengths = np.fromiter((len(item.token_ids) for item in items), np.int64, len(items))
        ends, first = np.cumsum(lengths), len(self.carried)
        places: Int64Array = np.arange(first - 1, first - 1 + ends[-1])
        places[ends - lengths] = [item.carried if item.start else ZERO_ROW for item in items]
        for item, end in zip(items, ends.tolist(), strict=True):
            if item.tree is not None and not item.tree.is_chain:
                guesses = end - item.tree.size
                places[guesses:end] = first + guesses + item.tree.parents
        return places

    def keep_states(self, rows: torch.Tensor, roots: torch.Tensor, last: torch.Tensor) -> None:
        """Carry states over to the next pass.

        Args:
            rows: int64, rows of :attr:`carried`.
            roots: int64, for each row the index of the sequence's last known token in the last
                pass.
            last: int64, the index of its last accepted guess, or -1.
        """
        carry_states(self.carried, rows, self.fused, roots, last)


def read_head_config(config: NodeConfig, target: ModelConfig) -> EagleConfig | MtpConfig | None:
    """Read the configuration of the head that a node uses for ``target``; None if it uses none.

    Raises:
        UsageError, UnsupportedModelError: the head does not fit the model, or the model has no
            layer for drafts.
    """
    if config.speculative_algorithm == "mtp":
        head = MtpConfig.of_target(config.model, target)
        if config.load_format != "dummy":
            check_mtp_tensors(config.model, head)
        return head
    path = config.speculative_draft_model
    if config.speculative_algorithm != "eagle" or path is None:
        return None
    return EagleConfig.from_pretrained(path, target)


def make_head_plane(head: HeadConfig, dtype: DType) -> Plane:
    """Describe the pool's plane for a head's KV. The head, and so its plane, is whole on rank 0.
    The plane is in the model's group, because every pass writes the KV of both."""
    plane = head.layer.make_plane(dtype)
    return msgspec.structs.replace(plane, name=head.plane_name, ranks="first", group=0)


def load_head(config: NodeConfig, model: CausalLM, target: ModelConfig) -> DraftHead | None:
    """Load the draft head of a node on rank 0, and have ``model`` compute the features that it
    reads. Returns None if there is no head.

    Args:
        model: this rank's part.
        target: configuration of the whole model.

    Raises:
        UsageError, UnsupportedModelError: the head does not fit the model, or cannot be loaded.
    """
    head, path = read_head_config(config, target), config.speculative_draft_model
    if head is None:
        return None
    # All ranks do this, even those without the head, because the last layer must compute the same
    # on each.
    model.aux_layers, model.aux_normed = head.aux_layers, head.normed
    if model.tp.rank > 0:
        return None
    if isinstance(head, MtpConfig):
        return load_mtp_head(
            config.model, head, model, load_format=config.load_format, seed=config.seed
        )
    assert path is not None, "the configuration was read from there"
    return load_eagle_head(
        path,
        head,
        model,
        dtype=model.embedding.dtype,
        device=model.embedding.device,
        load_format=config.load_format,
        seed=config.seed,
        target_path=config.model,
    )
