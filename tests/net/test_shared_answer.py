"""Simultaneous callers share one answer. It is never older than their calls."""

from __future__ import annotations

import asyncio

import pytest

from pd.net.shared_answer import SharedAnswer


def test_many_callers_share_few_answers_and_get_no_old_one() -> None:
    begun = 0

    async def make() -> int:
        nonlocal begun
        begun += 1
        mine = begun
        await asyncio.sleep(0.001)
        return mine

    async def ask(answer: SharedAnswer[int], after: float) -> None:
        await asyncio.sleep(after)
        before = begun
        assert await answer.get_answer() > before

    async def run() -> None:
        answer = SharedAnswer(make)
        await asyncio.gather(*(ask(answer, number % 50 / 1000) for number in range(1000)))

    asyncio.run(run())
    assert 1 < begun < 50


def test_cancelled_callers_do_not_end_the_answer_and_errors_reach_all() -> None:
    async def fail() -> int:
        await asyncio.sleep(0.01)
        raise ValueError("it is broken")

    async def run() -> None:
        answer = SharedAnswer(fail)
        first, second = (asyncio.ensure_future(answer.get_answer()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(ValueError, match="broken"):
            await second
        with pytest.raises(ValueError, match="broken"):
            await answer.get_answer()

    asyncio.run(run())
