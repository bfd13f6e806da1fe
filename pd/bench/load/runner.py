"""Runs the schedule of one load process: sends its requests and keeps what was received."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.bench.load.answers import read_answer
from pd.bench.load.client_load import ClientLoad
from pd.bench.load.conversation import next_prompt
from pd.bench.load.endpoints import Chat, endpoint
from pd.bench.load.outcome import Asked, record_of
from pd.bench.load.spool import Spool, Spooled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd.bench.load.answers import Answer
    from pd.bench.load.plan import Plan
    from pd.bench.load.reception import Piece, Reception
    from pd.bench.load.records import Record
    from pd.bench.load.workload import Prompt, Session, Turn

# Connections are opened so long before their request is due.
LEAD_SECONDS = 0.05
# A host that is down answers nothing; one that is slow to accept is asked again by the kernel after
# 1, 3, 7, 15 and 31 s.
CONNECT_SECONDS = 60.0
WARM_UP_CONCURRENCY = 8


@dataclass
class Progress:
    """Counts while a run goes on."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    events: int = 0

    def add_failure(self) -> None:
        self.sent += 1
        self.done += 1
        self.failed += 1


class Runner:
    """Sessions of one load process.

    Everything runs in one event loop. Answers are read after the run, but for those that a session
    needs for its next turn.
    """

    def __init__(self, plan: Plan, sessions: Sequence[Session]) -> None:
        self._plan, self._sessions = plan, sessions
        self._endpoint = endpoint(plan.endpoint)
        self._first = {session.number: self._bytes(session, 0) for session in sessions}
        self._spool = Spool()
        self._asked: list[tuple[Asked, Spooled]] = []
        self._running: set[Reception] = set()
        # Time limits of connections that are being opened.
        self._connecting: set[asyncio.Timeout] = set()
        self._start = 0.0
        # When a session last got a place that it had to wait for.
        self._place_free = 0.0
        self._stopping = asyncio.Event()
        limit = plan.max_concurrency
        self._places = None if limit is None else asyncio.Semaphore(limit)
        self.progress = Progress()
        self.load = ClientLoad()

    def _bytes(
        self, session: Session, turn: int, prompt: Prompt | None = None, kind: str = ""
    ) -> bytes:
        plan, asked = self._plan, session.turns[turn]
        body = self._endpoint.body(
            asked.prompt if prompt is None else prompt, asked, plan.sampling, plan.options
        )
        return plan.target.request(body, plan.request_id(session.number, turn, kind))

    # ---- before

    async def warm_up(self, sessions: Sequence[Session]) -> str | None:
        """Ask first turns that are not measured; returns the first error that one met."""
        places = asyncio.Semaphore(WARM_UP_CONCURRENCY)

        async def ask(session: Session) -> str | None:
            asked = Asked(session, 0, None, 0.0)
            async with places:
                pieces = await self._ask(asked, self._bytes(session, 0, kind="-warm-up"))
            return asked.failure or read_answer(pieces or [], self._endpoint).error

        errors = await asyncio.gather(*(ask(session) for session in sessions))
        self.progress = Progress()
        return next((error for error in errors if error is not None), None)

    # ---- the run

    async def run(self, start: float) -> None:
        """Send every session at its time after ``start`` (of ``time.perf_counter``) and wait for
        the answers."""
        self._start = start
        gc.collect()
        gc.disable()  # a collection would delay the reading of everything that comes meanwhile
        sampling = asyncio.create_task(self.load.sample())
        try:
            await self._sleep_until(start - LEAD_SECONDS)
            self.load.begin()
            async with asyncio.TaskGroup() as group:
                for session in self._sessions:
                    if not await self._admitted(session):
                        break
                    group.create_task(self._session(session))
        finally:
            self.load.end()
            sampling.cancel()
            gc.enable()

    def stop(self) -> None:
        """End the run with what there is. Call it in the event loop."""
        self._stopping.set()
        for reception in list(self._running):
            reception.cut("interrupted")
        for limit in self._connecting:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def _admitted(self, session: Session) -> bool:
        """Wait until a session may open its connection; False if the run is to end."""
        if session.arrival is not None:
            await self._sleep_until(self._start + session.arrival - LEAD_SECONDS)
        else:
            await asyncio.sleep(0)
        if self._places is not None and not self._stopping.is_set():
            await self._take_place(self._places)
        return not self._stopping.is_set()

    async def _take_place(self, places: asyncio.Semaphore) -> None:
        """Wait for one of ``max_concurrency`` places, or until the run is to end."""
        if not places.locked():
            await places.acquire()
            return
        place = asyncio.ensure_future(places.acquire())
        stopped = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({place, stopped}, return_when=asyncio.FIRST_COMPLETED)
        place.cancel()
        stopped.cancel()
        self._place_free = time.perf_counter()

    async def _session(self, session: Session) -> None:
        try:
            # Before the start only connections are opened.
            scheduled = None if session.arrival is None else self._start + session.arrival
            wanted = max(time.perf_counter(), self._start) if scheduled is None else scheduled
            await self._turns(session, scheduled, max(wanted, self._place_free))
        finally:
            if self._places is not None:
                self._places.release()

    async def _turns(self, session: Session, scheduled: float | None, due: float) -> None:
        prompt = session.turns[0].prompt
        for number, _ in enumerate(session.turns):
            request = (
                self._bytes(session, number, prompt) if number else self._first[session.number]
            )
            asked = Asked(session, number, scheduled, due)
            pieces = await self._ask(asked, request)
            if pieces is None or not self._keep(asked, pieces):
                return
            if number + 1 == len(session.turns) or asked.failure or asked.cut_reason:
                return
            added = session.turns[number + 1]
            answer = read_answer(pieces, self._endpoint)
            following = self._continued(prompt, answer, added)
            if following is None:
                return
            prompt, scheduled = following, None
            due = (answer.end or due) + added.think_time

    def _keep(self, asked: Asked, pieces: Sequence[Piece]) -> bool:
        """Keep an answer until the run is over. Without room for it the run ends here, since all
        later ones would be lost, too."""
        try:
            self._asked.append((asked, self._spool.add(pieces)))
        except OSError as error:
            where, why = tempfile.gettempdir(), error.strerror or error
            self.load.failure = f"answers cannot be kept in {where}: {why}"
            self.stop()
            return False
        return True

    def _continued(self, prompt: Prompt, answer: Answer, turn: Turn) -> Prompt | None:
        if answer.error_kind is not None:
            return None
        chat = isinstance(self._endpoint, Chat)
        return next_prompt(prompt, answer, turn.prompt, chat=chat)

    async def _ask(self, asked: Asked, request: bytes) -> list[Piece] | None:
        """Send a request when it is due and wait for the end of its answer; None if the run ended
        before it was due. A failure to connect is noted in ``asked``."""
        # NOTE: not earlier. Servers close connections on which nothing comes for a while.
        await self._sleep_until(asked.due - LEAD_SECONDS)
        if self._stopping.is_set():
            return None
        begin = time.perf_counter()
        try:
            reception = await self._connect()
        except OSError as error:
            return self._not_connected(asked, error)
        connected = time.perf_counter()
        await self._sleep_until(asked.due)
        if self._stopping.is_set():
            reception.cut("interrupted")
            return None
        reception.send(request)
        asked.was_sent(begin, connected, reception.sent)
        self.progress.sent += 1
        self._running.add(reception)
        await self._end_of(asked, reception)
        self._running.discard(reception)
        return reception.pieces

    async def _connect(self) -> Reception:
        """A new connection. Raises OSError, at once if the run is to end."""
        seconds = min(self._plan.timeout, CONNECT_SECONDS)
        try:
            async with asyncio.timeout(seconds) as limit:
                self._connecting.add(limit)
                try:
                    return await self._plan.target.connect()
                finally:
                    self._connecting.discard(limit)
        except TimeoutError as error:
            if error.args:  # the kernel gave up
                raise
            raise TimeoutError(f"no connection within {seconds:g} s") from None

    def _not_connected(self, asked: Asked, error: OSError) -> list[Piece] | None:
        """Note why there is no connection; None if the run ended before the request was due."""
        if not self._stopping.is_set():
            asked.not_connected(error)
            self.progress.add_failure()
        elif asked.due > time.perf_counter():
            return None
        else:
            asked.was_interrupted()
        return []

    async def _end_of(self, asked: Asked, reception: Reception) -> None:
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(self._plan.timeout, reception.cut, "timeout")]
        if asked.session.cancel_after is not None:
            timers.append(loop.call_later(asked.session.cancel_after, reception.cut, "cancelled"))
        await reception.ended
        for timer in timers:
            timer.cancel()
        asked.cut_reason = reception.cut_reason
        self.progress.done += 1
        self.progress.events += reception.events
        self.progress.failed += not reception.events

    async def _sleep_until(self, at: float) -> None:
        """Sleep until a time, or until the run is to end."""
        left = at - time.perf_counter()
        if left > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._stopping.wait()

    # ---- after

    @property
    def events(self) -> int:
        """Events that came so far."""
        return self.progress.events + sum(reception.events for reception in self._running)

    def records(self) -> Iterator[Record]:
        """Records of what was asked, read now."""
        for asked, place in self._asked:
            answer = read_answer(self._spool.read(place), self._endpoint)
            yield record_of(asked, answer, self._plan, self._start)
