"""Sending side of an nvlink link: stores into the pool of one peer."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.transfer.nvlink.launched import LaunchedStores
from pd.transfer.nvlink.messages import SessionWelcome

if TYPE_CHECKING:
    import msgspec

    from pd.transfer.nvlink.device import PoolMapping, StoreDevice, StoreLane
    from pd.transfer.nvlink.messages import PeerPool
    from pd.transfer.nvlink.sender import NvlinkSender
    from pd.transfer.ranges import Block
    from pd.transfer.wire.channel import Channel
    from pd.transfer.wire.hub import ChannelHub

logger = logging.getLogger(__name__)


class NvlinkLink:
    """One channel to a peer and the mapping of its pool. The mapping exists only as long as the
    channel.

    You use a link once: when it has ended, the manager makes another. However it ends, its thread
    launches nothing more, waits for launched stores, unmaps the pool and then closes the channel,
    in this order. D takes the close as proof that nothing can land any more.

    If no store waits, the thread that finds KV computed launches its store, because waking another
    thread takes as long as the launch. The link's thread launches it if the pool is not mapped yet
    or enough is launched. One of them launches at a time.
    """

    def __init__(self, hub: ChannelHub, peer: str, pool: PeerPool, device: StoreDevice) -> None:
        self.peer, self.pool, self.device = peer, pool, device
        # Guards the link and all its senders. Reentrant, because a sender that ends removes itself.
        self.changed = threading.Condition(threading.RLock())
        self.stopped: TransferError | None = None
        self.patience = hub.patience
        self._channel: Channel | None = None
        self._session: int | None = None
        self._senders: set[NvlinkSender] = set()
        # Rooms that had begun to send when the link ended, and were not done.
        self._cut_off = 0
        # A sender for each queued block, in the order of the queue.
        self._queue: deque[NvlinkSender] = deque()
        # Set once the pool is mapped.
        self._lane: StoreLane | None = None
        self._address = 0
        self._launching = False
        self._launched = LaunchedStores()
        self._thread = threading.Thread(target=self._run, name="pd-nvlink", daemon=True)
        with self.changed:
            self._thread.start()
            self._dial = hub.dial_peer(peer, pool.address, self)

    def add_sender(self, sender: NvlinkSender) -> None:
        """Add a sender. Raises TransferError if the link ended or belongs to another session."""
        with self.changed:
            if self.stopped is not None:
                raise self.stopped
            if self._session not in (None, sender.session):
                raise self._stale_error()
            self._senders.add(sender)
            lane = self._lane
        if lane is not None:
            sender.prepare_table(lane)

    @property
    def bytes_per_second(self) -> float:
        """The best rate of a store so far, or 0 until the link is known."""
        return self._launched.bytes_per_second

    @property
    def is_welcomed(self) -> bool:
        """Whether the peer has opened a session for this channel. With the lock."""
        return self._session is not None

    def enqueue_sender(self, sender: NvlinkSender) -> None:
        """Queue one block of a sender after those of all rooms. With the lock."""
        self._queue.append(sender)

    def remove_sender(self, sender: NvlinkSender) -> None:
        """Remove a sender that has ended. With the lock."""
        self._senders.discard(sender)
        if sender in self._queue:
            self._queue = deque(other for other in self._queue if other is not sender)

    def launch_ready(self) -> None:
        """Launch queued stores, unless another thread does or the pool is not mapped."""
        with self.changed:
            lane = self._lane
            idle = lane is None or self._launching or self.stopped is not None
            if lane is None or idle or not self._queue:
                return
            self._launching = True
        self._launch_queued(lane)

    def _launch_queued(self, lane: StoreLane, *, patient: bool = False) -> None:
        """Launch until nothing is queued or enough is launched. The rest is left to the link's
        thread.

        Args:
            patient: first wait if enough is launched already. Only the link's thread does.
        """
        try:
            if patient:
                self._launched.wait_for_oldest()
            while (taken := self._take_next()) is not None:
                self._launch_block(lane, *taken)
        except Exception as error:  # noqa: BLE001 - named and handled in _failed
            self._on_failure(error)
        finally:
            with self.changed:
                self._launching = False
                if self._queue or self.stopped is not None:  # else nothing waits for it
                    self.changed.notify_all()

    def stop(self, error: TransferError) -> None:
        """End the link with this error. Returns at once."""
        with self.changed:
            if self.stopped is None:
                self.stopped = error
                self._cut_off = sum(sender.bytes_sent > 0 for sender in self._senders)
                for sender in list(self._senders):
                    sender.fail(error)
                self.changed.notify_all()
        self._dial.cancel()

    def join(self, timeout: float) -> bool:
        """Wait for the end. Return whether the pool is unmapped and the channel closed."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _stale_error(self) -> TransferError:
        return TransferError(f"{self.peer} reserved in a session that has ended")

    # ---- events of the channel, on the hub's thread

    def on_opened(self, channel: Channel) -> None:
        with self.changed:
            if self.stopped is None:
                self._channel = channel
                return
        channel.close()

    def on_unreachable(self, error: TransferError, final: bool) -> None:
        with self.changed:
            if final:
                self.stop(error)
            for sender in list(self._senders):
                sender.fail(error)

    def on_message(self, channel: Channel, message: msgspec.Struct) -> None:
        if not isinstance(message, SessionWelcome):
            raise ValueError(f"a decode node does not send {type(message).__name__}")
        with self.changed:
            if self._session is not None:
                raise ValueError("it sent a second welcome")
            self._session = message.session
            for sender in list(self._senders):
                if sender.session != message.session:
                    sender.fail(self._stale_error())
            self.changed.notify_all()

    def on_ended(self, channel: Channel, reason: str, proof: bool) -> None:
        self.stop(TransferError(f"the nvlink channel to {self.peer} ended: {reason}"))

    # ---- the thread

    def _run(self) -> None:
        mapping: PoolMapping | None = None
        try:
            with self.changed:
                self.changed.wait_for(lambda: self.stopped or self._session is not None)
                is_welcomed = self.stopped is None
            if is_welcomed:
                mapping = self.device.map_pool(self.pool.handle, self.pool.offset)
                self._launch_leftovers(mapping, self.device.make_lane())
        except Exception as error:  # noqa: BLE001 - named and handled in _failed
            self._on_failure(error)
        try:
            self._unmap_pool(mapping)
        except Exception:
            # The GPU failed. Everything launched has ended with its context.
            logger.exception("cannot unmap the pool of %s", self.peer)
        with self.changed:
            channel = self._channel
        if channel is not None:
            channel.close()

    def _launch_leftovers(self, mapping: PoolMapping, lane: StoreLane) -> None:
        """Launch the blocks left by other threads, until the link ends."""
        with self.changed:
            self._address, self._lane = mapping.address, lane
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.stopped or (self._queue and not self._launching))
                if self.stopped is not None:
                    return
                self._launching = True
            self._launch_queued(lane, patient=True)

    def _take_next(self) -> tuple[NvlinkSender, Block] | None:
        """Return the next block to store, or None if there is none, enough is launched, or the link
        has ended."""
        self._launched.collect_finished()
        with self.changed:
            if self.stopped is not None or self._launched.is_full or not self._queue:
                return None
            sender = self._queue.popleft()
            block = sender.take_block()
            assert block is not None, "a sender is queued once for each of its blocks"
            return sender, block

    def _launch_block(self, lane: StoreLane, sender: NvlinkSender, block: Block) -> None:
        try:
            launched = sender.launch_store(lane, self._address, self.pool, block)
            self._launched.add_store(*launched)
        except BaseException as error:
            lane.wait_until_idle()  # parts of the store have no ticket
            sender.fail(self._wrap_error(error))  # before the block counts as sent
            raise
        finally:
            with self.changed:
                sender.mark_read()
                sender.mark_sent()

    def _on_failure(self, error: Exception) -> None:
        """End the link after an error such as one of CUDA, because its rooms must not wait for ever
        and the forward pass must go on."""
        if isinstance(error, TransferError):
            logger.warning("nvlink to %s: %s", self.peer, error)
        else:
            logger.error("nvlink to %s failed", self.peer, exc_info=error)
        self.stop(self._wrap_error(error))

    def _wrap_error(self, error: BaseException) -> TransferError:
        if isinstance(error, TransferError):
            return error
        return TransferError(f"cannot store to {self.peer}: {error}")

    def _unmap_pool(self, mapping: PoolMapping | None) -> None:
        begun = time.monotonic()
        with self.changed:
            self.changed.wait_for(lambda: not self._launching)
        incomplete = self._launched.num_incomplete
        self._launched.wait_for_all()
        if mapping is not None:
            mapping.close()
            seconds = time.monotonic() - begun
            logger.info(
                "unmapped the pool of %s after %.3f s; %d transfers were under way, %d stores",
                self.peer,
                seconds,
                self._cut_off,
                incomplete,
            )
