"""Pages of sliding windows: given up when no later token sees them, cached, matched and evicted."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from requests_for_tests import make_request

from pd.engine.page_allocator import NO_PAGE, PageState
from pd.radix import RadixCache
from pd.scheduling.memory import Memory
from pd.scheduling.window_pages import SPARE_TOKENS, find_first_kept

if TYPE_CHECKING:
    from pd.scheduling.request import Sequence


def make_memory(num_pages: int, page_size: int, *windows: int) -> Memory:
    radix = RadixCache(page_size, num_windows=len(windows))
    return Memory(num_pages, page_size, radix, windows=windows)


class Cell:
    """One kind of attention layers that writes and reads a pool. A slot holds the tokens that its
    KV depends on, and which table it belongs to."""

    def __init__(self, memory: Memory, windows: tuple[int, ...]) -> None:
        self.memory, self.windows = memory, (0, *windows)
        self.slots: dict[tuple[int, int], tuple[int, bytes]] = {}

    def forget_free(self) -> None:
        """Spoil all free pages, so reading one fails."""
        free = set(self.memory.allocator.find_pages(PageState.FREE).tolist())
        self.slots = {slot: kv for slot, kv in self.slots.items() if slot[0] not in free}

    def compute(self, sequence: Sequence, stop: int) -> None:
        """Compute tokens up to ``stop``. Each reads the window before it, and writes its own KV."""
        for position in range(sequence.num_computed, stop):
            self.write(sequence, position)
            self.read(sequence, position)
        sequence.num_computed = stop

    def write(self, sequence: Sequence, position: int) -> None:
        size = self.memory.page_size
        for table, pages in enumerate(np.atleast_2d(sequence.tables)):
            page = int(pages[position // size])
            assert page != NO_PAGE, f"table {table} has no page for token {position}"
            kv = table, self.state(sequence, position)
            assert self.slots.get((page, position % size), kv) == kv or self.owns(
                sequence, table, position // size
            ), "a page in the tree was overwritten"
            self.slots[page, position % size] = kv

    @staticmethod
    def state(sequence: Sequence, position: int) -> bytes:
        return sequence.request.namespace.encode() + sequence.tokens[: position + 1].tobytes()

    @staticmethod
    def owns(sequence: Sequence, table: int, column: int) -> bool:
        owned = sequence.owned if table == 0 else sequence.window_owned[table - 1]
        return bool(owned[column])

    def read(self, sequence: Sequence, position: int) -> None:
        """Read all that a token sees."""
        size = self.memory.page_size
        tables = np.atleast_2d(sequence.tables)
        for (table, pages), window in zip(enumerate(tables), self.windows, strict=True):
            first = max(0, position - window + 1) if window else 0
            for seen in range(first, position + 1):
                found = self.slots.get((int(pages[seen // size]), seen % size))
                assert found == (table, self.state(sequence, seen)), (
                    f"token {position} sees {found} instead of token {seen} in table {table}"
                )

    def check(self, sequences: list[Sequence]) -> None:
        self.memory.check_owners(sequences, ())
        counts = self.memory.count_pages()
        assert sum(counts.values()) == 2 * counts["total"]
        self.forget_free()


TEXTS = [np.random.default_rng(n).integers(0, 3, 90).astype(np.int32) for n in range(3)]


def draw_prompt(rng: random.Random) -> list[int]:
    """Draw a prompt that often begins like another one."""
    text = rng.choice(TEXTS)[: rng.randrange(1, 90)].tolist()
    return text + [rng.randrange(3) for _ in range(rng.randrange(8))]


@pytest.mark.parametrize("windows", [(7,), (1,), (20, 3)])
@given(seed=st.integers(0, 1 << 32), page_size=st.sampled_from([1, 4, 16]))
@settings(max_examples=25, deadline=None)
def test_whatever_is_matched_has_the_tokens_of_a_tree_without_windows(
    windows: tuple[int, ...], seed: int, page_size: int
) -> None:
    check_interleaving(windows, seed, page_size, 30)


@pytest.mark.full
@pytest.mark.parametrize("windows", [(7,), (1,), (20, 3), (64,)])
@given(seed=st.integers(0, 1 << 32), page_size=st.sampled_from([1, 2, 4, 16]))
@settings(max_examples=40, deadline=None)
def test_long_interleavings_of_windows(windows: tuple[int, ...], seed: int, page_size: int) -> None:
    check_interleaving(windows, seed, page_size, 100)


def check_interleaving(windows: tuple[int, ...], seed: int, page_size: int, steps: int) -> None:
    """Run sequences in a small pool, and compare matches with a tree that forgets nothing."""
    rng = random.Random(seed)
    tables = 1 + len(windows)
    memory = make_memory(rng.randrange(2, 5) * tables * -(-110 // page_size), page_size, *windows)
    cell, plain = Cell(memory, windows), RadixCache(page_size)
    live: list[Sequence] = []
    for _ in range(steps):
        action = rng.choice(["start", "start", "compute", "compute", "append", "end", "flush"])
        if action == "start" and len(live) < 5:
            sequence = make_request(draw_prompt(rng), namespace=rng.choice(["", "a"])).sequence
            # A prompt for another node keeps more of its windows.
            sequence.request.outgoing = rng.choice([None, None, object()])  # type: ignore[assignment]
            length = sequence.num_tokens
            missing = memory.count_missing(sequence, length, length - 1)
            counted = memory.count_cached(sequence, length - 1)
            matched = memory.match_prefix(sequence, length - 1)
            ids, namespace = sequence.ids, sequence.request.namespace
            assert matched == counted
            assert matched <= plain.count_cached(ids, namespace, max_tokens=length - 1)
            if matched:  # its last token may be computed again
                cell.read(sequence, matched - 1)
            assert missing == memory.count_growth(sequence, length)
            if missing > memory.num_available or not memory.grow_pages(sequence, length):
                memory.release_pages(sequence)
            else:
                live.append(sequence)
        elif live and action == "compute":
            sequence = rng.choice(live)
            stop = min(sequence.num_tokens, sequence.num_computed + rng.randrange(1, 40))
            cell.compute(sequence, stop)
            if rng.random() < 0.7:
                memory.cache_tokens(sequence)
                whole = stop // page_size
                plain.insert_prefix(
                    sequence.ids[: whole * page_size],
                    np.zeros(whole, np.int32),
                    sequence.request.namespace,
                )
            memory.drop_passed(sequence)
        elif live and action == "append":
            sequence = rng.choice(live)
            done = sequence.num_computed == sequence.num_tokens
            if done and memory.grow_pages(sequence, sequence.num_tokens + 1):
                sequence.append_token(rng.randrange(3))
        elif live and action == "end":
            sequence = live.pop(rng.randrange(len(live)))
            memory.cache_tokens(sequence)
            whole = sequence.num_computed // page_size
            plain.insert_prefix(
                sequence.ids[: whole * page_size],
                np.zeros(whole, np.int32),
                sequence.request.namespace,
            )
            memory.release_pages(sequence)
        elif action == "flush" and rng.random() < 0.1:
            memory.flush_cache()
        cell.check(live)
    for sequence in live:
        memory.release_pages(sequence)
    cell.check([])
    memory.flush_cache()
    assert memory.count_pages()["free"] == memory.num_pages


def start(memory: Memory, tokens: list[int], received: int = 0) -> Sequence | None:
    """Give a new sequence pages for all its tokens; None if there are not enough."""
    sequence = make_request(tokens).sequence
    memory.match_prefix(sequence, len(tokens) - 1)
    state = PageState.RESERVED if received else PageState.OWNED
    if memory.grow_pages(sequence, len(tokens), state, received):
        return sequence
    memory.release_pages(sequence)
    return None


def prefill(memory: Memory, tokens: list[int], chunk: int) -> Sequence | None:
    """Do what a node does with a prompt."""
    sequence = start(memory, tokens)
    if sequence is not None:
        while sequence.num_computed < len(tokens):
            sequence.num_computed = min(len(tokens), sequence.num_computed + chunk)
            memory.cache_tokens(sequence)
            memory.drop_passed(sequence)
    return sequence


def count_held(*windows: int) -> int:
    """Count the prompts of 32k tokens that a pool holds which has room for ten in all layers."""
    tables, length, size = 1 + len(windows), 32768, 16
    memory = make_memory(10 * tables * length // size, size, *windows)
    for number in range(100):
        tokens = [number, *[0] * (length - 1)]
        sequence = prefill(memory, tokens, 8192)
        if sequence is None:
            return number
        # An answer begins, so the sequence holds its pages.
        assert sequence.num_computed == length
    raise AssertionError("the pool holds any number of prompts")


def test_half_of_the_layers_with_a_short_window_hold_almost_twice_the_tokens() -> None:
    # The same memory. The pages of two tables are half as large, so there are twice as many.
    assert count_held(128) >= 1.8 * count_held()


def test_answers_hold_no_more_than_their_windows() -> None:
    memory = make_memory(64, 4, 8)
    sequence = prefill(memory, list(range(20)), 20)
    assert sequence is not None
    for token in range(60):
        assert memory.grow_pages(sequence, sequence.num_tokens + 1)
        sequence.append_token(token)
        sequence.num_computed += 1
        memory.drop_passed(sequence)
        assert np.count_nonzero(sequence.window_pages != NO_PAGE) <= 8 // 4 + 2
    memory.check_owners([sequence], ())


def test_pages_inside_of_a_prompt_are_evicted_before_its_end_and_other_prefixes() -> None:
    memory = make_memory(40, 4, 8)
    old, new = list(range(100, 140)), list(range(40))
    for tokens in (old, new):
        sequence = prefill(memory, tokens, 16)
        assert sequence is not None
        memory.release_pages(sequence)
    assert memory.count_pages() == memory.count_pages() | {"free": 0, "cached": 40}
    branch = make_request([*new[:20], 7, 7, 7]).sequence
    assert memory.count_cached(branch, 22) == 20
    # Of the ten pages of each window all but the last two are inside.
    taken = start(memory, list(range(200, 232)))
    assert taken is not None and memory.radix.evicted_pages == 0
    assert memory.count_cached(branch, 22) == 0
    for tokens in (old, new):
        assert memory.count_cached(make_request([*tokens, 7]).sequence, 40) == 40
    memory.check_owners([taken], ())


def test_a_branch_that_was_matched_is_kept_for_others() -> None:
    memory = make_memory(40, 4, 8)
    common = list(range(20))
    for rest in ([50] * 20, [60] * 20):
        sequence = prefill(memory, common + rest, 40)
        assert sequence is not None
        memory.release_pages(sequence)
    taken = start(memory, list(range(200, 224)))
    assert taken is not None
    assert memory.count_cached(make_request([*common, 70]).sequence, 20) == 20
    memory.check_owners([taken], ())


def test_a_prefix_does_not_match_when_another_one_has_its_pages() -> None:
    memory = make_memory(24, 4, 8)
    old = prefill(memory, list(range(40)), 40)
    assert old is not None and memory.windows is not None
    inner = set(memory.windows._inner)
    assert memory.windows.evict_inner(100) == len(inner) == 8
    new = prefill(memory, list(range(100, 116)), 16)
    assert new is not None
    cached = memory.windows.check_owners([old, new])
    assert inner & set(cached.tolist()), "the test needs a page that is cached again"
    assert memory.count_cached(make_request([*range(20), 7]).sequence, 20) == 0


def test_a_tree_takes_pages_for_a_prefix_that_lost_them() -> None:
    memory = make_memory(60, 4, 8)
    tokens = list(range(40))
    first = prefill(memory, tokens, 40)
    assert first is not None and memory.windows is not None
    memory.windows.evict_inner(100)
    branch = make_request([*tokens[:20], 7]).sequence
    assert memory.count_cached(branch, 20) == 0
    second = prefill(memory, [*tokens[:20], 7, 7, 7, 7], 24)
    assert second is not None
    assert memory.count_cached(branch, 20) == 20
    memory.check_owners([first, second], ())


@pytest.mark.parametrize("page_size", [1, 16, 64, 512])
def test_a_decode_node_needs_only_what_a_prefill_node_keeps(page_size: int) -> None:
    for length in (5, 700, 1000, 1023, 1024, 4000):
        memory = make_memory(10000, page_size, 128)
        sequence = start(memory, [1] * length, received=length)
        assert sequence is not None
        cached, needed = memory.count_held(sequence, 0, (0, 128))
        assert cached == 0
        assert find_first_kept(length, 128) <= needed <= max(0, length - 128)
        held = np.flatnonzero(sequence.window_pages[0] != NO_PAGE)
        assert held[0] * page_size <= needed and held[-1] + 1 == memory.pages_for(length)
        memory.own_reserved(sequence)
        sequence.num_computed = length
        memory.cache_tokens(sequence)
        whole = length // page_size * page_size
        kept = page_size <= SPARE_TOKENS // 2 or needed % page_size == 0
        again = make_request([1] * length).sequence
        assert memory.count_cached(again, length) == (whole if kept else 0)
        memory.check_owners([sequence], ())


def test_pages_found_by_a_decode_node_but_before_the_window_are_given_up() -> None:
    memory = make_memory(200, 4, 8)
    turn = list(range(40))
    first = prefill(memory, turn, 40)
    assert first is not None
    memory.release_pages(first)
    second = start(memory, turn + [9] * 60, received=100)
    assert second is not None
    assert memory.count_held(second, 36, (0, 8)) == (36, 92)
    assert np.flatnonzero(second.window_pages[0] != NO_PAGE).tolist() == [23, 24]
    memory.check_owners([second], ())
    quarantined = memory.quarantine_pages(second)
    memory.check_owners([], [quarantined])
    memory.end_quarantine(quarantined)
    memory.check_owners([], ())


def test_a_leased_prompt_keeps_its_last_window() -> None:
    memory = make_memory(40, 4, 8)
    request = make_request(list(range(40)), prefix_lease=60.0)
    sequence = request.sequence
    memory.match_prefix(sequence, 39)
    assert memory.grow_pages(sequence, 40)
    sequence.num_computed = 40
    memory.cache_tokens(sequence)
    memory.lease_prompt(request)
    sequence.num_tokens = 39  # as if an answer went on
    assert memory.windows is not None
    memory.windows.drop_passed(sequence, 60, None)
    memory.windows.evict_inner(100)
    assert memory.count_cached(make_request([*range(40), 7]).sequence, 40) == 40
