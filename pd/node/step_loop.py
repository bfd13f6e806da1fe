"""The step loop, the main loop of every node: plan a step, compute it, account for it."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from pd.core.errors import NodeFailedError, StepFailedError
from pd.core.step_cost import StepShape
from pd.node.step_watch import StepWatch
from pd.scheduling.cost_model import step_shape
from pd.scheduling.step import LaunchedStep, Work, launch_step
from pd.util.exit import STUCK_PREFIX
from pd.util.warning_limit import WarningLimit

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.engine.device_copy import DeviceTimer
    from pd.scheduling.combined import CombinedScheduler
    from pd.scheduling.core import NodeCore

logger = logging.getLogger(__name__)

_IDLE_WAIT = 0.05
# Steps take fractions of a second, unless they compile kernels.
STEP_LIMIT_SECONDS = 300.0
# We plan a step ahead of the predicted end of the one before it. The lead is the time the host
# needs to plan and launch, plus these seconds and this share of the prediction, because predictions
# err.
_LEAD_SECONDS, _LEAD_SHARE = 0.003, 0.1
# The launch time is a maximum that decays by this share per step towards the last one.
_LAUNCH_DECAY = 0.1
# How often we ask the device whether a step has ended.
_POLL_SECONDS = 0.002


class _Once:
    """Calls a function at most once.

    Attributes:
        seconds: duration of the call, 0 before it.
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

    With overlap, we launch the next step before accounting for the last one, if
    :meth:`CombinedScheduler.may_plan_ahead` allows it. The CPU then prepares one step while the GPU
    computes another. At most two steps are launched. After a step with prompt tokens, we plan the
    next one as late as predictions of step times allow, so that it includes requests and answers
    that arrive meanwhile.
    """

    def __init__(self, core: NodeCore, scheduler: CombinedScheduler) -> None:
        super().__init__(name="scheduler", daemon=True)
        self._core, self._scheduler = core, scheduler
        self._engine, self._events, self._requests = core.engine, core.events, core.requests
        self._overlap = core.engine.plans_ahead(core.config.overlap_schedule)
        self._launched: LaunchedStep | None = None
        self._no_drafts = WarningLimit(logger)
        # When the last step was complete.
        self._completed_at = 0.0
        # When we last accounted for a step, if the loop has been busy since.
        self._busy_since: float | None = None
        # When we saw the launched step end, if that was before launching the next.
        self._over_at: float | None = None
        # Seconds in which the host plans and launches a prefill step, first without and then with
        # answers.
        self._to_launch = [0.0, 0.0]
        # The last step, if the device measures its time.
        self._timed: tuple[StepShape, DeviceTimer] | None = None
        # The timer of the last step with drafts.
        self._timed_drafts: DeviceTimer | None = None
        # When the launch of the following step began, if there is one.
        self._next_began: float | None = None
        self._watch = StepWatch()
        # The drafter's preparation between steps has times of its own.
        self._catch_up_watch = StepWatch()
        # Works of all launched steps.
        self._under_way: list[Work] = []
        self._stopping = False
        self._broken = False

    @property
    def running(self) -> bool:
        """Whether requests queued now will be computed."""
        return self.is_alive() and not (self._stopping or self._broken)

    @property
    def prompt_seconds_left(self) -> float:
        """Predicted seconds until the launched step ends, if it computes prompts. Any thread."""
        launched = self._launched
        if launched is None or not step_shape(launched.works).tokens:
            return 0.0
        return self._seconds_left(launched)

    @property
    def broken(self) -> bool:
        """Whether the engine can compute nothing any more."""
        return self._broken

    @property
    def stuck(self) -> bool:
        """Whether a step takes far longer than usual. Any thread."""
        now = time.monotonic()
        return self._watch.is_stuck(now) or self._catch_up_watch.is_stuck(now)

    def stop(self) -> None:
        """End after the current step, unless that step may never end."""
        self._stopping = True
        self._events.work_available.set()
        if self.is_alive():
            self.join(timeout=1 if self._broken else 30)
            if self.is_alive():
                self.name = STUCK_PREFIX + self.name

    def run(self) -> None:
        try:
            self._engine.activate_device()
            self._engine.sampler.rule_lanes.set_ready_callback(self._events.work_available.set)
            while not (self._stopping or self._broken):
                self._run_step()
            if self._launched is not None:
                self._account_for_step(self._launched)
        except Exception as error:
            # The node's state is wrong, and we cannot repair it.
            logger.critical("the scheduler failed", exc_info=True)
            self._break_down(f"the scheduler failed: {error!r}")

    def check_progress(self, now: float) -> None:
        """Fail all requests if a step has run for so long that it will not end. Any thread."""
        began = [watch.since for watch in (self._watch, self._catch_up_watch)]
        longest = max((now - since for since in began if since is not None), default=0.0)
        if longest > STEP_LIMIT_SECONDS and not self._broken:
            self.engine_failed(f"a step has not ended within {STEP_LIMIT_SECONDS:g} s")

    def engine_failed(self, reason: str) -> None:
        """Fail all requests, because nothing can be computed any more. Any thread, even during a
        step."""
        logger.critical("the engine failed: %s", reason)
        self._break_down(f"the engine failed: {reason}")

    def _break_down(self, reason: str) -> None:
        """Fail all requests and make the node unready."""
        self._broken = True
        with self._events.event():
            in_step = {work.sequence.request.room for work in self._under_way}
            for request in self._requests:
                kind = StepFailedError if request.room in in_step else NodeFailedError
                try:
                    self._requests.fail_request(request, kind(reason))
                except Exception:  # a failure to end one request must not spare the others
                    logger.exception("cannot end room %s", request.room.hex())
            self._requests.outputs.send_outputs()

    def _run_step(self) -> None:
        events, last = self._events, self._launched
        works: list[Work] = []
        if last is not None:
            self._wait_to_plan(last)
            if last.timer.has_measured and last.is_over:
                # The device is idle. We deliver its tokens first, because planning and launching
                # the next step may take the host longer than the step took.
                self._account_for_step(last)
                last = self._launched = None
                self._under_way = []
                self._watch.end_step()
        begins = None if last is None else partial(self._seconds_left, last)
        planned = time.monotonic()
        with events.event():
            # NOTE: cleared before planning, so that work arriving later sets it again.
            events.work_available.clear()
            if last is None:
                self._requests.closing.recheck_after_step()
            if last is None or self._scheduler.may_plan_ahead(last.works):
                works = self._scheduler.plan_step(begins)
        if not works and last is None:
            self._busy_since = None
            if not self._catch_up():
                events.work_available.wait(_IDLE_WAIT)
            return
        began = time.monotonic()
        under_way = works if last is None else [*last.works, *works]
        self._begin_step(self._watch.since or began, under_way)
        if last is not None and not works:
            # The next step depends on this one, and the GPU waits for it.
            self._account_for_step(last)
            with events.event():
                works = self._scheduler.plan_step()
            last, began = None, time.monotonic()
            self._begin_step(began, works)
        accounted = _Once(partial(self._account_for_step, last)) if last is not None else None
        self._next_began = began if last is not None else None
        self._launched = self._launch_step(works, last, accounted) if works else None
        if accounted is not None:
            beside = any(work.sequence.is_decoding for work in works)
            # A launch whose rules need the tokens of the last step waits for that step.
            known, taken = self._to_launch[beside], time.monotonic() - planned - accounted.seconds
            self._to_launch[beside] = max(taken, known + _LAUNCH_DECAY * (taken - known))
        if accounted is not None:
            accounted()
        if self._launched is not None and not self._overlap:
            self._account_for_step(self._launched)
            self._launched = None
        if self._launched is not None:
            self._begin_step(began, works)
        else:
            self._under_way = []
            self._watch.end_step()
        with events.event():
            self._requests.outputs.send_outputs()

    def _wait_to_plan(self, launched: LaunchedStep) -> None:
        """Wait until a prefill step is about to end, if that can be predicted.

        We do not wait for steps of answers alone, because they are hardly longer than a launch.
        """
        costs = self._core.costs
        shape = step_shape(launched.works)
        if costs is None or not shape.tokens:
            return
        lead = self._to_launch[shape.streams > 0] + _LEAD_SECONDS
        lead += _LEAD_SHARE * costs.cost.predict_seconds(shape)
        until = time.monotonic() + self._seconds_left(launched) - lead
        while (left := until - time.monotonic()) > 0 and not self._stopping:
            if launched.is_over:
                self._over_at = time.monotonic()
                return
            time.sleep(min(left, _POLL_SECONDS))

    def _seconds_left(self, launched: LaunchedStep) -> float:
        """Predict the seconds until a launched step ends; 0 without a prediction."""
        costs = self._core.costs
        if costs is None or self._over_at is not None:
            return 0.0
        began = max(launched.began, self._completed_at)
        seconds = costs.cost.predict_seconds(step_shape(launched.works))
        return max(0.0, began + seconds - time.monotonic())

    def _begin_step(self, since: float, works: list[Work]) -> None:
        """Note the works of all launched steps. The older step began at ``since``."""
        self._under_way = works
        self._watch.begin_step(since, step_shape(works))

    def _catch_up(self) -> bool:
        """Let the drafter prepare for expected sequences; False if it has nothing to do."""
        drafter = self._core.drafter
        if drafter is None:
            return False
        began, size = time.monotonic(), StepShape()
        self._catch_up_watch.begin_step(began, size)
        try:
            if not drafter.catch_up():
                return False
            self._catch_up_watch.observe_step(began, time.monotonic(), size)
        except Exception as error:  # noqa: BLE001
            # Whatever failed, the model works without drafts.
            self._no_drafts.log_warning(f"cannot prepare drafts: {error!r}")
            return False
        finally:
            self._catch_up_watch.end_step()
        return True

    def _launch_step(
        self, works: list[Work], last: LaunchedStep | None, account: Callable[[], None] | None
    ) -> LaunchedStep | None:
        engine = self._engine
        try:
            layers_done = self._scheduler.make_layer_sender(works)
            lengths = self._core.draft_lengths
            return launch_step(
                engine.runner,
                engine.sampler,
                works,
                layers_done,
                last,
                drafter=self._core.drafter,
                drafts=not lengths.is_resting,
                simulate=lengths.simulate,
                account=account,
            )
        except Exception as error:
            # Any error of a kernel or of torch. It affects only the requests of this step.
            logger.exception("a step failed")
            self._step_failed(works, StepFailedError(f"the step failed: {error}"))
            return None

    def _account_for_step(self, step: LaunchedStep) -> None:
        if self._over_at is None and self._next_began is not None and step.is_over:
            # It ended while we launched the next one, whose time then counts from its launch.
            self._over_at = self._next_began
        self._next_began = None
        try:
            step.complete()
        except Exception as error:
            # A kernel failed. The host learns it only now.
            self._over_at = None
            logger.exception("a step failed")
            self._step_failed(step.works, StepFailedError(f"the step failed: {error}"))
            return
        self._observe_time(step)
        self._observe_pace(step.works)
        self._core.metrics.steps.inc()
        self._watch.observe_step(step.began, time.monotonic(), step_shape(step.works))
        if any(work.draft is not None for work in step.works):
            self._observe_drafts(step)
        with self._events.event():
            if self._broken:  # the pool may lack the step's result
                self._forget_works(step.works)
            else:
                self._scheduler.process_step(step.works)
            self._requests.closing.recheck_after_step()
            # NOTE: before we ask rules for the masks of the next step, so that another thread sends
            # the tokens meanwhile.
            self._requests.outputs.send_outputs()

    def _observe_time(self, step: LaunchedStep) -> None:
        """Compare the time of a step with its prediction.

        If the device cannot measure it, the time counts from the end of the step before, during
        which this one may have been launched. If it can, we read it one step later, because it
        includes the drafting after the step.
        """
        now, last = self._over_at or time.monotonic(), self._completed_at
        self._completed_at, self._over_at = now, None
        costs = self._core.costs
        if costs is not None:
            shape, taken = step_shape(step.works), now - max(step.began, last)
            if step.timer.has_measured:
                timed, self._timed = self._timed, (shape, step.timer)
                if timed is None:
                    return
                shape, taken = timed[0], timed[1].read_seconds()
            if logger.isEnabledFor(logging.DEBUG):
                predicted = costs.cost.predict_seconds(shape)
                logger.debug("%s: %.1f ms, predicted %.1f", shape, 1e3 * taken, 1e3 * predicted)
            with self._events.lock:
                error = self._scheduler.observe_step(shape, taken)
            self._core.metrics.step_errors.observe(abs(error))

    def _observe_drafts(self, step: LaunchedStep) -> None:
        """Count the time of a step with drafts.

        We read the device's time one such step later, because the drafting after this one may still
        run.
        """
        speculation = self._core.metrics.speculation
        if not step.timer.has_measured:
            took = time.monotonic() - step.began - step.draft_seconds
            speculation.observe_step(step.draft_seconds, took)
            return
        timed, self._timed_drafts = self._timed_drafts, step.timer
        if timed is not None:
            before, verified, after = timed.read_parts()
            speculation.observe_step(before + after, verified)

    def _observe_pace(self, works: list[Work]) -> None:
        """Report the time since the last step to the chooser of draft lengths."""
        if self._core.drafter is None:
            return
        now = time.monotonic()
        last, self._busy_since = self._busy_since, now
        if last is None or not all(work.is_decode for work in works):
            return
        asked = any(work.draft_limit or work.ahead_limit or work.draft for work in works)
        drafted = [work.draft.size for work in works if work.draft is not None]
        self._core.draft_lengths.observe_time(now - last, len(works), drafted if asked else None)

    def _step_failed(self, works: list[Work], error: StepFailedError) -> None:
        """Fail the requests of a step that could not be computed. The node continues."""
        # NOTE: the host must wait for the GPU before any page changes owner. On a broken GPU this
        # raises and so makes the node unready.
        self._engine.synchronize()
        with self._events.event():
            self._forget_works(works)
            for work in works:
                self._requests.fail_request(work.sequence.request, error)
            self._requests.outputs.send_outputs()
            self._requests.closing.recheck_after_step()

    @staticmethod
    def _forget_works(works: list[Work]) -> None:
        """Detach sequences from the works of a step whose results we do not use."""
        for work in works:
            if work.sequence.launched_work is work:
                work.sequence.launched_work = None
