"""P's side of the nvlink backend: stores into one peer's pool."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from pd.core.errors import TransferError
from pd.transfer.nvlink.messages import SessionWelcome

if TYPE_CHECKING:
    from pd.transfer.nvlink.device import PoolMapping, StoreDevice, StoreLane, StoreTicket
    from pd.transfer.nvlink.messages import PeerPool
    from pd.transfer.nvlink.sender import NvlinkSender
    from pd.transfer.ranges import Block
    from pd.transfer.wire.channel import Channel
    from pd.transfer.wire.hub import ChannelHub

logger = logging.getLogger(__name__)

# Stores launched and not complete at most. Enough that the GPU always has one at hand; few, because
# they cannot be called back when their room is aborted or the peer dies.
LAUNCHED_AHEAD = 4
# Smaller stores say little about the link.
_TIMED_BYTES = 16 << 20


class NvlinkLink:
    """One channel to a peer and the mapping of its pool, which exists only as long as the channel.

    A link is used once: when it ended, the manager makes another. However it ends, its thread
    launches nothing more, waits for what was launched, unmaps the pool and then closes the channel,
    in this order: D takes the close as proof that nothing can land any more.

    A store is launched by the thread that finds it computed if none waits before it, since waking
    another takes as long as the launch; by the link's thread while the pool is not mapped yet or
    enough is launched. One of them launches at a time.
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
        # Transfers of which some was given to send, and that were not done, when the link ended.
        self._cut_off = 0
        # A sender for each queued block, in the order in which they were queued.
        self._queue: deque[NvlinkSender] = deque()
        self._lane: StoreLane | None = None
        self._address = 0
        self._launching = False
        # The best that a store was seen to do; 0 before the first of some size.
        self.bytes_per_second = 0.0
        # Of what was launched, and its bytes; touched by who launches.
        self._launched: deque[tuple[StoreTicket, int]] = deque()
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
    def welcomed(self) -> bool:
        """With the lock: the peer has opened a session for this channel."""
        return self._session is not None

    def enqueue(self, sender: NvlinkSender) -> None:
        """With the lock: a block of the sender comes next but for those queued before."""
        self._queue.append(sender)

    def remove(self, sender: NvlinkSender) -> None:
        """With the lock: the sender has ended."""
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
            if patient and len(self._launched) >= LAUNCHED_AHEAD:
                self._launched[0][0].wait()
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
        """Whether the mapping is given up and the channel closed, after a wait."""
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

    def message(self, channel: Channel, message: Any) -> None:
        assert isinstance(message, SessionWelcome)
        with self.changed:
            if self._session is not None:
                raise ValueError("it welcomed us twice")
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
            self._give_up(mapping)
        except Exception:
            # The GPU failed: with its context, everything launched has ended.
            logger.exception("cannot unmap the pool of %s", self.peer)
        with self.changed:
            channel = self._channel
        if channel is not None:
            channel.close()

    def _welcomed(self) -> bool:
        """Wait for D's word; False if the link ends first."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self._session is not None)
            return self.stopped is None

    def _serve(self, mapping: PoolMapping, lane: StoreLane) -> None:
        """Launch what senders leave, until the link ends."""
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
        while self._launched and self._launched[0][0].done():
            ticket, num_bytes = self._launched.popleft()
            if num_bytes >= _TIMED_BYTES and (seconds := ticket.seconds()) > 0:
                self.bytes_per_second = max(self.bytes_per_second, num_bytes / seconds)
        with self.changed:
            enough = len(self._launched) >= LAUNCHED_AHEAD
            if self.stopped is not None or enough or not self._queue:
                return None
            sender = self._queue.popleft()
            block = sender.take()
            assert block is not None, "a sender is queued once for each of its blocks"
            return sender, block

    def _launch(self, lane: StoreLane, sender: NvlinkSender, block: Block) -> None:
        try:
            launched = sender.launch(lane, self._address, self.pool.num_slots, block)
            self._launched.append(launched)
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

    def _give_up(self, mapping: PoolMapping | None) -> None:
        begun = time.monotonic()
        with self.changed:
            self.changed.wait_for(lambda: not self._launching)
        incomplete = sum(not ticket.done() for ticket, _ in self._launched)
        if self._launched:
            # Stores complete in the order of their launches.
            self._launched[-1][0].wait()
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
