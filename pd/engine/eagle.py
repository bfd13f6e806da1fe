"""An EAGLE head beside a model: the head's KV, which every forward pass writes, and the hidden
states that it needs from one pass to the next."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.core.node_info import Plane
from pd.engine.device_copy import HostCopy
from pd.kernels.drafting import States, carry_states
from pd.models.eagle import load_eagle_head
from pd.models.eagle_config import EagleConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd.core.config import NodeConfig
    from pd.core.node_info import DType
    from pd.engine.kv_pool import KVPool
    from pd.engine.model_runner import ForwardItem
    from pd.kernels.attention.base import PagedKV
    from pd.models.causal_lm import CausalLM
    from pd.models.config import ModelConfig
    from pd.models.eagle import EagleHead

    Int64Array = npt.NDArray[np.int64]

# Name of the plane with the head's K and V.
PLANE = "eagle"
# A row of zeros, which heads are given as the state before the first token of a sequence.
ZERO_ROW = 0
# The row of sequences that have none of their own. Nothing is drafted from it.
NO_ROW = 1


class CarriedState:
    """A row of :attr:`EagleWriter.carried` that belongs to one sequence, and what it holds.

    Attributes:
        row: index of the row; :data:`NO_ROW` if there were not enough. The next step of the
            sequence asks for one again, and computes the state that it needs.
        stop: tokens of the sequence whose last one has its fused hidden state there.
        received: a state that came from another node and is not in the row yet, as bytes.
    """

    def __init__(self, row: int) -> None:
        self.row = row
        self.stop = 0
        self.received: bytes | None = None

    def covers(self, stop: int) -> bool:
        """Whether the row holds, or will hold, the state of token ``stop - 1``."""
        return self.row != NO_ROW and self.stop == stop


class EagleWriter:
    """Writes the head's K and V of every token that the model computes.

    The slot of a token joins its embedding with the fused hidden state of the token before it, so a
    page of the head's KV depends on no token that is not in it or before it, and may be shared as
    the model's is. The first new token of a sequence needs the state of a token that an earlier
    pass computed: that is carried over in a row of :attr:`carried`, or the token before is computed
    once more (``ForwardItem.reread``).

    Args:
        kv: K and V of the head, in the pages of the model's pool.
        num_rows: sequences that may carry a state.

    Attributes:
        carried: fused hidden states, ``[num_rows, hidden_size]`` in the head's dtype.
        fused: those of the tokens of the last pass, in their order.
    """

    def __init__(self, head: EagleHead, model: CausalLM, kv: PagedKV, num_rows: int) -> None:
        self.head, self.kv = head, kv
        weight = model.embedding
        size = head.config.hidden_size
        self.carried = torch.zeros(num_rows, size, dtype=weight.dtype, device=weight.device)
        self.fused = self.carried[:0]
        # Rows are given back by whatever thread drops a sequence.
        self._free: deque[int] = deque(range(2, num_rows))

    @classmethod
    def of(cls, head: EagleHead, model: CausalLM, pool: KVPool, config: NodeConfig) -> EagleWriter:
        """Make a writer over the head's K and V in the pages of ``pool``, with rows for twice as
        many sequences as run at a time: prompts and choices that wait have one, too."""
        return cls(head, model, pool.view(PLANE), 2 * config.max_running_requests + 64)

    def take_row(self) -> CarriedState:
        """Give a sequence a row, which comes free again when the result is no more. Any thread."""
        try:
            state = CarriedState(self._free.popleft())
        except IndexError:
            return CarriedState(NO_ROW)
        weakref.finalize(state, self._free.append, state.row)
        return state

    @property
    def state_bytes(self) -> int:
        """Size of one state."""
        return self.carried[0].nbytes

    def receive(self, state: bytes, stop: int) -> CarriedState:
        """Give a sequence a row for the state of its token ``stop - 1`` that another node sent, and
        which is copied to the row by :meth:`upload`. Any thread."""
        made = self.take_row()
        made.received, made.stop = state, stop
        return made

    def upload(self, state: CarriedState) -> None:
        """Copy what was received to the row, not :data:`NO_ROW`, if that was not done yet."""
        if state.received is None:
            return
        host = torch.frombuffer(bytearray(state.received), dtype=self.carried.dtype)
        self.carried[state.row].copy_(host)
        state.received = None

    def copy_states(self, tokens: torch.Tensor) -> HostCopy:
        """Queue a copy, for another node, of the states of some tokens of the last pass; ``tokens``
        is int64. As uint8 ``[tokens, state_bytes]``."""
        return HostCopy([self.fused.index_select(0, tokens).view(torch.uint8)])

    def write(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        features: torch.Tensor,
        before: torch.Tensor,
    ) -> None:
        """Write K and V of a pass whose features are known, and set :attr:`fused`.

        Args:
            token_ids, positions, slots: those of the pass, int64 ``[tokens]``.
            features: of all its tokens, see :meth:`pd.models.causal_lm.CausalLM.forward`.
            before: where the state of the token before each token is, int64 ``[tokens]``: see
                :meth:`places_before`.
        """
        self.fused = self.head.fuse(features)
        states = States(self.carried, self.fused, before)
        keys, values = self.kv.key(0), self.kv.value(0)
        self.head.write_kv(token_ids, states, positions, keys, values, slots)

    def places_before(self, items: Sequence[ForwardItem]) -> Int64Array:
        """For each token of ``items`` the index, among the rows of :attr:`carried` and then those
        of :attr:`fused`, of the state of the token before it. That of a token which is computed
        once more is arbitrary, since its K and V are not kept."""
        lengths = np.fromiter((len(item.token_ids) for item in items), np.int64, len(items))
        ends, first = np.cumsum(lengths), len(self.carried)
        places: Int64Array = np.arange(first - 1, first - 1 + ends[-1])
        places[ends - lengths] = [item.carried if item.start else ZERO_ROW for item in items]
        for item, end in zip(items, ends.tolist(), strict=True):
            if item.tree is not None and not item.tree.is_chain:
                guesses = end - item.tree.size
                places[guesses:end] = first + guesses + item.tree.parents
        return places

    def keep(self, rows: torch.Tensor, roots: torch.Tensor, last: torch.Tensor) -> None:
        """Carry states over to the next pass.

        Args:
            rows: int64, rows of :attr:`carried`.
            roots: int64, for each of them the last known token of a sequence among those of the
                last pass.
            last: int64, the index of its last accepted guess, -1 for none.
        """
        carry_states(self.carried, rows, self.fused, roots, last)


def head_config(config: NodeConfig, target: ModelConfig) -> EagleConfig | None:
    """Read the EAGLE head that a node of this configuration uses for ``target``; None if it uses
    none.

    Raises:
        UsageError, UnsupportedModelError: it does not fit the model.
    """
    path = config.speculative_draft_model
    if config.speculative_algorithm != "eagle" or path is None:
        return None
    return EagleConfig.from_pretrained(path, target)


def head_plane(head: EagleConfig, dtype: DType) -> Plane:
    """The plane of a pool for a head's K and V: whole on rank 0, as the head is. Every pass writes
    both models' KV, so both are cached alike."""
    return Plane(
        PLANE, head.num_layers, head.num_kv_heads, head.head_dim, dtype, sharded=False, group=0
    )


def load_head(config: NodeConfig, model: CausalLM, target: ModelConfig) -> EagleHead | None:
    """Load the EAGLE head that a node of this configuration uses, on rank 0, and have ``model``
    compute what it reads; None if there is none.

    Args:
        model: this rank's part. ``target`` is the configuration of the whole model.

    Raises:
        UsageError, UnsupportedModelError: it does not fit the model, or cannot be loaded.
    """
    head, path = head_config(config, target), config.speculative_draft_model
    if head is None or path is None:
        return None
    # Ranks without the head, too: what the last layer computes must be the same on all.
    model.aux_layers, model.aux_normed = head.aux_layers, head.normed
    if model.tp.rank > 0:
        return None
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
