"""Every staging buffer has one owner, whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pd.transfer.staged.buffer_pool import BufferPair, BufferPool


class Buffers(RuleBasedStateMachine):
    """A pool beside a model of it, in which each buffer has the name of its owner."""

    @initialize(count=st.integers(0, 6))
    def make(self, count: int) -> None:
        self.pool = BufferPool(count)
        self.source = dict.fromkeys(range(count), "free")
        self.target = dict.fromkeys(range(count), "free")
        self.pairs: list[BufferPair] = []

    def owned(self, by: str) -> list[int]:
        return [number for number, owner in self.target.items() if owner == by]

    def pairs_of(self, owner: str) -> list[BufferPair]:
        return [pair for pair in self.pairs if self.target[pair.target] == owner]

    def move(self, pair: BufferPair, source: str, target: str) -> None:
        self.source[pair.source], self.target[pair.target] = source, target

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def take(self) -> None:
        pair = self.pool.take_pair()
        assert (self.source[pair.source], self.target[pair.target]) == ("free", "free")
        self.pairs.append(pair)
        self.move(pair, "taken", "taken")

    @precondition(lambda self: not self.pool.num_free)
    @rule()
    def take_too_many(self) -> None:
        with pytest.raises(IndexError):
            self.pool.take_pair()

    @precondition(lambda self: self.pairs_of("taken"))
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(self.pairs_of("taken")))
        self.pool.put_back(pair)
        self.pairs.remove(pair)
        self.move(pair, "free", "free")

    @precondition(lambda self: self.pairs_of("taken"))
    @rule(data=st.data())
    def begin_write(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(self.pairs_of("taken")))
        self.pool.begin_write(pair)
        self.move(pair, "flying", "flying")

    @precondition(lambda self: self.pairs_of("flying"))
    @rule(data=st.data())
    def end_write(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(self.pairs_of("flying")))
        self.pool.end_write(pair.target)
        self.pairs.remove(pair)
        self.move(pair, "free", "held")

    @rule(wanted=st.lists(st.integers(0, 7), max_size=4))
    def release(self, wanted: list[int]) -> None:
        """As D asks, which may ask for anything."""
        if set(wanted) <= set(self.owned("held")) and len(set(wanted)) == len(wanted):
            self.pool.release_targets(wanted)
            self.target.update(dict.fromkeys(wanted, "free"))
        else:
            with pytest.raises(ValueError, match="of which it holds only"):
                self.pool.release_targets(wanted)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def confuse(self, data: st.DataObject) -> None:
        """A call for a pair that is elsewhere changes nothing."""
        pair = data.draw(st.sampled_from(self.pairs))
        if self.target[pair.target] == "taken":
            with pytest.raises(KeyError):
                self.pool.end_write(pair.target)
        else:
            for call in (self.pool.put_back, self.pool.begin_write):
                with pytest.raises(KeyError):
                    call(pair)

    @invariant()
    def one_owner(self) -> None:
        pool = self.pool
        sources = [*pool._sources, *pool._taken.values(), *pool._flying.values()]
        targets = [*pool._targets, *pool._taken, *pool._flying, *pool._held]
        assert sorted(sources) == sorted(self.source), "each of P's is in one place"
        assert sorted(targets) == sorted(self.target), "each of D's is in one place"
        assert len(pool._sources) >= len(pool._targets), "whenever D has a free one, P has"
        for owner, found in (
            ("free", set(pool._targets)),
            ("taken", set(pool._taken)),
            ("flying", set(pool._flying)),
            ("held", pool._held),
        ):
            assert found == set(self.owned(owner))
            assert getattr(pool, f"num_{owner}") == len(found)
        assert {s for s, owner in self.source.items() if owner == "free"} == set(pool._sources)


TestBuffers = Buffers.TestCase


def test_the_buffer_that_became_free_last_is_taken_first() -> None:
    pool = BufferPool(3)
    assert pool.take_pair() == BufferPair(0, 0), "a link's first write goes there"
    pool.begin_write(BufferPair(0, 0))
    pool.end_write(0)
    assert pool.take_pair() == BufferPair(0, 1), "D still holds its buffer"
    pool.release_targets([0])
    assert pool.take_pair() == BufferPair(1, 0)
