"""A backend hears of KV when it is in the pool: at once, if nothing is computed before it."""

from __future__ import annotations

import threading

import pytest
import torch

from pd.transfer.computed import Computed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def computed():
    computed = Computed(DEVICE, "test")
    yield computed
    computed.close()


def test_what_stands_beside_a_long_step_does_not_wait_for_it(computed: Computed) -> None:
    # The first use of a kernel loads it, which waits for the GPU.
    value = torch.full((1,), -1.0, device=DEVICE)
    value += 1
    torch.cuda._sleep(1)
    beside = torch.cuda.Stream(DEVICE)
    seen, over = [], threading.Event()

    def behind(reason: str) -> None:
        with torch.cuda.stream(beside):
            seen.append((reason, value.item(), threading.get_ident()))
        over.set()

    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 30)  # about half a second
    value += 1
    computed.call_when_done(behind)
    with torch.cuda.stream(beside):
        computed.call_when_done(lambda reason: seen.append((reason, 0.0, threading.get_ident())))
    assert seen == [("", 0.0, threading.get_ident())], "what was there waited"
    assert over.wait(10.0)
    (reason, found, thread) = seen[1]
    assert (reason, found) == ("", 1.0)
    assert thread != threading.get_ident()


def test_calls_come_in_the_order_of_the_steps(computed: Computed) -> None:
    seen: list[int] = []
    torch.cuda._sleep(1 << 30)  # so that all have to wait
    for number in range(50):
        torch.cuda._sleep(1 << 20)
        computed.call_when_done(lambda _, number=number: seen.append(number))
    computed.close()
    assert seen == list(range(50))
