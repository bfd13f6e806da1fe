"""The proxy's message sockets: nothing that a node sends stays in them, on either event loop."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from pd.core.messages import Abort, AnyMessage, NodeHeartbeat, encode_message
from pd.proxy.nodes.channel import PASS_MESSAGES, NodeChannel, Sockets
from pd.util.numbering import ReceivedNumbers, SentNumbers

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

PROXY, NODE = "the proxy", "the node"
PATIENCE = 60.0


def _uvloop() -> asyncio.AbstractEventLoop:
    return pytest.importorskip("uvloop").new_event_loop()


@pytest.fixture(params=[asyncio.new_event_loop, _uvloop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Coroutine[Any, Any, None]], None]]:
    """Runs a coroutine on a loop of this kind."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield lambda main: runner.run(asyncio.wait_for(main, PATIENCE))


class Node:
    """A ROUTER that answers nothing by itself."""

    def __init__(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.router = context.socket(zmq.ROUTER)
        self.router.set(zmq.SNDHWM, 0)
        self.router.set(zmq.LINGER, 0)
        self.endpoint = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        self._numbers = SentNumbers()

    def say(self, running: int) -> None:
        """Send a message that is told from others by its number."""
        beat = NodeHeartbeat(to=PROXY, sender=NODE, ready=True, queued_tokens=0, running=running)
        self.router.send_multipart(
            [PROXY.encode(), self._numbers.number_message(counts=True), encode_message(beat)]
        )


class Ends:
    """A node and a proxy's channel to it.

    Attributes:
        passes: numbers of the messages that came, in lists of those that were taken together.
    """

    def __init__(self) -> None:
        self.node = Node()
        self.passes: list[list[int]] = [[]]
        self.gaps = 0
        self.disconnected = asyncio.Event()
        self.on_message: Callable[[int], None] = lambda number: None
        self._sockets = Sockets(PROXY, None)
        self.channel: NodeChannel = self._sockets.open_channel(
            self.node.endpoint,
            NODE,
            self._message,
            lambda: self.passes.append([]),
            self._gap,
            self.disconnected.set,
        )

    @property
    def numbers(self) -> list[int]:
        return [number for taken in self.passes for number in taken]

    def _message(self, message: AnyMessage) -> None:
        assert isinstance(message, NodeHeartbeat)
        self.passes[-1].append(message.running)
        self.on_message(message.running)

    def _gap(self) -> None:
        self.gaps += 1

    def send(self) -> bool:
        return self.channel.send_message(Abort(to=NODE, sender=PROXY, room=b"r" * 16))

    async def connect(self) -> None:
        while not self.send():
            await asyncio.sleep(0.01)
        while not self.node.router.poll(0):
            await asyncio.sleep(0.01)
        self.node.router.recv_multipart()

    async def until(self, count: int) -> None:
        """Wait for so many messages; nothing else is done with the socket meanwhile."""
        while len(self.numbers) < count:
            await asyncio.sleep(0.005)

    def close(self) -> None:
        self.channel.close()
        self._sockets.close()
        self.node.router.close()


Run = "Callable[[Coroutine[Any, Any, None]], None]"


def test_what_came_while_the_loop_was_busy_is_taken_in_order_and_in_bounded_passes(
    run: Run,
) -> None:
    count = 10 * PASS_MESSAGES

    async def main() -> None:
        ends = Ends()
        await ends.connect()
        turns: list[int] = []

        async def turn() -> None:
            while True:
                turns.append(len(ends.numbers))
                await asyncio.sleep(0)

        turning = asyncio.create_task(turn())
        for number in range(count):
            ends.node.say(number)
        time.sleep(0.2)  # the loop is busy, so that messages wait in the socket
        await ends.until(count)
        turning.cancel()
        assert ends.numbers == list(range(count))
        assert max(map(len, ends.passes)) <= PASS_MESSAGES
        # Others had their turn between two passes.
        assert max(b - a for a, b in itertools.pairwise(turns)) <= PASS_MESSAGES
        assert not ends.gaps
        ends.close()

    run(main())


def test_messages_are_taken_though_sending_took_note_of_them(run: Run, seed: int) -> None:
    """A call that sends may swallow the sign that there is something to receive."""
    rng, rounds = random.Random(seed), 150

    async def main() -> None:
        ends = Ends()
        await ends.connect()
        begin = threading.Semaphore(0)
        sizes = [rng.randint(1, 5) for _ in range(rounds)]
        pauses = [rng.choice([0, 0, 1e-5, 1e-4]) for _ in range(rounds)]

        def talk() -> None:
            number = 0
            for size, pause in zip(sizes, pauses, strict=True):
                begin.acquire()
                for _ in range(size):
                    ends.node.say(number)
                    number += 1
                    time.sleep(pause)

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        said = 0
        for size in sizes:
            begin.release()
            said += size
            for _ in range(rng.randint(0, 40)):
                assert ends.send()  # without the loop in between
            await ends.until(said)
        thread.join(PATIENCE)
        assert ends.numbers == list(range(said))
        ends.close()

    run(main())


def test_a_channel_that_is_closed_by_a_message_takes_no_other(run: Run) -> None:
    async def main() -> None:
        ends = Ends()
        await ends.connect()
        ends.on_message = lambda number: ends.channel.close() if number == 3 else None
        for number in range(10):
            ends.node.say(number)
        await ends.until(4)
        await asyncio.sleep(0.05)
        assert ends.numbers == [0, 1, 2, 3]
        assert not ends.send()
        ends.channel.close()
        ends.close()

    run(main())


def test_a_message_that_cannot_be_written_is_none_that_was_lost(run: Run) -> None:
    async def main() -> None:
        ends = Ends()
        await ends.connect()
        received = ReceivedNumbers(whole=False)
        for reason in ("before", "\ud800", "behind"):
            message = Abort(to=NODE, sender=PROXY, room=b"r" * 16, reason=reason)
            if reason == "\ud800":
                with pytest.raises(UnicodeEncodeError):
                    ends.channel.send_message(message)
                continue
            assert ends.channel.send_message(message)
            while not ends.node.router.poll(0):
                await asyncio.sleep(0.01)
            assert not received.detect_loss(ends.node.router.recv_multipart()[1])
        ends.close()

    run(main())


def test_a_lost_connection_is_told(run: Run) -> None:
    async def main() -> None:
        ends = Ends()
        await ends.connect()
        ends.node.router.close()
        await ends.disconnected.wait()
        ends.close()

    run(main())
