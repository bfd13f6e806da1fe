"""Sequences that run while the first in line waits for pages, counted in steps."""

from __future__ import annotations

from decode_bench import DecodeBench
from hypothesis import given, settings
from hypothesis import strategies as st


def test_who_holds_its_pages_runs_while_a_large_retracted_sequence_waits_for_some() -> None:
    bench = DecodeBench(pages=64)
    manager = bench.scheduler
    first = bench.add(prompt_len=120, max_tokens=100)
    large = bench.add(prompt_len=80, max_tokens=60)
    while not manager.retracted:
        bench.step()
    assert list(manager.retracted) == [large], "the cheapest to resume"
    # Transfers that were under way are committed now.
    small = [bench.add(prompt_len=6, max_tokens=9) for _ in range(6)]
    bench.batches.clear()
    while not bench.ended:
        bench.step()
    assert min(bench.batches) == 7
    assert set(bench.ended) <= {sequence.request for sequence in small}
    bench.run()
    assert bench.ended[-2:] == [first.request, large.request]
    assert manager._host_used == 0


def test_memory_that_comes_free_is_the_retracted_sequences_first() -> None:
    bench = DecodeBench(pages=40, max_running=8)
    manager = bench.scheduler
    first = bench.add(prompt_len=76, max_tokens=60)
    second = bench.add(prompt_len=40, max_tokens=60)
    while not manager.retracted:
        bench.step()
    (retracted,) = manager.retracted
    assert retracted is second and manager.lacks_memory is False
    bench.step()
    assert manager.lacks_memory, "nobody new is given memory"
    while retracted in manager.retracted:
        assert manager.lacks_memory and bench.step()
    assert first.request in bench.ended
    bench.run()
    assert not manager.lacks_memory


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(2, 60)), min_size=1, max_size=14),
    st.integers(26, 60),
    st.integers(1, 10),
)
def test_everybody_ends(sizes: list[tuple[int, int]], pages: int, max_running: int) -> None:
    bench = DecodeBench(pages=pages, max_running=max_running)
    manager, left = bench.scheduler, list(sizes)
    for _ in range(2000):
        # As on a node: no request is given memory while somebody here waits for some.
        while left and not manager.retracted and not manager.lacks_memory:
            prompt_len, max_tokens = left[0]
            if bench.memory.pages_for(prompt_len) > bench.memory.num_available:
                break
            bench.add(prompt_len, max_tokens)
            left.pop(0)
        if not left and len(bench.ended) == len(bench.requests):
            return
        if not bench.step():  # who ran alone was retracted
            assert bench.step(), "somebody gets on"
    raise AssertionError("somebody starves")
