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
    """One channel to a peer and the mapping of its pool, which exists only as long as the channel.

    A link is used once: when it has ended, the manager makes another. However it ends, its thread
    launches nothing more, waits for what was launched, unmaps the pool and then closes the channel,
    in this order: D takes the close as proof that nothing can land any more.

    A store is launched by the thread that finds its KV computed if none waits before it, since
    waking another thread takes as long as the launch. It is launched by the link's thread while the
    pool is not mapped yet or enough is launched. One of them launches at a time.
    """

    def __init__(self, hub: ChannelHub, peer: str, pool: PeerPool, device: StoreDevice) -> None:
        self.peer, self.pool, self.device = peer, pool, device
        # Guards the link and all its senders. Reentrant: a sender that ends takes itself out.
        self.changed = threading.Condition(threading.RLock())
        self.stopped: TransferError | None = None
        self.patience = hub.patience
        self._channel: Channel | None = None
        self._session: int | None = None
        self._senders: set[NvlinkSender] = set()
        # Rooms that had begun to send, and were not done, when the link ended.
        self._cut_off = 0
        # A sender for each queued block, in the order in which they were queued.
        self._queue: deque[NvlinkSender] = deque()
        # Set once the pool is mapped.
        self._lane: StoreLane | None = None
        self._address = 0
        self._launching = False
        self._launched = LaunchedStores()
        self._thread = threading.Thread(target=self._run, name="pd-nvlink", daemon=True)
        with self.changed:
            self._thread.start()
            self._dial = hub.dial(peer, pool.address, self)

    def add(self, sender: NvlinkSender) -> None:
        """Raises TransferError when the link has ended or is for another session."""
        with self.changed:
            if self.stopped is not None:
                raise self.stopped
            if self._session not in (None, sender.session):
                raise self._stale()
            self._senders.add(sender)
            lane = self._lane
        if lane is not None:
            sender.prepare(lane)

    @property
    def bytes_per_second(self) -> float:
        """The best that a store was seen to do; 0 until the link is known."""
        return self._launched.bytes_per_second

    @property
    def welcomed(self) -> bool:
        """Whether the peer has opened a session for this channel. With the lock."""
        return self._session is not None

    def enqueue(self, sender: NvlinkSender) -> None:
        """Queue one block of a sender, behind those of all rooms. With the lock."""
        self._queue.append(sender)

    def remove(self, sender: NvlinkSender) -> None:
        """Take out a sender that has ended. With the lock."""
        self._senders.discard(sender)
        if sender in self._queue:
            self._queue = deque(other for other in self._queue if other is not sender)

    def launch_ready(self) -> None:
        """Launch what is queued, unless another thread does or the pool is not mapped."""
        with self.changed:
            lane = self._lane
            idle = lane is None or self._launching or self.stopped is not None
            if lane is None or idle or not self._queue:
                return
            self._launching = True
        self._launch_queued(lane)

    def _launch_queued(self, lane: StoreLane, *, patient: bool = False) -> None:
        """Launch until nothing is queued or enough is launched; the rest is the thread's, which is
        ``patient``: it waits first if enough is launched already."""
        try:
            if patient:
                self._launched.wait_for_room()
            while (taken := self._next()) is not None:
                self._launch(lane, *taken)
        except Exception as error:  # noqa: BLE001 - named and handled in _failed
            self._failed(error)
        finally:
            with self.changed:
                self._launching = False
                if self._queue or self.stopped is not None:  # else nothing waits for it
                    self.changed.notify_all()

    def stop(self, error: TransferError) -> None:
        """End the link for this reason; returns at once."""
        with self.changed:
            if self.stopped is None:
                self.stopped = error
                self._cut_off = sum(sender.bytes_sent > 0 for sender in self._senders)
                for sender in list(self._senders):
                    sender.fail(error)
                self.changed.notify_all()
        self._dial.cancel()

    def join(self, timeout: float) -> bool:
        """Whether, after a wait, the pool is unmapped and the channel closed."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _stale(self) -> TransferError:
        return TransferError(f"{self.peer} reserved in a session that has ended")

    # ---- events of the channel, on the hub's thread

    def opened(self, channel: Channel) -> None:
        with self.changed:
            if self.stopped is None:
                self._channel = channel
                return
        channel.close()

    def unreachable(self, error: TransferError, final: bool) -> None:
        with self.changed:
            if final:
                self.stop(error)
            for sender in list(self._senders):
                sender.fail(error)

    def message(self, channel: Channel, message: msgspec.Struct) -> None:
        if not isinstance(message, SessionWelcome):
            raise ValueError(f"a decode node does not send {type(message).__name__}")
        with self.changed:
            if self._session is not None:
                raise ValueError("it sent a second welcome")
            self._session = message.session
            for sender in list(self._senders):
                if sender.session != message.session:
                    sender.fail(self._stale())
            self.changed.notify_all()

    def ended(self, channel: Channel, reason: str, proof: bool) -> None:
        self.stop(TransferError(f"the nvlink channel to {self.peer} ended: {reason}"))

    # ---- the thread

    def _run(self) -> None:
        mapping: PoolMapping | None = None
        try:
            if self._welcomed():
                mapping = self.device.map(self.pool.handle, self.pool.offset)
                self._serve(mapping, self.device.lane())
        except Exception as error:  # noqa: BLE001 - named and handled in _failed
            self._failed(error)
        try:
            self._unmap(mapping)
        except Exception:
            # The GPU failed: with its context, everything launched has ended.
            logger.exception("cannot unmap the pool of %s", self.peer)
        with self.changed:
            channel = self._channel
        if channel is not None:
            channel.close()

    def _welcomed(self) -> bool:
        """Wait until D opens a session; False if the link ends first."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self._session is not None)
            return self.stopped is None

    def _serve(self, mapping: PoolMapping, lane: StoreLane) -> None:
        """Launch what other threads leave queued, until the link ends."""
        with self.changed:
            self._address, self._lane = mapping.address, lane
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.stopped or (self._queue and not self._launching))
                if self.stopped is not None:
                    return
                self._launching = True
            self._launch_queued(lane, patient=True)

    def _next(self) -> tuple[NvlinkSender, Block] | None:
        """The next block to store; None if there is none, enough is launched, or the link has
        ended."""
        self._launched.collect()
        with self.changed:
            if self.stopped is not None or self._launched.full or not self._queue:
                return None
            sender = self._queue.popleft()
            block = sender.take()
            assert block is not None, "a sender is queued once for each of its blocks"
            return sender, block

    def _launch(self, lane: StoreLane, sender: NvlinkSender, block: Block) -> None:
        try:
            launched = sender.launch(lane, self._address, self.pool, block)
            self._launched.add(*launched)
        except BaseException as error:
            lane.drain()  # no ticket tells of what was begun
            sender.fail(self._named(error))  # before the block counts as sent
            raise
        finally:
            with self.changed:
                sender.was_read()
                sender.was_sent()

    def _failed(self, error: Exception) -> None:
        """End the link after, say, a CUDA error: its rooms must not wait for ever, and the forward
        pass must go on."""
        if isinstance(error, TransferError):
            logger.warning("nvlink to %s: %s", self.peer, error)
        else:
            logger.error("nvlink to %s failed", self.peer, exc_info=error)
        self.stop(self._named(error))

    def _named(self, error: BaseException) -> TransferError:
        if isinstance(error, TransferError):
            return error
        return TransferError(f"cannot store to {self.peer}: {error}")

    def _unmap(self, mapping: PoolMapping | None) -> None:
        begun = time.monotonic()
        with self.changed:
            self.changed.wait_for(lambda: not self._launching)
        incomplete = self._launched.incomplete
        self._launched.wait()
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
