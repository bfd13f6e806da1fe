"""Where ended requests wait, and that every request has one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from requests_for_tests import make_request

from pd.scheduling.closing import ClosingQueue, check_queues
from pd.scheduling.request import Request, RequestState

if TYPE_CHECKING:
    from collections.abc import Callable


def taken(closing: ClosingQueue) -> list[Request]:
    found = []
    while (one := closing.take_due()) is not None:
        found.append(one[1])
    return found


def test_who_rests_is_due_again_only_when_something_let_go() -> None:
    closing = ClosingQueue()
    in_step, early, late = (make_request([1, 2]) for _ in range(3))
    in_step.sequence.launched_work = object()
    closing.defer_request(5.0, in_step)
    closing.defer_request(1.0, early)
    closing.defer_request(5.0, late)
    assert taken(closing) == []
    assert closing.has_transferring(4.0) and not closing.has_transferring(6.0)
    closing.recheck_transfers(since=4.0)
    assert taken(closing) == [late]
    closing.recheck_after_step()
    assert taken(closing) == [in_step]
    closing.recheck_transfers()
    assert taken(closing) == [early]
    assert not len(closing)


def _live_in_two_queues(live: Request, ended: Request, queued: list[Request]) -> None:
    queued.append(live)


def _live_in_none(live: Request, ended: Request, queued: list[Request]) -> None:
    queued.clear()


def _ended_in_a_queue(live: Request, ended: Request, queued: list[Request]) -> None:
    queued.append(ended)


def _ended_in_none(live: Request, ended: Request, queued: list[Request]) -> None:
    live.state = RequestState.FAILED
    queued.clear()


def _closing_though_it_lives(live: Request, ended: Request, queued: list[Request]) -> None:
    ended.state = RequestState.RUNNING


def _unknown(live: Request, ended: Request, queued: list[Request]) -> None:
    queued.append(make_request([3]))


@pytest.mark.parametrize(
    "damage",
    [
        _live_in_two_queues,
        _live_in_none,
        _ended_in_a_queue,
        _ended_in_none,
        _closing_though_it_lives,
        _unknown,
    ],
)
def test_the_check_finds_a_request_in_a_wrong_place(
    damage: Callable[[Request, Request, list[Request]], None],
) -> None:
    live, ended = make_request([1, 2]), make_request([1, 2])
    ended.state = RequestState.DONE
    closing = ClosingQueue()
    closing.add_request(ended)
    queued = [live]

    def check() -> None:
        check_queues([live, ended], closing, [request.sequence for request in queued])

    check()
    damage(live, ended, queued)
    with pytest.raises(AssertionError):
        check()
