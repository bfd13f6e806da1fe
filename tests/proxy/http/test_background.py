"""Work on other threads: each caller gets its own result, at once, and the loop is woken seldom."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pd.core.errors import UnavailableError
from pd.proxy.http.background import BATCH_BYTES, BATCH_JOBS, LONG_BYTES, SHORT_BYTES, Background
from pd.proxy.workers.loop import new_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

HUGE = LONG_BYTES + 1  # one thread has these


@pytest.fixture
def run() -> Iterator[Callable[[Coroutine[Any, Any, None]], None]]:
    """Runs a coroutine on a proxy's event loop."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        yield lambda main: runner.run(asyncio.wait_for(main, 60))


class Gate:
    """A job that takes until :meth:`open`."""

    def __init__(self) -> None:
        self._begun, self._opened = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self._begun.set()
        assert self._opened.wait(30)
        return "opened"

    def wait_begun(self) -> None:
        """Block, the event loop too, until the job runs."""
        assert self._begun.wait(30)

    def open(self) -> None:
        self._opened.set()


async def start(background: Background, size: int, *jobs: Callable[[], Any]) -> list[Any]:
    """Tasks of which each waits for a job."""
    tasks = [asyncio.create_task(background.run_on_thread(size, job)) for job in jobs]
    await asyncio.sleep(0)
    return tasks


async def start_batch(background: Background, *jobs: Callable[[], Any]) -> list[Any]:
    """Have one thread take all these jobs together, and keep the other from any."""
    gates = Gate(), Gate()
    gated = []
    for gate in gates:
        gated += await start(background, 1, gate)
        gate.wait_begun()
    # A thread takes half of what waits.
    tasks = await start(background, 1, *jobs, *[int] * len(jobs))
    gates[0].open()
    await gated[0]
    tasks[-1].add_done_callback(lambda _: gates[1].open())
    return tasks[: len(jobs)]


