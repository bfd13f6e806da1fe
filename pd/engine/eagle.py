"""An EAGLE head beside a model: the head's KV, which every forward pass writes, and the hidden
states that it needs from one pass to the next."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd.engine.model_runner import ForwardItem
    from pd.kernels.attention.base import PagedKV
    from pd.models.causal_lm import CausalLM
    from pd.models.eagle import EagleHead

    Int64Array = npt.NDArray[np.int64]

# The row of sequences that have none of their own. Nothing is drafted from it.
NO_ROW = 0


class CarriedState:
    """A row of :attr:`EagleWriter.carried` that belongs to one sequence, and what it holds.

    Attributes:
        row: index of the row; :data:`NO_ROW` if there were not enough.
        stop: tokens of the sequence whose last one has its fused hidden state there.
        received: fused hidden state of the last prompt token, as bytes, that came from the node
            which computed the prompt and is not in the row yet.
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
        self._model = model
        weight = model.embedding
        size = head.config.hidden_size
        self.carried = torch.zeros(num_rows, size, dtype=weight.dtype, device=weight.device)
        self.fused = self.carried[:0]
        # Rows are given back by whatever thread drops a sequence.
        self._free: deque[int] = deque(range(1, num_rows))

    def take_row(self) -> CarriedState:
        """Give a sequence a row, which comes free again when the result is no more."""
        if not self._free:
            return CarriedState(NO_ROW)
        state = CarriedState(self._free.popleft())
        weakref.finalize(state, self._free.append, state.row)
        return state

    def features(self, num_tokens: int) -> torch.Tensor:
        """Memory for what the head reads of a pass over so many tokens."""
        size = self.head.config.feature_size
        return self.carried.new_empty(num_tokens, size)

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
            before: where the state of the token before each token is, int64 ``[tokens]``: see
                :meth:`places_before`.
        """
        self.fused = self.head.fuse(features)
        states = torch.cat((self.carried, self.fused)).index_select(0, before)
        keys, values = self.kv.key(0), self.kv.value(0)
        self.head.write_kv(token_ids, states, positions, keys, values, slots)

    def places_before(self, items: Sequence[ForwardItem]) -> Int64Array:
        """For each token of ``items`` the index, among the rows of :attr:`carried` and then those
        of :attr:`fused`, of the state of the token before it. That of a token which is computed
        once more is arbitrary, since its K and V are not kept."""
        first = len(self.carried)
        places = []
        for item in items:
            own = first + item.predecessors()
            own[0] = item.carried
            places.append(own)
            first += len(item.token_ids)
        return np.concatenate(places)

    def keep(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Carry states over to the next pass.

        Args:
            rows: int64, rows of :attr:`carried`.
            tokens: int64, for each of them a token of the last pass.
        """
        self.carried.index_copy_(0, rows, self.fused.index_select(0, tokens))
