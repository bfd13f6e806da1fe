"""The eviction order is a sorted map, however its chunks are cut."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pd.radix import TreeNode
from pd.radix.order import EvictionOrder


def node() -> TreeNode:
    return TreeNode(None, b"", b"", None)  # type: ignore[arg-type]


@given(chunk_size=st.sampled_from((2, 3, 8, 13)), toggled=st.permutations(range(-40, 41)))
@settings(deadline=None)
def test_agrees_with_a_sorted_dictionary(chunk_size: int, toggled: list[int]) -> None:
    """Keys come in any order and leave in another, with some coming and going in between."""
    order, expected = EvictionOrder(chunk_size), dict[int, TreeNode]()
    for key in [*toggled, *toggled[::3], *toggled[::2], *toggled[1::3], *sorted(toggled)]:
        if key in expected:
            del expected[key]
            order.remove_key(key)
        else:
            expected[key] = node()
            order.add_leaf(key, expected[key])
        assert list(order) == sorted(expected.items())
        assert len(order) == len(expected)
        assert order.find_first() is expected.get(min(expected, default=0))
        above = [other for other in expected if other >= key]
        assert order.find_first_from(key) is (expected[min(above)] if above else None)


def test_chunks_stay_bounded_and_few_when_old_entries_always_move_to_the_end() -> None:
    order, size, chunk_size = EvictionOrder(chunk_size=16), 1000, 16
    for key in range(size):
        order.add_leaf(key, node())
    for key in range(20 * size):
        order.remove_key(key)
        order.add_leaf(key + size, node())
        assert len(order._chunks) <= 2 * size / (chunk_size / 4)
    assert max(map(len, order._chunks)) <= chunk_size


def test_chunks_merge_when_most_entries_leave() -> None:
    order = EvictionOrder(chunk_size=16)
    for key in range(4096):
        order.add_leaf(key, node())
    for key in range(4096):
        if key % 16:
            order.remove_key(key)
    assert len(order) == 256
    assert len(order._chunks) <= 2 * 256 / (16 / 4)
