"""P's side of the nvlink backend: stores into one peer's pool."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd.core.errors import PDError, TransferError
from pd.core.messages import LEASE_SECONDS
from pd.transfer.base import Sender, TransferState
from pd.transfer.nvlink.messages import Welcome
from pd.transfer.ranges import checked_block

if TYPE_CHECKING:
    from pd.transfer.base import IntArray
    from pd.transfer.nvlink.device import Lane, Mapping, StoreDevice, Ticket
    from pd.transfer.nvlink.messages import PeerPool
    from pd.transfer.ranges import Block
    from pd.transfer.wire.channel import Channel
    from pd.transfer.wire.hub import ChannelHub

logger = logging.getLogger(__name__)

# Stores launched and not complete at most. Enough that the GPU always has one at hand; few, because
# they cannot be called back when their room is aborted or the peer dies.
LAUNCHED_AHEAD = 4
# A GPU's links stay awake for 50 ms after each use (`nvidia-smi nvlink -gLowPwrInfo`). That takes
# power, which a long forward pass on a GPU at its limit then lacks: it takes 1 to 2 % longer,
# whether groups of layers or one token of each were sent (``sending_gpu``). So KV is collected, by
# what the link was seen to do and this many operations per second, more than an H200 gets done.
_FLOPS = 1e15
# Smaller stores say little about the link.
_TIMED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Store:
    """A block to store, which is in the pool."""

    sender: NvlinkSender
    block: Block


class NvlinkSender(Sender):
    """The stores of one room. They complete in the order in which they are launched, so the last
    one's ticket tells of all.

    Args:
        session: in which the destination is valid.
        slots: int32 ``[2, tokens]``: each token's slot in the own pool and in the peer's.
        tokens: which tokens these are.
        cell_bytes: K and V of one token in one layer.
    """

    def __init__(
        self,
        link: Link,
        session: int,
        slots: IntArray,
        tokens: range,
        num_layers: int,
        cell_bytes: int,
    ) -> None:
        self.error: PDError | None = None
        self.session = session
        self._link, self._slots = link, slots
        self._tokens = tokens
        self._num_layers, self._cell_bytes = num_layers, cell_bytes
        self._table: object = None
        self._state = TransferState.ACTIVE
        self._finished = False
        self._bytes = 0
        self._last: Ticket | None = None
        self._computing = 0
        self.pending = 0
        self.launching = False
        self.waiting_since = time.monotonic()

    @property
    def bytes_sent(self) -> int:
        return self._bytes

    @property
    def flops_per_byte(self) -> float:
        """0 until the link is known."""
        rate = self._link.bytes_per_second
        return _FLOPS / rate if rate else 0.0

    def send(self, token_start: int, token_stop: int, layer_start: int, layer_stop: int) -> None:
        block = checked_block(
            self._tokens, self._num_layers, token_start, token_stop, layer_start, layer_stop
        )
        if not block.cells or self._state is not TransferState.ACTIVE:
            return
        with self._link.changed:
            if self._state is not TransferState.ACTIVE:
                return
            assert not self._finished, "send after finish"
            self._bytes += block.cells * self._cell_bytes
            self._computing += 1
        self._link.device.when_computed(lambda reason: self._is_there(block, reason))

    def _is_there(self, block: Block, reason: str) -> None:
        lane = None
        with self._link.changed:
            self._computing -= 1
            if reason:
                self.fail(TransferError(f"the KV to be sent was not computed: {reason}"))
            elif self._state is TransferState.ACTIVE:
                lane = self._link.enqueue(_Store(self, block))
        if lane is not None:
            self._link.launch_queued(lane)

    def finish(self) -> None:
        self._finished = True

    def poll(self) -> TransferState:
        with self._link.changed:
            if self._state is TransferState.ACTIVE:
                if self.pending:
                    self._link.check_progress(self)
                elif self._finished and not self._computing and self._quiet():
                    self._state = TransferState.DONE
                    self._link.forget(self)
            return self._state

    def abort(self) -> None:
        self.fail(TransferError("aborted"))

    def drained(self) -> bool:
        with self._link.changed:
            return self._state is not TransferState.ACTIVE and self._quiet()

    def fail(self, error: PDError) -> None:
        """Record the first error; what was launched completes, nothing more is launched."""
        with self._link.changed:
            if self._state is TransferState.ACTIVE:
                self._state, self.error = TransferState.FAILED, error
                self._link.forget(self)

    def _quiet(self) -> bool:
        return not self.launching and (self._last is None or self._last.done())

    # ---- called by whoever launches for the link, without the lock

    def prepare(self, lane: Lane) -> None:
        """Put the slot numbers where stores find them, while nothing waits for them."""
        if self._table is None:
            self._table = lane.table(self._slots)

    def launch(self, lane: Lane, peer: int, num_slots: int, store: _Store) -> tuple[Ticket, int]:
        """Returns the number of bytes, too."""
        self.prepare(lane)
        block, first = store.block, self._tokens.start
        columns = slice(block.token_start - first, block.token_stop - first)
        self._last = lane.store(self._table, columns, peer, num_slots, block)
        return self._last, block.cells * self._cell_bytes


class Link:
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
        self._patience = hub.patience
        self._channel: Channel | None = None
        self._session: int | None = None
        self._senders: set[NvlinkSender] = set()
        # Transfers of which some was given to send, and that were not done, when the link ended.
        self._cut_off = 0
        self._stores: deque[_Store] = deque()
        self._lane: Lane | None = None
        self._address = 0
        self._launching = False
        # The best that a store was seen to do; 0 before the first of some size.
        self.bytes_per_second = 0.0
        # Of what was launched, and its bytes; touched by who launches.
        self._launched: deque[tuple[Ticket, int]] = deque()
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

    def enqueue(self, store: _Store) -> Lane | None:
        """With the lock. Returns the lane if the caller is to call :meth:`launch_queued`."""
        store.sender.pending += 1
        store.sender.waiting_since = time.monotonic()
        self._stores.append(store)
        if self._lane is None or self._launching or self.stopped is not None:
            return None
        self._launching = True
        return self._lane

    def launch_queued(self, lane: Lane, *, patient: bool = False) -> None:
        """Launch until nothing is queued or enough is launched; the rest is the thread's, which is
        ``patient``: it waits first if enough is launched already."""
        try:
            if patient and len(self._launched) >= LAUNCHED_AHEAD:
                self._launched[0][0].wait()
            while (store := self._next()) is not None:
                self._launch(lane, store)
        except Exception as error:  # noqa: BLE001 - named and handled in _failed
            self._failed(error)
        finally:
            with self.changed:
                self._launching = False
                if self._stores or self.stopped is not None:  # else nobody waits for it
                    self.changed.notify_all()

    def forget(self, sender: NvlinkSender) -> None:
        self._senders.discard(sender)
        if sender.pending:
            self._stores = deque(s for s in self._stores if s.sender is not sender)
            sender.pending = 0

    def check_progress(self, sender: NvlinkSender) -> None:
        """A store is launched at once but for a peer that does not answer."""
        since = sender.waiting_since
        if self._session is None and self._patience.is_over(since, LEASE_SECONDS, self.peer):
            waited = time.monotonic() - since
            sender.fail(TransferError(f"{self.peer} did not open a channel for {waited:.1f} s"))

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
        assert isinstance(message, Welcome)
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
        mapping: Mapping | None = None
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

    def _serve(self, mapping: Mapping, lane: Lane) -> None:
        """Launch what senders leave, until the link ends."""
        with self.changed:
            self._address, self._lane = mapping.address, lane
        while True:
            with self.changed:
                self.changed.wait_for(
                    lambda: self.stopped or (self._stores and not self._launching)
                )
                if self.stopped is not None:
                    return
                self._launching = True
            self.launch_queued(lane, patient=True)

    def _next(self) -> _Store | None:
        """The next store, which the sender counts as launching; None if there is none, enough is
        launched, or the link has ended."""
        while self._launched and self._launched[0][0].done():
            ticket, num_bytes = self._launched.popleft()
            if num_bytes >= _TIMED_BYTES and (seconds := ticket.seconds()) > 0:
                self.bytes_per_second = max(self.bytes_per_second, num_bytes / seconds)
        with self.changed:
            enough = len(self._launched) >= LAUNCHED_AHEAD
            if self.stopped is not None or enough or not self._stores:
                return None
            store = self._stores.popleft()
            store.sender.pending -= 1
            store.sender.launching = True
            return store

    def _launch(self, lane: Lane, store: _Store) -> None:
        try:
            launched = store.sender.launch(lane, self._address, self.pool.num_slots, store)
            self._launched.append(launched)
        except BaseException:
            lane.drain()  # no ticket tells of what was begun
            raise
        finally:
            with self.changed:
                store.sender.launching = False

    def _failed(self, error: Exception) -> None:
        """Say a CUDA error: it must not leave the rooms waiting, nor end the forward pass."""
        if isinstance(error, TransferError):
            logger.warning("nvlink to %s: %s", self.peer, error)
            self.stop(error)
        else:
            logger.error("nvlink to %s failed", self.peer, exc_info=error)
            self.stop(TransferError(f"cannot store to {self.peer}: {error}"))

    def _give_up(self, mapping: Mapping | None) -> None:
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
