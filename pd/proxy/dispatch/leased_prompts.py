"""Prompts kept by nodes for clients, so that an abort can end the lease."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from pd.core.messages import EndPrefixLease

if TYPE_CHECKING:
    from pd.proxy.nodes.node_handle import NodeHandle

# We forget the oldest beyond this. Their leases end by themselves.
_MAX_PROMPTS = 4096


class _LeasedPrompt(NamedTuple):
    node: NodeHandle
    job_rid: str
    ends_at: float


class LeasedPrompts:
    """Prompts whose requests asked for a prefix lease, oldest first. Runs on the event loop."""

    def __init__(self, instance_id: str) -> None:
        self._instance_id = instance_id
        self._prompts: dict[tuple[str, str], _LeasedPrompt] = {}

    def note_prompt(
        self, owner: str, rid: str, job_rid: str, node: NodeHandle, seconds: float
    ) -> None:
        """Note that a node got a prompt with a lease. ``owner`` and ``rid`` are as in its message.

        Args:
            job_rid: name of the whole request, which may have several prompts.
        """
        self._prompts.pop((owner, rid), None)
        self._prompts[owner, rid] = _LeasedPrompt(node, job_rid, time.monotonic() + seconds)
        while len(self._prompts) > _MAX_PROMPTS:
            del self._prompts[next(iter(self._prompts))]

    def end_leases(self, owner: str | None = None, rid: str | None = None) -> int:
        """End the leases of a request, or of all, of one owner or (None) of any.

        Return the number of prompts.
        """
        count = 0
        for (owner_of, name), prompt in list(self._prompts.items()):
            if owner not in (None, owner_of) or rid not in (None, name, prompt.job_rid):
                continue
            del self._prompts[owner_of, name]
            if prompt.ends_at > time.monotonic():
                count += 1
                message = EndPrefixLease(
                    to=prompt.node.instance_id,
                    sender=self._instance_id,
                    rid=name,
                    owner=owner_of,
                )
                prompt.node.send_message(message)
        return count
