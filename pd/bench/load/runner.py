"""Runs the schedule of one load process: sends its requests and keeps their answers."""

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
from pd.bench.load.endpoints import Chat, find_endpoint
from pd.bench.load.outcome import Asked, make_record
from pd.bench.load.spool import Spool, Spooled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd.bench.load.answers import Answer
    from pd.bench.load.plan import Plan
    from pd.bench.load.reception import Piece, Reception
    from pd.bench.load.records import Record
    from pd.bench.load.workload import Prompt, Session

# How long before its request is due we open a connection.
LEAD_SECONDS = 0.05
# A host that is down does not answer at all. For one that is slow to accept, the kernel tries again
# after 1, 3, 7, 15 and 31 s.
CONNECT_SECONDS = 60.0
WARM_UP_CONCURRENCY = 8


@dataclass
class Progress:
    """Counts during a run."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    events: int = 0

    def add_failure(self) -> None:
        self.sent += 1
        self.done += 1
        self.failed += 1


class Runner:
    """Runs the sessions of one load process in one event loop.

    We parse answers after the run, except if a session needs one for its next turn.
    """

    def __init__(self, plan: Plan, sessions: Sequence[Session]) -> None:
        self._plan, self._sessions = plan, sessions
        self._endpoint = find_endpoint(plan.endpoint)
        self._first = {session.number: self._make_request(session, 0) for session in sessions}
        self._spool = Spool()
        self._asked: list[tuple[Asked, Spooled]] = []
        self._running: set[Reception] = set()
        # Timeouts of unfinished connections.
        self._connecting: set[asyncio.Timeout] = set()
        self._start = 0.0
        # When a waiting session last got a place.
        self._place_free = 0.0
        self._stopping = asyncio.Event()
        limit = plan.max_concurrency
        self._places = None if limit is None else asyncio.Semaphore(limit)
        self.progress = Progress()
        self.load = ClientLoad()

    def _make_request(
        self, session: Session, number: int, prompt: Prompt | None = None, kind: str = ""
    ) -> bytes:
        plan, turn = self._plan, session.turns[number]
        body = self._endpoint.make_body(
            turn.prompt if prompt is None else prompt, turn, plan.sampling, plan.options
        )
        return plan.target.make_request(body, plan.request_id(session.number, number, kind))

    # ---- before the run

    async def warm_up(self, sessions: Sequence[Session]) -> str | None:
        """Send first turns to warm up; return the first error."""
        places = asyncio.Semaphore(WARM_UP_CONCURRENCY)

        async def ask(session: Session) -> str | None:
            asked = Asked(session, 0, None, 0.0)
            async with places:
                pieces = await self._send_request(
                    asked, self._make_request(session, 0, kind="-warm-up")
                )
            return asked.failure or read_answer(pieces or [], self._endpoint).error

        errors = await asyncio.gather(*(ask(session) for session in sessions))
        self.progress = Progress()
        return next((error for error in errors if error is not None), None)

    # ---- the run

    async def run(self, start: float) -> None:
        """Send every session at its time after ``start`` (of ``time.perf_counter``), and wait for
        the answers."""
        self._start = start
        gc.collect()
        gc.disable()  # a collection would delay the reading of answers
        sampling = asyncio.create_task(self.load.sample_lag())
        try:
            await self._sleep_until(start - LEAD_SECONDS)
            self.load.start()
            async with asyncio.TaskGroup() as group:
                for session in self._sessions:
                    if not await self._wait_for_admission(session):
                        break
                    group.create_task(self._run_session(session))
        finally:
            self.load.stop()
            sampling.cancel()
            gc.enable()

    def stop(self) -> None:
        """End the run and keep the answers so far. Call it in the event loop."""
        self._stopping.set()
        for reception in list(self._running):
            reception.cut("interrupted")
        for limit in self._connecting:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def _wait_for_admission(self, session: Session) -> bool:
        """Wait until a session may open its connection; return False if the run is ending."""
        if session.arrival is not None:
            await self._sleep_until(self._start + session.arrival - LEAD_SECONDS)
        else:
            await asyncio.sleep(0)
        places = self._places
        if places is None or self._stopping.is_set():
            return not self._stopping.is_set()
        if not places.locked():
            await places.acquire()
            return not self._stopping.is_set()
        place = asyncio.ensure_future(places.acquire())
        stopped = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({place, stopped}, return_when=asyncio.FIRST_COMPLETED)
        place.cancel()
        stopped.cancel()
        self._place_free = time.perf_counter()
        return not self._stopping.is_set()

    async def _run_session(self, session: Session) -> None:
        try:
            # Before the start we only open connections.
            scheduled = None if session.arrival is None else self._start + session.arrival
            wanted = max(time.perf_counter(), self._start) if scheduled is None else scheduled
            await self._send_turns(session, scheduled, max(wanted, self._place_free))
        finally:
            if self._places is not None:
                self._places.release()

    async def _send_turns(self, session: Session, scheduled: float | None, due: float) -> None:
        request, prompt = self._first[session.number], session.turns[0].prompt
        for number, following in enumerate((*session.turns[1:], None)):
            asked = Asked(session, number, scheduled, due)
            pieces = await self._send_request(asked, request)
            if pieces is None or not self._keep_answer(asked, pieces):
                return
            if following is None or asked.failure or asked.cut_reason:
                return
            answer = read_answer(pieces, self._endpoint)
            is_chat = isinstance(self._endpoint, Chat)
            extended = extend_prompt(prompt, answer, following.prompt, chat=is_chat)
            if answer.error_kind is not None or extended is None:
                return
            prompt, scheduled = extended, None
            due = (answer.end or due) + following.think_time
            request = self._make_request(session, number + 1, prompt)

    def _keep_answer(self, asked: Asked, pieces: Sequence[Piece]) -> bool:
        """Keep an answer until the run is over. Without room for it end the run, because all later
        answers would be lost, too."""
        try:
            self._asked.append((asked, self._spool.add_pieces(pieces)))
        except OSError as error:
            where, why = tempfile.gettempdir(), error.strerror or error
            self.load.failure = f"answers cannot be kept in {where}: {why}"
            self.stop()
            return False
        return True

    async def _send_request(self, asked: Asked, request: bytes) -> list[Piece] | None:
        """Send a request when it is due and wait for its answer; None if the run ended before. Note
        a failure to connect in ``asked``."""
        # NOTE: we connect no earlier, because servers close silent connections.
        await self._sleep_until(asked.due - LEAD_SECONDS)
        if self._stopping.is_set():
            return None
        begin = time.perf_counter()
        try:
            reception = await self._connect()
        except OSError as error:
            if not self._stopping.is_set():
                asked.note_connection_error(error)
                self.progress.add_failure()
            elif asked.due > time.perf_counter():
                return None
            else:
                asked.note_interruption()
            return []
        connected = time.perf_counter()
        await self._sleep_until(asked.due)
        if self._stopping.is_set():
            reception.cut("interrupted")
            return None
        reception.send_request(request)
        asked.note_sent(begin, connected, reception.sent)
        self.progress.sent += 1
        self._running.add(reception)
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
        self._running.discard(reception)
        return reception.pieces

    async def _connect(self) -> Reception:
        """Open a connection. Raises OSError, at once if the run is ending."""
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

    async def _sleep_until(self, at: float) -> None:
        """Sleep until a time, or until the run is ending."""
        left = at - time.perf_counter()
        if left > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._stopping.wait()

    # ---- after the run

    @property
    def events(self) -> int:
        """Number of events so far."""
        return self.progress.events + sum(reception.events for reception in self._running)

    def make_records(self) -> Iterator[Record]:
        """Parse the answers and make their records."""
        for asked, place in self._asked:
            answer = read_answer(self._spool.read_pieces(place), self._endpoint)
            yield make_record(asked, answer, self._plan, self._start)


def extend_prompt(prompt: Prompt, answer: Answer, added: Prompt, *, chat: bool) -> Prompt | None:
    """Make the next prompt of a session: the conversation with the real answer, and a new turn.

    Args:
        prompt: the answered prompt.
        added: the user's new turn.
        chat: whether text is a message of a conversation, not the text itself.

    Returns:
        None if we need the answer's token ids and the server sent none.
    """
    if isinstance(prompt, str) and isinstance(added, str) and not chat:
        return f"{prompt}{answer.text} {added}"
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(added, str):
        message = {"role": "assistant", "content": answer.text}
        return [*prompt, message, {"role": "user", "content": added}]
    if answer.ids is None:
        return None
    return [*prompt, *answer.ids, *added]