def count_wake_ups(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that gets an item for each time that a thread wakes the running loop."""
    loop = asyncio.get_running_loop()
    found: list[None] = []
    wake = loop.call_soon_threadsafe

    def counted(*args: Any, **options: Any) -> asyncio.Handle:
        found.append(None)
        return wake(*args, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    return found


def test_each_caller_gets_its_own_result(run: Callable[..., None]) -> None:
    async def main() -> None:
        background = Background()
        sizes = [1, SHORT_BYTES, SHORT_BYTES + 1, HUGE] * 50
        calls = [background.run_on_thread(size, divmod, i, 7) for i, size in enumerate(sizes)]
        assert await asyncio.gather(*calls) == [divmod(i, 7) for i in range(len(sizes))]
        background.close()

    run(main())


@pytest.mark.parametrize("kind", [ValueError, StopIteration, asyncio.CancelledError])
def test_a_job_that_raises_fails_only_itself(
    run: Callable[..., None], kind: type[BaseException]
) -> None:
    async def main() -> None:
        background = Background()

        def fail() -> None:
            raise kind("no")

        tasks = await start_batch(background, *[partial(int, 1), fail, partial(int, 2)])
        one, failed, two = await asyncio.gather(*tasks, return_exceptions=True)
        assert (one, two) == (1, 2)
        # As in a coroutine, a StopIteration comes as a RuntimeError.
        assert type(failed) is (RuntimeError if kind is StopIteration else kind)
        background.close()

    run(main())


def test_an_error_leaves_nothing_to_the_garbage_collector(run: Callable[..., None]) -> None:
    class NoteError(Exception):
        pass

    async def main() -> None:
        background = Background()
        errors: list[weakref.ref[NoteError]] = []

        def fail() -> None:
            error = NoteError()
            errors.append(weakref.ref(error))
            try:
                raise error
            finally:
                del error

        gc.disable()
        try:
            with pytest.raises(NoteError):
                await background.run_on_thread(1, fail)
            while errors[0]() is not None:  # its thread may not have been given the time
                await asyncio.sleep(0.01)
        finally:
            gc.enable()
        background.close()

    run(main())


def test_a_result_does_not_wait_for_later_jobs_of_its_batch(run: Callable[..., None]) -> None:
    async def main() -> None:
        background, gate = Background(), Gate()
        first, second = await start_batch(background, partial(int, 1), gate)
        assert await first == 1
        gate.wait_begun()
        assert not second.done()
        gate.open()
        assert await second == "opened"
        background.close()

    run(main())


def test_results_that_come_while_the_loop_is_busy_wake_it_once(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        background, gate = Background(), Gate()
        woken = count_wake_ups(monkeypatch)
        tasks = await start(background, HUGE, *(partial(int, i) for i in range(50)), gate)
        gate.wait_begun()
        assert len(woken) == 1
        assert await asyncio.gather(*tasks[:-1]) == list(range(50))
        assert len(woken) == 1
        gate.open()
        await tasks[-1]
        assert len(woken) == 2
        background.close()

    run(main())


def test_a_batch_is_bounded_and_leaves_other_threads_their_share(
    run: Callable[..., None],
) -> None:
    async def batch(size: int, number: int) -> int:
        """How many of so many jobs a thread takes together, by how many the other one does."""
        background, gates, ran = Background(), (Gate(), Gate(), Gate()), list[int]()
        for gate in gates[:2]:
            await start(background, 1, gate)
            gate.wait_begun()
        notes = [partial(ran.append, i) for i in range(number - 1)]
        tasks = await start(background, size, gates[2], *notes)
        # One thread takes a batch and stays with its first job; the other has the rest.
        gates[0].open()
        gates[2].wait_begun()
        gates[1].open()
        await background.run_on_thread(1, int)
        taken = number - len(ran)
        gates[2].open()
        await asyncio.gather(*tasks)
        background.close()
        return taken

    async def main() -> None:
        assert await batch(1, 2) == 1
        assert await batch(1, 10) == 5
        assert await batch(1, 100) == BATCH_JOBS
        assert await batch(BATCH_BYTES // 4, 100) == 4
        assert await batch(BATCH_BYTES, 100) == 1

    run(main())


def test_a_cancelled_job_that_waits_never_runs(run: Callable[..., None]) -> None:
    async def main() -> None:
        background, gate, ran = Background(), Gate(), list[int]()
        tasks = await start(background, HUGE, gate, *(partial(ran.append, i) for i in range(4)))
        gate.wait_begun()
        tasks[2].cancel()
        gate.open()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert ran == [0, 2, 3]

        # The same of one that a thread has taken already.
        gate = Gate()
        first, second, third = await start_batch(
            background, gate, partial(ran.append, 10), partial(ran.append, 11)
        )
        gate.wait_begun()
        second.cancel()
        gate.open()
        await asyncio.gather(first, second, third, return_exceptions=True)
        assert ran == [0, 2, 3, 11]
        background.close()

    run(main())


def test_the_result_of_a_job_whose_caller_has_gone_is_dropped(run: Callable[..., None]) -> None:
    async def main() -> None:
        background, gate = Background(), Gate()
        (task,) = await start(background, HUGE, gate)
        gate.wait_begun()
        task.cancel()
        await asyncio.wait([task])
        gate.open()
        assert await background.run_on_thread(HUGE, int) == 0
        background.close()

    run(main())


def test_close_cancels_what_has_not_begun(run: Callable[..., None]) -> None:
    async def main() -> None:
        background, gate, ran = Background(), Gate(), list[int]()
        taken = await start_batch(background, gate, *(partial(ran.append, i) for i in range(2)))
        gate.wait_begun()
        waiting = await start(background, 1, *(partial(ran.append, i) for i in range(10)))
        background.close()
        await asyncio.wait(waiting)
        assert all(task.cancelled() for task in waiting)
        gate.open()
        await asyncio.wait(taken)
        assert [task.cancelled() for task in taken] == [False, True, True]
        assert not ran
        with pytest.raises(UnavailableError, match="stopping"):
            await background.run_on_thread(1, int)

    run(main())


def test_threads_end_after_close_and_keep_no_process_alive(run: Callable[..., None]) -> None:
    async def main() -> None:
        before = set(threading.enumerate())
        background, gate = Background(), Gate()
        await start(background, 1, gate)
        gate.wait_begun()
        threads = set(threading.enumerate()) - before
        assert len(threads) == 5
        assert all(t.daemon and t.name.startswith("background-") for t in threads)
        background.close()
        alive = [*threads]
        while len(alive) > 1:
            await asyncio.sleep(0.001)
            alive = [thread for thread in alive if thread.is_alive()]
        gates.append((gate, alive[0]))

    gates: list[tuple[Gate, threading.Thread]] = []
    run(main())
    # What runs ends by itself, though its loop is closed by now.
    ((gate, thread),) = gates
    gate.open()
    thread.join(30)
    assert not thread.is_alive()


def test_random_schedules(run: Callable[..., None], seed: int) -> None:
    """Jobs of all sizes that return, raise or take a while, and callers that go."""
    rng = random.Random(seed)
    ran: list[int] = []

    def work(number: int, seconds: float, fails: bool) -> int:
        ran.append(number)
        time.sleep(seconds)
        if fails:
            raise ValueError(number)
        return number

    async def call(background: Background, number: int) -> str:
        size = rng.choice([1, 1, 1, SHORT_BYTES // 2, LONG_BYTES, HUGE])
        seconds = rng.choice([0, 0, 0, 0.0002, 0.002])
        fails, leaves = rng.random() < 0.2, rng.random() < 0.2
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        job = asyncio.create_task(background.run_on_thread(size, work, number, seconds, fails))
        if leaves:
            await asyncio.sleep(rng.choice([0, 0, 0.001]))
            job.cancel()
        try:
            found = await job
        except ValueError as error:
            assert fails and error.args == (number,)
            return "failed"
        except asyncio.CancelledError:
            assert leaves
            return "cancelled"
        assert found == number and not fails
        return "returned"

    async def main() -> None:
        for _ in range(5):
            ran.clear()
            background = Background()
            ends = await asyncio.gather(*(call(background, i) for i in range(200)))
            assert len(ran) == len(set(ran))
            assert {i for i, end in enumerate(ends) if end != "cancelled"} <= set(ran)
            background.close()

    run(main())
