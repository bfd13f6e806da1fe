"""The step loop, the main loop of every node: plan a step, compute it, account for it."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from pd.core.errors import NodeFailedError, StepFailedError
from pd.core.exit import STUCK_PREFIX
from pd.core.seldom import Seldom
from pd.core.step_cost import StepShape
from pd.node.step_watch import StepWatch
from pd.scheduling.cost_model import shape_of
from pd.scheduling.step import LaunchedStep, Work, launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.engine.device_copy import DeviceTimer
    from pd.scheduling.combined import CombinedScheduler
    from pd.scheduling.core import NodeCore

logger = logging.getLogger(__name__)

_IDLE_WAIT = 0.05
# Steps take fractions of a second, but for kernels that are compiled in one.
STEP_LIMIT_SECONDS = 300.0
# A step is planned so long before the one before it is predicted to end as the host takes to plan
# and launch one, and by these seconds and this share of the predicted time more: predictions err.
_LEAD_SECONDS, _LEAD_SHARE = 0.003, 0.1
# The time to launch is a maximum that decays towards the last one by this share with each step.
_LAUNCH_DECAY = 0.1
# How often the device is asked whether a step is over.
_POLL_SECONDS = 0.002


class _Once:
    """Calls a function the first time that it is called.

    Attributes:
        seconds: how long the function took, so far 0.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        self.seconds = 0.0

    def __call__(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            began = time.monotonic()
            function()
            self.seconds = time.monotonic() - began


class StepLoop(threading.Thread):
    """Plans a step under the node's lock, computes it without, accounts for it under the lock.

    With overlap, the next step is planned and launched before the last one is accounted for, as
    long as :meth:`CombinedScheduler.may_plan_ahead` allows: while the GPU computes one step the CPU
    is busy with its neighbours. At most two steps are launched. Behind a step with prompt tokens, a
    node that knows how long its steps take plans shortly before that one ends, so that requests
    which arrive meanwhile, and answers that come from other nodes, wait for it alone.
    """

    def __init__(self, core: NodeCore, scheduler: CombinedScheduler) -> None:
        super().__init__(name="scheduler", daemon=True)
        self._core, self._scheduler = core, scheduler
        self._engine, self._events, self._rooms = core.engine, core.events, core.rooms
        self._overlap = core.engine.overlaps(core.config.overlap_schedule)
        self._launched: LaunchedStep | None = None
        self._no_drafts = Seldom(logger)
        # When the last step was complete.
        self._completed_at = 0.0
        # When the last step was accounted for, if the loop has been busy since.
        self._busy_since: float | None = None
        # When the launched step was seen to be over, if that was before the next was launched.
        self._over_at: float | None = None
        # Seconds in which the host plans and launches a step of prompt tokens alone, and one beside
        # answers.
        self._to_launch = [0.0, 0.0]
        # The last step, if the device tells how long it took.
        self._timed: tuple[StepShape, DeviceTimer] | None = None
        # The timer of the last step with drafts.
        self._timed_drafts: DeviceTimer | None = None
        # When the launch of the step behind the one to be accounted for began, if there is one.
        self._next_began: float | None = None
        self._watch = StepWatch()
        # What a drafter prepares between steps has times of its own.
        self._catch_up_watch = StepWatch()
        # Works of the steps that are under way.
        self._under_way: list[Work] = []
        self._stopping = False
        self._broken = False

    @property
    def running(self) -> bool:
        """Requests that are queued now will be computed."""
        return self.is_alive() and not (self._stopping or self._broken)

    @property
    def prompt_seconds_left(self) -> float:
        """Predicted seconds until the launched step is over, if it computes prompts. Any thread."""
        launched = self._launched
        if launched is None or not shape_of(launched.works).tokens:
            return 0.0
        return self._seconds_left(launched)

    @property
    def broken(self) -> bool:
        """Whether nothing will be computed any more."""
        return self._broken

    @property
    def stuck(self) -> bool:
        """Whether a step is under way for far longer than steps take. Any thread."""
        now = time.monotonic()
        return self._watch.is_stuck(now) or self._catch_up_watch.is_stuck(now)

    def stop(self) -> None:
        """End after the present step, unless that may never end."""
        self._stopping = True
        self._events.work_available.set()
        if self.is_alive():
            self.join(timeout=1 if self._broken else 30)
            if self.is_alive():
                self.name = STUCK_PREFIX + self.name

    def run(self) -> None:
        try:
            self._engine.activate()
            while not (self._stopping or self._broken):
                self._step()
            if self._launched is not None:
                self._account(self._launched)
        except Exception as error:
            # The node's state is wrong and nothing here can mend it.
            logger.critical("the scheduler failed", exc_info=True)
            self._break(f"the scheduler failed: {error!r}")

    def check_progress(self, now: float) -> None:
        """Fail all requests if a step has been under way for so long that it will not end. Any
        thread."""
        began = [watch.since for watch in (self._watch, self._catch_up_watch)]
        longest = max((now - since for since in began if since is not None), default=0.0)
        if longest > STEP_LIMIT_SECONDS and not self._broken:
            self.engine_failed(f"a step has not ended within {STEP_LIMIT_SECONDS:g} s")

    def engine_failed(self, reason: str) -> None:
        """Fail all requests: nothing can be computed any more. Any thread, during a step too."""
        logger.critical("the engine failed: %s", reason)
        self._break(f"the engine failed: {reason}")

    def _break(self, reason: str) -> None:
        """Fail all requests; the node is not ready any more."""
        self._broken = True
        with self._events.event():
            in_step = {work.sequence.request.room for work in self._under_way}
            for request in self._rooms:
                kind = StepFailedError if request.room in in_step else NodeFailedError
                try:
                    self._rooms.fail(request, kind(reason))
                except Exception:  # whatever is wrong with one, the others must end too
                    logger.exception("cannot end room %s", request.room.hex())
            self._rooms.outputs.flush()

    def _step(self) -> None:
        events, last = self._events, self._launched
        works: list[Work] = []
        if last is not None:
            self._wait_to_plan(last)
            if last.timer.measures and last.is_over:
                # The device is idle. Planning and launching a step may take the host longer
                # than the step took, and clients wait for its tokens.
                self._account(last)
                last = self._launched = None
                self._under_way = []
                self._watch.end()
        begins = None if last is None else partial(self._seconds_left, last)
        planned = time.monotonic()
        with events.event():
            # NOTE: cleared before planning, so that work which arrives later sets it again.
            events.work_available.clear()
            if last is None:
                self._rooms.closing.look_after_step()
            if last is None or self._scheduler.may_plan_ahead(last.works):
                works = self._scheduler.plan(begins)
        if not works and last is None:
            self._busy_since = None
            if not self._catch_up():
                events.work_available.wait(_IDLE_WAIT)
            return
        began = time.monotonic()
        under_way = works if last is None else [*last.works, *works]
        self._begin(self._watch.since or began, under_way)
        if last is not None and not works:
            # The next step depends on this one, and a GPU waits for it.
            self._account(last)
            with events.event():
                works = self._scheduler.plan()
            last, began = None, time.monotonic()
            self._begin(began, works)
        accounted = _Once(partial(self._account, last)) if last is not None else None
        self._next_began = began if last is not None else None
        self._launched = self._launch(works, last, accounted) if works else None
        if accounted is not None:
            beside = any(work.sequence.decodes for work in works)
            # A launch whose rules need the last step's tokens waits for that step.
            known, taken = self._to_launch[beside], time.monotonic() - planned - accounted.seconds
            self._to_launch[beside] = max(taken, known + _LAUNCH_DECAY * (taken - known))
        if accounted is not None:
            accounted()
        if self._launched is not None and not self._overlap:
            self._account(self._launched)
            self._launched = None
        if self._launched is not None:
            self._begin(began, works)
        else:
            self._under_way = []
            self._watch.end()
        with events.event():
            self._rooms.outputs.flush()

    def _wait_to_plan(self, launched: LaunchedStep) -> None:
        """Wait until a launched step with prompt tokens is about to end, if that can be predicted.
        Steps of answers alone are short, and launching one takes the host a good part of that."""
        costs = self._core.costs
        shape = shape_of(launched.works)
        if costs is None or not shape.tokens:
            return
        lead = self._to_launch[shape.streams > 0] + _LEAD_SECONDS
        lead += _LEAD_SHARE * costs.cost.seconds(shape)
        until = time.monotonic() + self._seconds_left(launched) - lead
        while (left := until - time.monotonic()) > 0 and not self._stopping:
            if launched.is_over:
                self._over_at = time.monotonic()
                return
            time.sleep(min(left, _POLL_SECONDS))

    def _seconds_left(self, launched: LaunchedStep) -> float:
        """Predicted seconds until a launched step ends; 0 where nothing is predicted."""
        costs = self._core.costs
        if costs is None or self._over_at is not None:
            return 0.0
        began = max(launched.began, self._completed_at)
        seconds = costs.cost.seconds(shape_of(launched.works))
        return max(0.0, began + seconds - time.monotonic())

    def _begin(self, since: float, works: list[Work]) -> None:
        """Steps of these works are under way since then."""
        self._under_way = works
        self._watch.begin(since, shape_of(works))

    def _catch_up(self) -> bool:
        """Let the drafter prepare for expected sequences; False if it has nothing to do."""
        drafter = self._core.drafter
        if drafter is None:
            return False
        began, size = time.monotonic(), StepShape()
        self._catch_up_watch.begin(began, size)
        try:
            if not drafter.catch_up():
                return False
            self._catch_up_watch.observe(began, time.monotonic(), size)
        except Exception as error:  # noqa: BLE001
            # Whatever it is, the model can go on without drafts.
            self._no_drafts.warn(f"nothing was prepared for drafts: {error!r}")
            return False
        finally:
            self._catch_up_watch.end()
        return True

    def _launch(
        self, works: list[Work], last: LaunchedStep | None, account: Callable[[], None] | None
    ) -> LaunchedStep | None:
        engine = self._engine
        try:
            layers_done = self._scheduler.on_layers_done(works)
            lengths = self._core.draft_lengths
            return launch(
                engine.runner,
                engine.sampler,
                works,
                layers_done,
                last,
                drafter=self._core.drafter,
                drafts=not lengths.rests,
                simulate=lengths.simulate,
                account=account,
            )
        except Exception as error:
            # Any error of a kernel or of torch. It concerns this step's requests only.
            logger.exception("a step failed")
            self._step_failed(works, StepFailedError(f"the step failed: {error}"))
            return None

    def _account(self, step: LaunchedStep) -> None:
        if self._over_at is None and self._next_began is not None and step.is_over:
            # It ended while the next one was launched, whose time counts from its launch then.
            self._over_at = self._next_began
        self._next_began = None
        try:
            step.complete()
        except Exception as error:
            # An error of a kernel, which the host learns of late.
            self._over_at = None
            logger.exception("a step failed")
            self._step_failed(step.works, StepFailedError(f"the step failed: {error}"))
            return
        self._observe(step)
        self._observe_pace(step.works)
        self._core.metrics.steps.inc()
        self._watch.observe(step.began, time.monotonic(), shape_of(step.works))
        if any(work.draft is not None for work in step.works):
            self._observe_drafts(step)
        with self._events.event():
            if self._broken:  # the pool need not hold the step's result
                self._forget(step.works)
            else:
                self._scheduler.process(step.works)
            self._rooms.closing.look_after_step()
            # NOTE: before rules are asked for masks of the next step, so that another thread sends
            # the tokens meanwhile.
            self._rooms.outputs.flush()

    def _observe(self, step: LaunchedStep) -> None:
        """Compare the time of a step with its prediction. Where the device does not tell how long
        it took, it counts from the end of the step before, while which it may have been launched.
        The device tells it one step later: what is drafted behind a step is a part of it."""
        now, last = self._over_at or time.monotonic(), self._completed_at
        self._completed_at, self._over_at = now, None
        costs = self._core.costs
        if costs is not None:
            shape, taken = shape_of(step.works), now - max(step.began, last)
            if step.timer.measures:
                timed, self._timed = self._timed, (shape, step.timer)
                if timed is None:
                    return
                shape, taken = timed[0], timed[1].seconds()
            if logger.isEnabledFor(logging.DEBUG):
                predicted = costs.cost.seconds(shape)
                logger.debug("%s: %.1f ms, predicted %.1f", shape, 1e3 * taken, 1e3 * predicted)
            with self._events.lock:
                error = self._scheduler.observe(shape, taken)
            self._core.metrics.step_errors.observe(abs(error))

    def _observe_drafts(self, step: LaunchedStep) -> None:
        """Count the time of a step with drafts. The device tells it one such step later, since what
        is drafted behind a step may not be over yet."""
        speculation = self._core.metrics.speculation
        if not step.timer.measures:
            took = time.monotonic() - step.began - step.draft_seconds
            speculation.observe_step(step.draft_seconds, took)
            return
        timed, self._timed_drafts = self._timed_drafts, step.timer
        if timed is not None:
            before, verified, behind = timed.parts()
            speculation.observe_step(before + behind, verified)

    def _observe_pace(self, works: list[Work]) -> None:
        """Tell what chooses draft lengths how long it is since the last step was accounted for."""
        if self._core.drafter is None:
            return
        now = time.monotonic()
        last, self._busy_since = self._busy_since, now
        if last is None or not all(work.is_decode for work in works):
            return
        asked = any(work.draft_limit or work.ahead_limit or work.draft for work in works)
        drafted = [work.draft.size for work in works if work.draft is not None]
        self._core.draft_lengths.took(now - last, len(works), drafted if asked else None)

    def _step_failed(self, works: list[Work], error: StepFailedError) -> None:
        """Fail the requests of a step that could not be computed; the node goes on."""
        # NOTE: the host waits for the GPU before any page changes its owner. On a broken GPU this
        # raises, and the node is not ready any more.
        self._engine.synchronize()
        with self._events.event():
            self._forget(works)
            for work in works:
                self._rooms.fail(work.sequence.request, error)
            self._rooms.outputs.flush()
            self._rooms.closing.look_after_step()

    @staticmethod
    def _forget(works: list[Work]) -> None:
        """Mark works of a step as over; their results are not used."""
        for work in works:
            if work.sequence.launched is work:
                work.sequence.launched = None
