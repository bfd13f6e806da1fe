"""Decides how much of the pool a prompt may take when it is admitted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd.scheduling.decode import DecodeScheduler
    from pd.scheduling.memory import Memory
    from pd.scheduling.request import Request
    from pd.scheduling.transfer_end import PromptReceiver, PromptSender


class AdmissionPolicy:
    """Decides how much of the pool a prompt may take. The caller holds the node's lock.

    A node that only prefills gives a prompt all the pages it has. If the node also decodes, running
    answers and arriving KV must be able to grow, so a prompt leaves them headroom.

    Args:
        memory: the pool shared by everything below.
        decode: the scheduler of answers; None on a node that only prefills.
        sending: the end for handing prompts to peers; None on a node that keeps all of them.
        receiving: the end for receiving prompts; None on a node that prefills all of them.
    """

    def __init__(
        self,
        memory: Memory,
        decode: DecodeScheduler | None = None,
        sending: PromptSender | None = None,
        receiving: PromptReceiver | None = None,
    ) -> None:
        self._memory, self._decode = memory, decode
        self._sending, self._receiving = sending, receiving

    @property
    def hands_off(self) -> bool:
        """Whether computed prompts may leave for other nodes."""
        return self._sending is not None

    def will_leave(self, request: Request) -> bool:
        """Whether a prompt leaves as soon as it is computed, because its peer holds memory for it.

        Such prompts run even while others lack memory, because they release theirs soon.
        """
        return self._sending is not None and self._sending.will_leave(request)

    def reclaim_pages(self, num_pages: int) -> None:
        """Free pages of computed prompts until ``num_pages`` are available, or none are left."""
        if self._sending is not None:
            self._sending.park_prompts(num_pages)

    def count_headroom(self, request: Request, running: list[Request]) -> int:
        """Return the number of pages to keep available after admitting a prompt.

        Args:
            request: the waiting prompt.
            running: prompts already running.

        Returns:
            All pages of the pool if the prompt must wait.
        """
        decode, receiving = self._decode, self._receiving
        if decode is None:
            return 0
        is_urgent = (
            receiving is not None
            and receiving.awaits_kv
            and not running
            and self.will_leave(request)
        )
        # All holders of memory wait for peers, and a peer may wait for this prompt, so we admit it
        # whatever it takes.
        if is_urgent and not decode.running:
            return 0
        if decode.needs_memory and not is_urgent:
            return self._memory.num_pages
        others = [each.sequence for each in running if each.outgoing is None]
        if receiving is not None:
            if request.outgoing is None and receiving.owes_memory(request.times.arrived):
                return self._memory.num_pages
            others += receiving.reserved_sequences()
        return decode.count_headroom(request.sequence, others)
